"""Consumers of a run's items: where one is created, and how a lost one is replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.errors import EngineError


class Consumer(Protocol):
    """Takes the items of one run, in the process where it was made."""

    def add(self, items: Sequence[Any]) -> None:
        """Take the items of a block."""

    def close(self) -> Any:
        """Finish, and return a result that can be pickled."""

    def drop(self) -> None:
        """End without finishing; does nothing after ``close``."""


class ConsumerLost(EngineError):
    """The process of a consumer, or a block on its way to it, is lost: the run has to start over with another one."""


class ConsumerHost(Protocol):
    """Makes the consumers of one lane, one at a time: here, or in an actor that blocks are sent to by reference."""

    def make(self, make: Callable[[], Consumer]) -> Consumer:
        """Return a consumer that ``make``, which can be pickled, constructs where it works.

        Raises:
            ConsumerLost: The process of the consumer has ended.
        """

    def close(self) -> None:
        """End the process of the consumers, if they have their own."""


class LocalHost:
    """Makes consumers in this process."""

    def make(self, make: Callable[[], Consumer]) -> Consumer:
        return make()

    def close(self) -> None:
        """Do nothing: there is no other process."""
