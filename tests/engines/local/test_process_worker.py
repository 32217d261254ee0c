"""The messages of a worker process, which runs here in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.blobs.content import memory_file
from penstock.dataset import Dataset, from_items
from penstock.engines import Program, Segment
from penstock.engines.flow import BlockSizer, walk
from penstock.engines.local import process_worker
from penstock.engines.local.block_codec import decode_block, decode_error, encode_block
from penstock.engines.local.heartbeat import HEARTBEAT_BYTES
from penstock.engines.local.process_worker import without_unsendable
from penstock.engines.local.transport import Connection
from penstock.errors import StageError
from penstock.plan import Block, Context

TIMEOUT_S = 20.0


def opened(ds: Dataset) -> tuple[Segment, list[Context], Block]:
    """The segment of a plan without its reading stage, the contexts of the segment, and its last block, read."""
    program = Program(ds.plan)
    (segment,) = program.levels[0].segments
    contexts = program.contexts(segment, 0)
    order = program.order(0)
    *_, block = walk(program, order, program.start(order, None), BlockSizer())
    return Segment(segment.stages[1:]), contexts[1:], segment.stages[0].stage.run(block, contexts[0])


class Worker:
    """A worker and the run's end of its connection."""

    def __init__(self, segment: Segment, contexts: list[Context]) -> None:
        own_sock, worker_sock = socket.socketpair()
        own_sock.settimeout(TIMEOUT_S)
        self.connection = Connection(own_sock)
        arguments = (worker_sock, memory_file(HEARTBEAT_BYTES), (segment.stages, contexts), "cpu")
        self.thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self.thread.start()
        assert self.connection.recv() == ("ready",)

    def _run(self, sock: socket.socket, heartbeat_fd: int, payload: Any, device: Any) -> None:
        process_worker._run_worker(sock, heartbeat_fd, payload, device)
        sock.close()

    def request(self, *message: Any) -> Any:
        self.connection.send(message)
        return self.connection.recv()

    def stop(self) -> None:
        self.connection.send(("stop", 0, None))
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()
        self.connection.close()


def add_one(x: int) -> int:
    return x + 1


def test_a_block_is_returned_with_its_counts() -> None:
    segment, contexts, block = opened(from_items(list(range(30))).map(add_one, on="processes"))
    assert len(block) > 1
    worker = Worker(segment, contexts)
    kind, encoded, again, (cpu_s, retried) = worker.request("run", 0, encode_block(block))
    assert (kind, again, retried) == ("done", False, 0)
    assert cpu_s > 0
    assert decode_block(encoded, block.lineage.origin).items == [x + 1 for x in block.items]
    worker.stop()


def test_a_block_with_many_outputs_is_returned_in_parts() -> None:
    def copies(x: int) -> Iterator[tuple[int, int]]:
        return ((x, number) for number in range(5000))

    segment, contexts, block = opened(from_items([1]).flat_map(copies, on="processes"))
    worker = Worker(segment, contexts)
    _, encoded, again, _ = worker.request("run", 7, encode_block(block))
    items = list(decode_block(encoded, block.lineage.origin).items)
    assert again
    while again:
        _, encoded, again, _ = worker.request("next", 7, None)
        items += decode_block(encoded, block.lineage.origin).items
    assert items == list(copies(1))
    worker.stop()


def test_a_message_that_cannot_be_unpickled_is_reported_and_the_worker_continues() -> None:
    class LoadsAsError:
        def __reduce__(self) -> Any:
            return int, ("not a number",)

    segment, contexts, block = opened(from_items([1]).map(add_one, on="processes"))
    worker = Worker(segment, contexts)
    kind, text = worker.request("run", 0, LoadsAsError())
    assert kind == "unreadable"
    assert "not a number" in text
    assert worker.request("run", 1, encode_block(block))[0] == "done"
    worker.stop()


def test_an_error_that_no_stage_handles_is_returned() -> None:
    def interrupts(x: int) -> int:
        raise KeyboardInterrupt

    segment, contexts, block = opened(from_items([1]).map(interrupts, on="processes"))
    worker = Worker(segment, contexts)
    kind, encoded = worker.request("run", 0, encode_block(block))
    assert kind == "raise"
    assert "KeyboardInterrupt" in str(decode_error(encoded))
    worker.stop()


def test_a_query_about_the_origin_is_sent_to_the_run() -> None:
    def fails(x: int) -> float:
        return 1 / (x - 29)

    segment, contexts, block = opened(from_items(list(range(30))).map(fails, on="processes"))
    worker = Worker(segment, contexts)
    last = len(block) - 1
    assert worker.request("run", 0, encode_block(block)) == ("place", None, last)
    worker.connection.send(block.lineage.origin.place(last))
    _, encoded, _, _ = worker.connection.recv()
    error = decode_block(encoded, block.lineage.origin).lineage.error
    assert isinstance(error, StageError)
    assert error.key == "29"
    worker.stop()


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_items_that_cannot_be_pickled_fail_in_the_last_stage(action: Any) -> None:
    ds = from_items(list(range(30))).map(add_one, on="processes").on_error(action)
    segment, contexts, block = opened(ds)
    before, unsendable, *after = block.items
    block.items = [before, threading.Lock(), *after]
    sent = without_unsendable(block, segment, contexts)
    if action == "skip":
        assert sent.items == [before, *after]
        assert [skip.place.key for skip in sent.lineage.skips] == [str(unsendable)]
    else:
        assert sent.items == [before]
        assert isinstance(sent.lineage.error, StageError)
        assert "its result cannot be sent back" in str(sent.lineage.error)
