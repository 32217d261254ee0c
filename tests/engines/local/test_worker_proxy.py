"""A proxy whose worker dies, hangs or is lost, as scripted: which blocks are repeated, and which items fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.dataset import Dataset, from_items
from penstock.engines import Program, Segment
from penstock.engines.flow import BlockSizer, walk
from penstock.engines.local.block_codec import decode_block, encode_block
from penstock.engines.local.pool import Closed
from penstock.engines.local.transport import CannotSend
from penstock.engines.local.worker_proxy import RemoteWorkerProxy, WorkerDied, WorkerLost, WorkerStuck
from penstock.engines.meter import Event, Meter, Meters
from penstock.engines.segments import run_segment
from penstock.errors import EngineError, StageError
from penstock.plan import Block, Context, Origin, PlacedStage


@dataclass(slots=True, eq=False)
class ScriptedPayload:
    """Starts workers that run in this process, and fail as scripted."""

    local_stages: list[tuple[PlacedStage, Context]]
    stages: list[PlacedStage]
    contexts: list[Context]
    failures: list[Exception | None] = field(default_factory=list)  # of the next requests, in order
    start_failures: list[Exception | None] = field(default_factory=list)  # of the next starts
    fatal: Any = None  # an item that kills its worker every time
    on: str = "processes"
    users: int = 0
    starts: int = 0
    requested: list[int] = field(default_factory=list)  # how many items each request for a block had
    messages: list[str] = field(default_factory=list)

    def acquire(self) -> None:
        self.users += 1

    def release(self) -> None:
        self.users -= 1

    def abort(self) -> None:
        pass

    def start(self, device: Any) -> ScriptedWorker:
        self.starts += 1
        return ScriptedWorker(self)


@dataclass(slots=True, eq=False)
class ScriptedWorker:
    payload: ScriptedPayload
    cpu_s: float = 1.0
    retried: int = 0
    closed: bool = False
    in_progress: dict[int, Any] = field(default_factory=dict)

    def wait_ready(self) -> None:
        failures = self.payload.start_failures
        if failures and (failure := failures.pop(0)) is not None:
            raise failure

    def request(self, origin: Origin, *message: Any) -> tuple[tuple[Any, ...], bool]:
        payload = self.payload
        kind, number, encoded = message
        payload.messages.append(kind)
        if kind == "drop":
            del self.in_progress[number]
            return (), False
        if kind == "run":
            payload.requested.append(len(encoded[0]))
            if payload.fatal is not None and payload.fatal in encoded[0]:
                raise WorkerDied("its worker process ended in the middle of a block")
        if payload.failures and (failure := payload.failures.pop(0)) is not None:
            raise failure
        if kind == "run":
            block = decode_block(encoded, origin)
            self.in_progress[number] = run_segment(Segment(payload.stages), payload.contexts, block)
        part, again = next(self.in_progress[number])
        return encode_block(part), again

    def current_stage(self) -> int | None:
        return 0

    def kill(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def scripted(ds: Dataset, **script: Any) -> tuple[RemoteWorkerProxy, ScriptedPayload, Block, list[Event]]:
    """A proxy for the only segment of a plan, its payload, the plan's last block, and the events of the run."""
    program = Program(ds.plan)
    (segment,) = program.levels[0].segments
    contexts = program.contexts(segment, 0)
    reading = [(segment.stages[0], contexts[0])]
    payload = ScriptedPayload(reading, segment.stages[1:], contexts[1:], **script)
    order = program.order(0)
    *_, block = walk(program, order, program.start(order, None), BlockSizer())
    events: list[Event] = []
    proxy = RemoteWorkerProxy(payload, "cpu", Meter("test", "processes"), Meters(observer=events.append), 0)
    return proxy, payload, block, events


def negated(count: int = 30) -> Dataset:
    return from_items(list(range(count))).map(lambda x: -x, on="processes")


def died() -> WorkerDied:
    return WorkerDied("its worker process ended in the middle of a block")


def test_a_block_whose_worker_dies_is_done_again() -> None:
    proxy, payload, block, events = scripted(negated(), failures=[died()])
    done, rest = proxy(block)
    inputs = len(block.lineage.origin.positions)  # type: ignore[attr-defined]
    assert rest is None
    assert done.items == [-x for x in range(30 - inputs, 30)]
    assert inputs > 1
    assert (payload.starts, payload.requested) == (2, [inputs, inputs])
    assert (proxy.meter.deaths, [event.kind for event in events]) == (1, ["death"])
    assert proxy.cpu_seconds() == 2.0, "of the dead worker and of the living one"


def test_after_two_deaths_the_items_are_done_one_by_one() -> None:
    proxy, payload, block, _ = scripted(negated(), failures=[died(), died()])
    done, _ = proxy(block)
    inputs = payload.requested[0]
    assert done.items == [-x for x in range(30 - inputs, 30)]
    assert payload.requested == [inputs, inputs, *[1] * inputs]


