"""Drafts: files and objects that are written under a hidden name and published whole or not at all.

A local file is written under a hidden ``.partial`` name in its folder and renamed when it is complete. A process that
is killed leaves such a file behind: readers ignore it, and it can be deleted at any time. Remote storages keep the
same promise by their uploads. What is written to a FIFO or a device arrives at once.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from penstock.errors import DataError
from penstock.storage import Forbidden, NotFound, Storage, Upload, redacted
from penstock.storage.local import is_special

MAX_OBJECT = 256 << 20  # bytes: the index of five million samples, or the manifest of a million shards
_UPLOAD_CHUNK_BYTES = 8 << 20
log = logging.getLogger(__name__)


class Draft(Protocol):
    """A file or object that is being written; it is invisible before ``publish``."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""

    def publish(self) -> os.stat_result | None:
        """Make the draft visible, whole; return the status of a local file, None for a remote object."""

    def drop(self) -> None:
        """Delete the draft; do nothing if it was dropped or published before."""


class FileDraft:
    """A hidden file beside its target; the first write creates it, so an unused draft leaves nothing to clean up.

    The file that a link leads to is replaced, not the link. A FIFO or a device is written to directly.

    Attributes:
        special: Whether the target is a FIFO or a device.
    """

    def __init__(self, target: Path, before_publish: Callable[[], object]) -> None:
        """Describe a draft; nothing is created yet.

        Args:
            target: The path of the published file.
            before_publish: Called right before the file is renamed to ``target``.
        """
        self.special = is_special(target)
        self._target, self._before_publish = target if self.special else Path(os.path.realpath(target)), before_publish
        self._partial = partial_path(self._target)
        self._file: BinaryIO | None = None

    def write(self, data: bytes | memoryview) -> None:
        file, rest = self._file or self._opened(), memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def fileno(self) -> int:
        """Return the descriptor of the file that is written, for copies inside the kernel."""
        return (self._file or self._opened()).fileno()

    def publish(self) -> os.stat_result | None:
        file = self._file or self._opened()
        if self.special:
            file.close()
            return None
        os.fsync(file.fileno())
        status = os.fstat(file.fileno())
        file.close()
        self._before_publish()
        self._partial.replace(self._target)
        return status

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()
            if not self.special:
                self._partial.unlink(missing_ok=True)

    def _opened(self) -> BinaryIO:
        path, mode = (self._target, "wb") if self.special else (self._partial, "xb")
        self._file = cast(BinaryIO, open(path, mode, buffering=0))  # noqa: SIM115
        return self._file


class UploadDraft:
    """A remote object that is being uploaded."""

    def __init__(self, upload: Upload, before_publish: Callable[[], object]) -> None:
        """Wrap an upload that was started; ``before_publish`` is called right before its commit."""
        self._upload, self._before_publish = upload, before_publish
        self.write = upload.write

    def publish(self) -> os.stat_result | None:
        self._before_publish()
        self._upload.commit()
        return None

    def drop(self) -> None:
        self._upload.abort()


def partial_path(target: Path) -> Path:
    """Return a new hidden name in the folder of ``target``, to be renamed to ``target`` later."""
    return target.with_name(f".{target.name[:180]}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def replace_file(target: Path, data: bytes, durable: bool = True) -> None:
    """Write a small file in one step: readers see the old content or the new, never a part of either.

    Args:
        target: The file.
        data: The new content.
        durable: Wait until the content is on the disk (slow); not needed for what can be derived again.

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
    """Write a small object in one step.

    Raises:
        StorageError: The object cannot be written.
    """
    with storage.put(url, size_hint=len(data)) as upload:
        upload.write(data)
        upload.commit()


def put_file(storage: Storage, url: str, path: str | os.PathLike[str]) -> None:
    """Upload a local file; the object appears whole.

    Raises:
        StorageError: The object cannot be written.
        OSError: The file cannot be read.
    """
    with storage.put(url, size_hint=os.path.getsize(path)) as upload, open(path, "rb") as file:
        while chunk := file.read(_UPLOAD_CHUNK_BYTES):
            upload.write(chunk)
        upload.commit()


def read_object(storage: Storage, url: str, *, optional: bool = False) -> bytes | None:
    """Read a small object whole; return None where it does not exist.

    Args:
        storage: The storage that holds the object.
        url: The object.
        optional: Return None for a forbidden object too: buckets that may not be listed, and URLs that were signed for
            another object, answer "forbidden" for objects that do not exist.

    Raises:
        StorageError: The object exists and cannot be read, or its existence cannot be determined.
        DataError: The object is too large to be an index or a manifest.
    """
    data = bytearray()
    try:
        for chunk in storage.stream(url):
            data += chunk
            if len(data) > MAX_OBJECT:
                problem = f"it has more than {MAX_OBJECT:,} bytes, too many for a file that describes shards"
                raise DataError(problem, redacted(url))
        return bytes(data)
    except NotFound:
        return None
    except Forbidden:
        if not optional:
            raise
        log.info("access to %s is forbidden; continuing without it", redacted(url))
        return None
