"""An object on its way to S3: in one piece where it is small, else in parts, a few at a time."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from penstock.errors import StorageError
from penstock.storage.protocol import Info, Upload
from penstock.storage.retry import Temporary, again

if TYPE_CHECKING:
    from penstock.storage.s3 import S3

_log = logging.getLogger("penstock.storage")
_AT_ONCE = 4  # parts on their way: memory is that many parts and the one being filled
_LEAST, _MOST = 8 << 20, 16 << 20  # a part, in bytes
_PARTS = 10_000  # the most S3 allows


class S3Upload(Upload):
    """Nothing is sent before a part is full; all parts are of one size, as some servers demand."""

    def __init__(self, storage: S3, url: str, place: dict[str, str], size_hint: int | None) -> None:
        super().__init__(url)
        self._storage, self._place = storage, place
        self._at = url  # with "anonymous@", if it was there
        self._part = part_size(size_hint)
        self._buffer = bytearray()
        self._id: str | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._sent: list[Future[str]] = []
        self._running: set[Future[str]] = set()

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            room = self._part - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            if len(self._buffer) == self._part:
                self._send_part()

    def _commit(self) -> Info:
        if self._id is None:
            told = self._ask("put_object", Body=bytes(self._buffer))
        else:
            if self._buffer:
                self._send_part()
            tags = [{"PartNumber": number, "ETag": sent.result()} for number, sent in enumerate(self._sent, 1)]
            self._close_pool()
            told = self._complete(tags)
        if told.get("ETag") is None or self._id is not None:  # not every server tells the tag of joined parts rightly
            return self._storage.info(self._at)
        return Info(self.written, told["ETag"], True)

    def _abort(self) -> None:
        for sent in self._sent:
            sent.cancel()
        self._close_pool()
        self._buffer = bytearray()
        if self._id is not None:
            try:
                self._ask("abort_multipart_upload", UploadId=self._id)
            except StorageError as error:  # what led here matters more; buckets drop such parts by rule
                _log.warning("parts of an upload were left behind: %s", error)

    def _send_part(self) -> None:
        """Hand the buffer to a thread; wait when enough parts are on their way."""
        if len(self._sent) == _PARTS:
            raise StorageError(f"it has more than {_PARTS:,} parts: give size_hint= for larger ones", self.url)
        if self._id is None:
            self._id = self._ask("create_multipart_upload")["UploadId"]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE, "penstock-upload")
        if len(self._running) == _AT_ONCE:
            done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
            for sent in done:
                sent.result()  # a part that failed ends it here, not at the end
        data, self._buffer = bytes(self._buffer), bytearray()
        sent = self._pool.submit(self._upload, len(self._sent) + 1, data)
        self._sent.append(sent)
        self._running.add(sent)

    def _upload(self, number: int, data: bytes) -> str:
        tag: str = self._ask("upload_part", UploadId=self._id, PartNumber=number, Body=data)["ETag"]
        return tag

    def _complete(self, tags: list[dict[str, Any]]) -> Any:
        """Join the parts; when an answer was lost, the second request may find that it was done."""
        ask = {**self._place, "UploadId": self._id, "MultipartUpload": {"Parts": tags}}
        lost = False

        def once() -> Any:
            nonlocal lost
            try:
                return self._storage.call_once("complete_multipart_upload", self._at, ask)
            except Temporary:
                lost = True
                raise
            except StorageError as error:
                head = self._storage.info(self._at) if lost and "NoSuchUpload" in error.problem else None
                if head is None or head.size != self.written:
                    raise
                return {"ETag": head.tag}

        return again(once, self._at, self._storage.retry)

    def _ask(self, operation: str, **ask: Any) -> Any:
        return self._storage.call(operation, self._at, {**self._place, **ask})

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def part_size(size_hint: int | None) -> int:
    """How large the parts of an object are to be: small ones begin sooner, but there may not be too many.

    >>> [part_size(hint) // 2**20 for hint in (None, 10**9, 10**11, 10**12)]
    [16, 8, 16, 128]
    """
    if size_hint is None:
        return _MOST
    size = _LEAST
    while size * (_PARTS - 1000) < size_hint:  # a hint may be a little wrong
        size *= 2
    return size
