"""Files that appear whole or not at all.

They are written under a hidden ``.partial`` name in the same folder and renamed when complete. A run that is
killed leaves such a file behind; no reader looks at it, and it can be deleted at any time. Elsewhere than on this
machine's disks the storage keeps the same promise.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from penstock.storage import Forbidden, NotFound, Storage, Upload, redacted

log = logging.getLogger(__name__)


class Draft(Protocol):
    """A file on its way: nothing is visible before ``publish``."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""

    def publish(self) -> os.stat_result | None:
        """Make it visible, whole; what the system says about it, where it is a file of this machine."""

    def drop(self) -> None:
        """Leave nothing behind; a second time, or after ``publish``, it does nothing."""


class FileDraft:
    """A hidden file beside its target, made by the first write: until then there is nothing to clean up."""

    def __init__(self, target: Path, before: Callable[[], object]) -> None:
        """Begin.

        Args:
            target: The name it will have.
            before: Called right before it gets that name.
        """
        self._target, self._before = target, before
        self._partial = partial_path(target)
        self._file: BinaryIO | None = None

    def write(self, data: bytes | memoryview) -> None:
        file, left = self._file or self._opened(), memoryview(data)
        while left:
            left = left[file.write(left) :]

    def fileno(self) -> int:
        """The file that is written, for those who let the system write to it."""
        return (self._file or self._opened()).fileno()

    def publish(self) -> os.stat_result | None:
        file = self._file or self._opened()
        os.fsync(file.fileno())
        status = os.fstat(file.fileno())
        file.close()
        self._before()
        self._partial.replace(self._target)
        return status

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def _opened(self) -> BinaryIO:
        self._file = cast(BinaryIO, open(self._partial, "xb", buffering=0))  # noqa: SIM115
        return self._file


class UploadDraft:
    """An object of a storage on its way."""

    def __init__(self, upload: Upload, before: Callable[[], object]) -> None:
        """Begin; ``before`` is called right before the object becomes visible."""
        self._upload, self._before = upload, before
        self.write = upload.write

    def publish(self) -> os.stat_result | None:
        self._before()
        self._upload.commit()
        return None

    def drop(self) -> None:
        self._upload.abort()


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


def put_object(storage: Storage, url: str, data: bytes) -> None:
    """Write a small object at once.

    Raises:
        StorageError: It cannot be written.
    """
    with storage.put(url, size_hint=len(data)) as upload:
        upload.write(data)
        upload.commit()


def read_object(storage: Storage, url: str, *, optional: bool = False) -> bytes | None:
    """Read a small object; None where there is none.

    ``optional`` is for those who can do without: servers that may not be listed, and those of URLs that were signed for
    one object, forbid what is not there.

    Raises:
        StorageError: It is there and cannot be read, or nobody says whether it is.
    """
    try:
        return b"".join(storage.stream(url))
    except NotFound:
        return None
    except Forbidden:
        if not optional:
            raise
        log.info("%s may not be read; going on without", redacted(url))
        return None
