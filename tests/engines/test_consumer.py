"""Consumers in this process are made and used directly."""

from __future__ import annotations

from penstock.engines.consumer import ConsumerLost, LocalHost
from penstock.errors import EngineError


class Counts:
    def __init__(self) -> None:
        self.count = 0

    def add(self, items: object) -> None:
        self.count += 1

    def close(self) -> int:
        return self.count

    def drop(self) -> None:
        self.count = 0


def test_a_local_host_makes_consumers_in_this_process() -> None:
    host = LocalHost()
    consumer = host.make(Counts)
    consumer.add([1])
    assert isinstance(consumer, Counts)
    assert consumer.close() == 1
    host.close()


def test_a_lost_consumer_is_an_error_of_the_engine() -> None:
    assert issubclass(ConsumerLost, EngineError)
