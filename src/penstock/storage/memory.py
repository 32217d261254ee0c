"""Objects in the memory of this process, for tests and examples. A forked child gets its own copy of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from penstock.storage.protocol import Info, Listed, NotFound, Upload, changed_error, past_end_error, range_size

# No lock: each object is stored, found or deleted by a single dict operation, which is atomic.
_objects: dict[str, tuple[bytes, str]] = {}
_tags = count(1)


@dataclass(frozen=True, slots=True)
class Memory:
    """Serves ``memory://`` URLs. All instances in a process share the same objects."""

    def info(self, url: str) -> Info:
        data, tag = _find(url)
        return Info(len(data), tag, True)

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        range_size(start, stop, into)
        data, current = _find(url)
        if tag is not None and tag != current:
            raise changed_error(url)
        if stop > len(data):
            raise past_end_error(url, len(data), stop)
        if into is None:
            return data[start:stop]
        into.cast("B")[:] = memoryview(data)[start:stop]
        return into

    def stream(self, url: str) -> Iterator[bytes]:
        data, _ = _find(url)
        return iter([data] if data else [])

    def list(self, prefix: str) -> Iterator[Listed]:
        folder = prefix if prefix.endswith("/") else prefix + "/"
        return iter(
            [
                Listed(url, len(data), tag)
                for url, (data, tag) in sorted(_objects.copy().items())
                if url.startswith(folder)
            ]
        )

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        return _MemoryUpload(url)

    def delete(self, url: str) -> None:
        _objects.pop(url, None)

    def local_path(self, url: str) -> str | None:
        return None


class _MemoryUpload(Upload):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._data = bytearray()

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        self._data += data

    def _commit(self) -> Info:
        tag = f"memory-{next(_tags)}"
        _objects[self.url] = (bytes(self._data), tag)
        return Info(len(self._data), tag, True)

    def _abort(self) -> None:
        self._data.clear()


def _find(url: str) -> tuple[bytes, str]:
    try:
        return _objects[url]
    except KeyError:
        raise NotFound("there is no such object", url) from None
