"""The code of a worker process: it runs one segment's stages on the blocks that it receives."""

from __future__ import annotations

import mmap
import os
import socket
import time
from functools import partial
from typing import Any

from penstock.engines.local.block_codec import RemoteOrigin, decode_block, encode_block, encode_error
from penstock.engines.local.fork_server import serve_forks
from penstock.engines.local.heartbeat import HEARTBEAT_BYTES, Heartbeat
from penstock.engines.local.transport import CannotSend, Connection, dumps
from penstock.engines.segments import Segment, prepare, run_segment
from penstock.plan import Block, Context, PlacedStage


def run_fork_server(fd: int, run_pid: int) -> None:
    """Fork workers for the run ``run_pid``, which is at the other end of the socket ``fd``."""
    serve_forks(fd, run_pid, _run_worker)


def _run_worker(
    sock: socket.socket, heartbeat_fd: int, payload: tuple[list[PlacedStage], list[Context]], device: Any
) -> None:
    """Construct the functions, then process blocks until the run sends a stop message or is gone."""
    stages, contexts = payload
    heartbeat = Heartbeat(mmap.mmap(heartbeat_fd, HEARTBEAT_BYTES))
    os.close(heartbeat_fd)
    connection = Connection(sock)
    for number, ctx in enumerate(contexts):
        ctx.device = device
        ctx.watch = partial(heartbeat.begin, number)
    try:
        prepare(Segment(stages), contexts)
    except BaseException as exc:
        connection.send(("raise", encode_error(exc)))
        return
    connection.send(("ready",))
    try:
        _work(connection, heartbeat, Segment(stages), contexts)
    finally:
        for placed, ctx in zip(stages, contexts, strict=True):
            placed.stage.finish(ctx)


def _work(connection: Connection, heartbeat: Heartbeat, segment: Segment, contexts: list[Context]) -> None:
    def query(*message: Any) -> Any:
        connection.send(message)
        return connection.recv()

    in_progress: dict[int, Any] = {}  # the remaining parts, by the number of the block
    while True:
        try:
            kind, number, encoded = connection.recv()
        except CannotSend as exc:
            connection.send(("unreadable", str(exc)))
            continue
        if kind == "stop":
            return
        if kind == "drop":
            in_progress.pop(number, None)
            connection.send(("done", (), False, _counts(contexts)))
            continue
        if kind == "run":
            in_progress[number] = run_segment(segment, contexts, decode_block(encoded, RemoteOrigin(query)))
        del encoded
        try:
            part, more_parts = next(in_progress[number])
            heartbeat.clear()
            if not more_parts:
                del in_progress[number]
            _send_part(connection, part, more_parts, segment, contexts)
            del part  # an idle worker holds no samples
        except (EOFError, OSError, SystemExit):
            raise
        except BaseException as exc:
            heartbeat.clear()
            in_progress.pop(number, None)
            connection.send(("raise", encode_error(exc)))


def _send_part(
    connection: Connection, part: Block, more_parts: bool, segment: Segment, contexts: list[Context]
) -> None:
    counts = _counts(contexts)
    try:
        connection.send(("done", encode_block(part), more_parts, counts))
    except CannotSend:  # because of one of the items
        connection.send(("done", encode_block(without_unsendable(part, segment, contexts)), more_parts, counts))


def _counts(contexts: list[Context]) -> tuple[float, int]:
    return time.process_time(), sum(ctx.retried for ctx in contexts)


def without_unsendable(part: Block, segment: Segment, contexts: list[Context]) -> Block:
    """Return a block without the items that cannot be pickled; these fail in the last stage, like any failing item."""
    stage, ctx = segment.stages[-1].stage, contexts[-1]
    kept: list[int] = []
    for number, item in enumerate(part.items):
        try:
            dumps(item)
        except Exception as exc:
            if not stage.fail(part, number, CannotSend(f"its result cannot be sent back: {exc}"), ctx):
                break
        else:
            kept.append(number)
    return part.keep(kept, [part.items[i] for i in kept])
