"""The other side of a process pool: a fresh interpreter that runs one segment's stages on the blocks it is sent."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import Any

from penstock.engines.board import SIZE, Board
from penstock.engines.parcel import Afar, packed, packed_error, unpacked
from penstock.engines.program import Segment, run_segment
from penstock.engines.wire import Wire, dumps
from penstock.errors import StageError
from penstock.plan import Block, Context

_DEATH_SIGNAL = 1  # prctl's number for: send me a signal when my parent dies


def main(fd: int, board_fd: int, parent: int) -> None:
    """Serve until told to stop, or until the run is gone."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides when to stop
    board = Board(mmap.mmap(board_fd, SIZE))
    os.close(board_fd)
    wire = Wire(socket.socket(fileno=fd))
    try:
        _serve(wire, board)
    except (EOFError, OSError):  # the run is gone
        os._exit(1)


def _die_with(parent: int) -> None:
    """End with the run even when it is killed, and whatever this process is in the middle of."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _serve(wire: Wire, board: Board) -> None:
    try:
        stages, contexts = pickle.loads(wire.recv())
    except (EOFError, OSError):
        raise
    except BaseException as exc:
        wire.send(("raise", packed_error(exc)))
        return
    wire.send(("ready",))
    for number, ctx in enumerate(contexts):
        ctx.watch = partial(board.enter, number)
    try:
        _work(wire, board, Segment(stages), contexts)
    finally:
        for placed, ctx in zip(stages, contexts, strict=True):
            placed.stage.finish(ctx)


def _work(wire: Wire, board: Board, segment: Segment, contexts: list[Context]) -> None:
    def ask(*words: Any) -> Any:
        wire.send(words)
        return wire.recv()

    going: dict[int, Any] = {}
    while True:
        word, number, facts = wire.recv()
        if word == "stop":
            return
        if word == "run":
            going[number] = run_segment(segment, contexts, unpacked(facts, Afar(ask)))
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
            wire.send(("raise", packed_error(exc)))


def _send(wire: Wire, part: Block, again: bool, segment: Segment, contexts: list[Context]) -> None:
    counts = (time.process_time(), sum(ctx.retried for ctx in contexts))
    try:
        wire.send(("done", packed(part), again, counts))
    except (BrokenPipeError, ConnectionError):
        raise
    except Exception:  # one of the items cannot travel
        wire.send(("done", packed(_sendable(part, segment, contexts)), again, counts))


def _sendable(part: Block, segment: Segment, contexts: list[Context]) -> Block:
    """The block without the items that cannot be pickled, which fail like any other."""
    stage, ctx = segment.stages[-1].stage, contexts[-1]
    kept: list[int] = []
    for number, item in enumerate(part.items):
        try:
            dumps(item)
        except Exception as exc:
            problem = StageError(f"what it gives cannot be sent from its process: {exc}", stage.describe())
            if not stage.fail(part, number, problem, ctx):
                break
        else:
            kept.append(number)
    return part.keep(kept, [part.items[i] for i in kept])
