"""Whole small objects, requested side by side in background threads before they are read."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from penstock.storage import Storage, open_storage
from penstock.storage.retry import while_wanted

OBJECT_CONNECTIONS = 64  # a request for a small object mostly waits for the server
MAX_HELD_BYTES = 128 << 20  # that have arrived and are not read yet
_IDLE_S = 1.0  # a thread without work for this long ends


class ObjectFetcher:
    """Fetches objects in the order in which they were announced, as far ahead as its memory allows.

    Reading an object that was not announced, or was not requested yet, fetches it in the thread that reads. Safe to
    use from several threads; a pickled fetcher holds nothing.
    """

    def __init__(self, storage: Storage | None = None) -> None:
        """Start nothing yet; ``storage`` is the storage of all objects, by default that of their schemes."""
        self._storage = storage
        self._has_room = threading.Condition()
        self._queue: deque[str] = deque()
        self._futures: dict[str, Future[bytes]] = {}  # of objects that were announced and not read yet
        self._held_bytes = 0
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self.stopped = False

    def __reduce__(self) -> tuple[type[ObjectFetcher], tuple[Storage | None]]:
        return ObjectFetcher, (self._storage,)

    def anew(self) -> ObjectFetcher:
        """Return a fetcher of the same storage that holds nothing."""
        return ObjectFetcher(self._storage)

    def announce(self, urls: Iterable[str]) -> None:
        """Announce objects that will be read, so that they are fetched in the background."""
        with self._has_room:
            if self.stopped:
                return
            new = [url for url in dict.fromkeys(urls) if url not in self._futures]
            self._futures.update((url, Future()) for url in new)
            self._queue.extend(new)
            while self._idle < len(self._queue) and len(self._threads) < OBJECT_CONNECTIONS:
                thread = threading.Thread(target=self._work, name="penstock fetch", daemon=True)
                self._threads.add(thread)
                self._idle += 1
                thread.start()
            self._has_room.notify(len(new))

    def read(self, url: str) -> bytes:
        """Return an object, and wait for it where it has not arrived.

        Raises:
            StorageError: The object cannot be read.
        """
        with self._has_room:
            future = self._futures.pop(url, None)
        if future is None or future.cancel():  # it was not requested yet
            return self._fetch(url)
        data = future.result()
        with self._has_room:
            self._held_bytes -= len(data)
            self._has_room.notify()
        return data

    def _fetch(self, url: str) -> bytes:
        return b"".join(open_storage(url, self._storage).stream(url))

    def _work(self) -> None:
        thread = threading.current_thread()
        while (url := self._next(thread)) is not None:
            with self._has_room:
                future = self._futures.get(url)
            if future is not None and future.set_running_or_notify_cancel():
                try:
                    with while_wanted(lambda: not self.stopped):
                        data = self._fetch(url)
                except BaseException as error:  # raised where the object is read
                    future.set_exception(error)
                else:
                    with self._has_room:
                        self._held_bytes += len(data)
                    future.set_result(data)
                    del data
            del future
            with self._has_room:
                self._idle += 1

    def _next(self, thread: threading.Thread) -> str | None:
        """Wait for an object to fetch; return None after ``_IDLE_S`` seconds without one, or when fetching stopped."""
        with self._has_room:
            self._has_room.wait_for(
                lambda: self.stopped or (self._queue and self._held_bytes < MAX_HELD_BYTES), _IDLE_S
            )
            self._idle -= 1
            if not self._queue or self._held_bytes >= MAX_HELD_BYTES:
                self._threads.discard(thread)
                return None
            return self._queue.popleft()

    def stop(self) -> None:
        """Stop fetching ahead and free what is held; reads still work. Waits half a second for the threads to end."""
        with self._has_room:
            self.stopped = True
            self._queue.clear()
            self._futures.clear()
            threads = list(self._threads)
            self._has_room.notify_all()
        deadline = time.monotonic() + 0.5
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