def test_a_lost_worker_does_not_count_against_the_block() -> None:
    lost = [WorkerLost("its worker process was replaced") for _ in range(5)]
    proxy, payload, block, _ = scripted(negated(), failures=lost)
    done, _ = proxy(block)
    assert len(done.items) > 1
    assert payload.requested == [len(done.items)] * 6, "never item by item"


@pytest.mark.parametrize("failure", [WorkerStuck("it took longer than timeout_s=1 and was killed"), CannotSend("no")])
def test_a_block_that_hangs_or_cannot_be_sent_is_done_item_by_item_at_once(failure: Exception) -> None:
    proxy, payload, block, _ = scripted(negated(), failures=[failure])
    done, _ = proxy(block)
    assert payload.requested == [len(done.items), *[1] * len(done.items)]
    assert (proxy.meter.timeouts, proxy.meter.deaths) == (isinstance(failure, WorkerStuck), 0)


def test_an_item_that_kills_its_worker_every_time_fails_alone() -> None:
    proxy, _, block, _ = scripted(negated(), fatal=28)
    done, _ = proxy(block)
    assert done.items[-1] == -27
    assert isinstance(done.lineage.error, StageError)
    assert (done.lineage.error.key, done.lineage.error.stage) == ("28", "map(<lambda>)")
    assert proxy.meter.deaths == 4, "twice with its block, twice alone"


def test_an_item_that_kills_its_worker_every_time_can_be_skipped() -> None:
    proxy, _, block, _ = scripted(negated().on_error("skip"), fatal=28)
    done, _ = proxy(block)
    assert done.items[-2:] == [-27, -29]
    assert [skip.place.key for skip in done.lineage.skips] == ["28"]


def copies(x: int) -> Iterator[tuple[int, int]]:
    return ((x, number) for number in range(9000))


def test_parts_that_were_delivered_are_not_delivered_again() -> None:
    proxy, _, block, _ = scripted(from_items([1]).flat_map(copies, on="processes"), failures=[None, died()])
    done, parts = proxy(block)
    got = list(done.items)
    while parts is not None:
        done, parts = proxy(parts)
        got += done.items
    assert got == list(copies(1))


@pytest.mark.parametrize(
    ("ds", "messages"),
    [
        (negated(), ["run", "run"]),
        (from_items([1]).flat_map(copies, on="processes"), ["run", "drop", "run"]),
    ],
    ids=["a whole block", "the first part of a block"],
)
def test_only_a_block_that_is_left_in_the_middle_is_dropped(ds: Dataset, messages: list[str]) -> None:
    proxy, payload, block, _ = scripted(ds)
    result = proxy(block)
    del result
    proxy(scripted(ds)[2])
    assert payload.messages == messages


def test_a_worker_that_keeps_dying_after_a_delivered_part_ends_the_run() -> None:
    ds = from_items([1]).flat_map(copies, on="processes").on_error("skip")
    proxy, _, block, _ = scripted(ds, failures=[None, died(), died()])
    _, parts = proxy(block)
    assert parts is not None
    with pytest.raises(StageError, match="in the middle of a block, repeatedly"):
        proxy(parts)


def test_a_worker_that_dies_at_its_start_is_started_twice() -> None:
    start = WorkerDied("its worker process ended at its start")
    proxy, payload, block, _ = scripted(negated(), start_failures=[start])
    proxy.prepare()
    assert payload.starts == 2
    assert proxy(block)[0].lineage.error is None
    proxy, payload, _, _ = scripted(negated(), start_failures=[start, start])
    with pytest.raises(EngineError, match=r"map\(<lambda>\): its worker process ended at its start, repeatedly"):
        proxy.prepare()


def test_a_worker_that_cannot_construct_its_functions_is_started_once() -> None:
    proxy, payload, _, _ = scripted(negated(), start_failures=[StageError("no weights found", "map")])
    with pytest.raises(StageError, match="no weights found"):
        proxy.prepare()
    assert payload.starts == 1


def test_a_closed_proxy_closes_its_worker_and_releases_the_payload() -> None:
    proxy, payload, _, _ = scripted(negated())
    proxy.prepare()
    worker = proxy._worker
    assert isinstance(worker, ScriptedWorker)
    assert payload.users == 1
    proxy.close()
    assert worker.closed
    assert payload.users == 0


def test_an_aborted_proxy_takes_no_block() -> None:
    proxy, _, block, _ = scripted(negated())
    proxy.abort()
    with pytest.raises(Closed):
        proxy(block)


def test_another_proxy_restarts_the_block_of_a_closed_proxy() -> None:
    first, _, block, _ = scripted(from_items([1]).flat_map(copies, on="processes"))
    second, payload, _, _ = scripted(from_items([1]).flat_map(copies, on="processes"))
    done, parts = first(block)
    got = list(done.items)
    first.close()
    while parts is not None:
        done, parts = second(parts)
        got += done.items
    assert got == list(copies(1))
    assert payload.starts == 1
