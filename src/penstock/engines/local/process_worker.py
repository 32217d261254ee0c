"""The other side of a process pool: a process that runs one segment's stages on the blocks it is sent."""

from __future__ import annotations

import mmap
import os
import socket
import time
from functools import partial
from typing import Any

from penstock.engines.local.block_codec import RemoteOrigin, decode_block, encode_block, encode_error
from penstock.engines.local.fork_server import tend
from penstock.engines.local.heartbeat import SIZE, Heartbeat
from penstock.engines.local.transport import CannotSend, Connection, dumps
from penstock.engines.program import Segment, prepare, run_segment
from penstock.plan import Block, Context, PlacedStage


def nursery(fd: int, parent: int) -> None:
    """Fork workers for the run at the other end of the socket."""
    tend(fd, parent, _serve)


def _serve(sock: socket.socket, board_fd: int, cargo: tuple[list[PlacedStage], list[Context]], device: Any) -> None:
    """Serve until told to stop, or until the run is gone."""
    stages, contexts = cargo
    board = Heartbeat(mmap.mmap(board_fd, SIZE))
    os.close(board_fd)
    wire = Connection(sock)
    for number, ctx in enumerate(contexts):
        ctx.device = device
        ctx.watch = partial(board.enter, number)
    try:
        prepare(Segment(stages), contexts)
    except BaseException as exc:
        wire.send(("raise", encode_error(exc)))
        return
    wire.send(("ready",))
    try:
        _work(wire, board, Segment(stages), contexts)
    finally:
        for placed, ctx in zip(stages, contexts, strict=True):
            placed.stage.finish(ctx)


def _work(wire: Connection, board: Heartbeat, segment: Segment, contexts: list[Context]) -> None:
    def ask(*words: Any) -> Any:
        wire.send(words)
        return wire.recv()

    going: dict[int, Any] = {}
    while True:
        try:
            word, number, facts = wire.recv()
        except CannotSend as exc:
            wire.send(("unreadable", str(exc)))
            continue
        if word == "stop":
            return
        if word == "run":
            going[number] = run_segment(segment, contexts, decode_block(facts, RemoteOrigin(ask)))
        del facts
        try:
            part, again = next(going[number])
            board.leave()
            if not again:
                del going[number]
            _send(wire, part, again, segment, contexts)
            del part  # an idle worker holds no samples
        except (EOFError, OSError, SystemExit):
            raise
        except BaseException as exc:
            board.leave()
            going.pop(number, None)
            wire.send(("raise", encode_error(exc)))


def _send(wire: Connection, part: Block, again: bool, segment: Segment, contexts: list[Context]) -> None:
    counts = (time.process_time(), sum(ctx.retried for ctx in contexts))
    try:
        wire.send(("done", encode_block(part), again, counts))
    except CannotSend:  # one of the items
        wire.send(("done", encode_block(sendable(part, segment, contexts)), again, counts))


def sendable(part: Block, segment: Segment, contexts: list[Context]) -> Block:
    """The block without the items that cannot be pickled, which fail like any other."""
    stage, ctx = segment.stages[-1].stage, contexts[-1]
    kept: list[int] = []
    for number, item in enumerate(part.items):
        try:
            dumps(item)
        except Exception as exc:
            if not stage.fail(part, number, CannotSend(f"what it gives cannot be sent back: {exc}"), ctx):
                break
        else:
            kept.append(number)
    return part.keep(kept, [part.items[i] for i in kept])
