"""The calls of an actor, made in this process; ``test_engine.py`` makes them on a cluster."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from penstock.dataset import Dataset, from_items
from penstock.engines import Program
from penstock.engines.flow import BlockSizer, walk
from penstock.engines.local.block_codec import decode_error, encode_block
from penstock.engines.local.transport import dumps, pack_object, unpack_object
from penstock.engines.ray import actor_worker
from penstock.engines.ray.actor_worker import ActorWorker
from penstock.engines.ray.origin_codec import encode_origin
from penstock.plan import Block
from penstock.testing import BASE, numbers

USER = "proxy"


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActorWorker, "_watch", lambda self: None)
    monkeypatch.setattr(actor_worker, "_device", lambda: "cpu")


def opened(ds: Dataset) -> tuple[Program, ActorWorker, Block]:
    """A plan, an actor that has loaded its only segment and its sources, and the plan's last block, unread."""
    program = Program(ds.plan)
    (segment,) = program.levels[0].segments
    worker = ActorWorker()
    worker._stages, worker._contexts = worker._construct(dumps((segment.stages, program.contexts(segment, 0))))
    worker._finder = program.finder
    order = program.order(0)
    *_, block = walk(program, order, program.start(order, None), BlockSizer())
    return program, worker, block


def encoded(program: Program, block: Block) -> bytes:
    origin = encode_origin(block.lineage.origin, block.lineage.inputs, program.finder, program.arrangement.slots)
    return dumps((origin, encode_block(block)[1:]))


def double(sample: dict[str, Any]) -> int:
    return 2 * int(sample["x"])


def test_an_actor_reads_the_samples_of_a_block_without_items() -> None:
    program, worker, block = opened(numbers(BASE).map(double))
    reply, items = worker.work("run", (USER, 0), encoded(program, block), [])
    kind, fields, again, (cpu_s, retried), length, nbytes = pickle.loads(reply)
    assert items is not None
    assert (kind, again, retried, nbytes) == ("done", False, 0, items.nbytes)
    assert cpu_s > 0
    assert length == fields[1] == block.lineage.inputs
    last = sum(BASE)
    assert unpack_object(items) == [2 * x for x in range(last - block.lineage.inputs, last)]


def test_an_actor_does_not_read_a_block_that_has_items() -> None:
    program, worker, block = opened(numbers(BASE).map(double))
    samples = [{"x": -number} for number in range(block.lineage.inputs)]
    _, items = worker.work("run", (USER, 0), encoded(program, block), [(0, len(samples))], pack_object(samples))
    assert items is not None
    assert unpack_object(items) == [-2 * number for number in range(block.lineage.inputs)]


def copies(x: int) -> Iterator[tuple[int, int]]:
    return ((x, number) for number in range(5000))


def test_a_block_with_many_outputs_is_returned_in_parts() -> None:
    program, worker, block = opened(from_items([1]).flat_map(copies))
    reply, items = worker.work("run", (USER, 3), encoded(program, block), [])
    got = []
    while True:
        assert items is not None
        got += unpack_object(items)
        if not pickle.loads(reply)[2]:
            break
        reply, items = worker.work("next", (USER, 3), None, [])
    assert got == list(copies(1))


def test_items_that_cannot_be_unpickled_are_reported() -> None:
    class LoadsAsError:
        def __reduce__(self) -> Any:
            return int, ("not a number",)

    program, worker, block = opened(numbers(BASE).map(double))
    reply, items = worker.work("run", (USER, 0), encoded(program, block), [(0, 1)], pack_object([LoadsAsError()]))
    kind, text = pickle.loads(reply)
    assert (kind, items) == ("unreadable", None)
    assert "not a number" in text


def interrupts(sample: Any) -> Any:
    raise KeyboardInterrupt


def test_an_error_that_no_stage_handles_is_returned() -> None:
    program, worker, block = opened(numbers(BASE).map(interrupts))
    kind, error = pickle.loads(worker.work("run", (USER, 0), encoded(program, block), [])[0])
    assert kind == "raise"
    assert "KeyboardInterrupt" in str(decode_error(error))
    assert worker._heartbeat.read() is None


class Model:
    closed: ClassVar[list[int]] = []

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def close(self) -> None:
        self.closed.append(1)


def test_a_stopped_actor_has_closed_its_instances_and_is_idle() -> None:
    program, worker, block = opened(numbers(BASE).map_batches(Model))
    worker.work("run", (USER, 0), encoded(program, block), [])
    worker._idle_since = None
    Model.closed.clear()
    worker.stop(USER)
    assert Model.closed == [1]
    assert worker._idle_since is not None
    assert (worker._stages, worker._contexts, worker._finder) == ([], [], None)
