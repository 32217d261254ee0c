"""What comes next, found while the one before is used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from penstock.storage.retry import while_wanted

_A = TypeVar("_A")
_B = TypeVar("_B")


def ahead(things: Iterable[_A], find: Callable[[_A], _B]) -> Iterator[tuple[_A, _B]]:
    """Give things and what was found for each, finding the next in advance in a thread of its own.

    What fails is raised where it stands. When the iterator is closed the thread ends after what it is at.
    """
    scout = _Scout(things, find)
    scout.start()
    try:
        yield from scout.found()
    finally:
        scout.end()


class _Scout(threading.Thread, Generic[_A, _B]):
    """Finds, and waits until what it found is taken."""

    def __init__(self, things: Iterable[_A], find: Callable[[_A], _B]) -> None:
        super().__init__(name="penstock ahead", daemon=True)
        self._things, self._find = things, find
        self._changed = threading.Condition()
        self._ready: tuple[_A, _B] | None = None
        self._error: BaseException | None = None
        self._done = self._over = False

    def run(self) -> None:
        try:
            with while_wanted(lambda: not self._over):
                for thing in self._things:
                    if not self._hand_over((thing, self._find(thing))):
                        return
        except BaseException as error:  # it is the reader's, who will come to it
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _hand_over(self, pair: tuple[_A, _B]) -> bool:
        """Whether more is wanted."""
        with self._changed:
            self._ready = pair
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self._ready is None)
            return not self._over

    def found(self) -> Iterator[tuple[_A, _B]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready is not None or self._done)
                pair, self._ready = self._ready, None
                self._changed.notify_all()
            if pair is None:
                break
            yield pair
            del pair
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._ready = None
            self._changed.notify_all()
        self.join(0.5)  # it may be waiting for a server that says nothing
