"""Files that appear whole or not at all.

They are written under a hidden ``.partial`` name in the same folder and renamed when complete. A run that is
killed leaves such a file behind; no reader looks at it, and it can be deleted at any time.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def partial_path(target: Path) -> Path:
    """Give a fresh hidden name in the folder of ``target``, to be renamed to it later."""
    return target.with_name(f".{target.name[:180]}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def replace_file(target: Path, data: bytes, durable: bool = True) -> None:
    """Write a small file at once; others see the old content or the new, never a part.

    Args:
        target: The file.
        data: Its content.
        durable: Wait until the content is on the disk (slow); not needed for what can be made again.

    Raises:
        OSError: The folder cannot be written.
    """
    partial = partial_path(target)
    try:
        with partial.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
