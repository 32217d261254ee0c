"""The other side of a pool of actors: one of them, which runs a segment's stages on the blocks it is sent."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.engines.local.block_codec import decode_block, encode_block, encode_error
from penstock.engines.local.heartbeat import Heartbeat
from penstock.engines.local.process_worker import sendable
from penstock.engines.local.transport import Bytes, CannotSend, dumps, folded, unfolded
from penstock.engines.program import Segment, prepare, run_segment
from penstock.engines.ray.origin_codec import decode_origin
from penstock.engines.read_stage import Finder, Read
from penstock.plan import Block, Context, PlacedStage

IDLE_S = 6.0  # how long it waits for another run: a new worker takes a second or two
_REST_S = 0.5
_LOOKS = 10  # how often it is looked whether an item takes too long, while it may

Answer = tuple[bytes, Bytes | None]  # what became of a block, and its items


class ActorWorker:
    """An actor's state: the stages, made once a run, and the blocks that come in parts."""

    def __init__(self) -> None:
        """Wait for a run."""
        self._stages: list[PlacedStage] = []
        self._contexts: list[Context] = []
        self._finder: Finder | None = None
        self._board = Heartbeat()
        self._limit: float | None = None
        self._free: float | None = time.monotonic()  # since when it belongs to no run
        self._going: dict[int, Iterator[tuple[Block, bool]]] = {}
        threading.Thread(target=self._watch, name="penstock watch", daemon=True).start()

    def load(self, needed: list[Any], path: list[str], folder: str, timeout_s: float | None) -> tuple[str, Any]:
        """Make the functions; say where this is, or why they cannot be made.

        Args:
            needed: Objects in the store, not taken from it before what fails can be told: the stages with their
                contexts, pickled, and where this worker reads the sources.
            path: Where the run finds its modules.
            folder: Where the run is, and its relative paths begin; a node of a cluster started elsewhere is not.
            timeout_s: How long one item may take.
        """
        import ray

        self._free, self._limit = None, timeout_s
        with suppress(OSError):  # this machine has no such folder
            os.chdir(folder)
        sys.path += [one for one in path if one not in sys.path and os.path.exists(one)]
        try:
            cargo, *finders = ray.get(needed)
            self._finder = finders[0] if finders else None
            self._stages, self._contexts = self._made(cargo)
        except BaseException as exc:  # it belongs to the run
            return "raise", encode_error(exc)
        return "ready", ray.get_runtime_context().get_node_id()

    def _made(self, cargo: bytes) -> tuple[list[PlacedStage], list[Context]]:
        stages, contexts = pickle.loads(cargo)
        device = _device()
        for number, ctx in enumerate(contexts):
            ctx.device = device
            ctx.watch = partial(self._board.enter, number)
        prepare(Segment(stages), contexts)
        return stages, contexts

    def work(self, word: str, number: int, facts: bytes | None, items: Bytes | None) -> Answer:
        """Begin with a block (``"run"``) or go on with one (``"next"``)."""
        try:
            if word == "run":
                assert facts is not None
                self._going[number] = self._begun(facts, items)
            del items
            part, again = next(self._going[number])
            if not again:
                del self._going[number]
            return self._answer(part, again)
        except SystemExit:
            raise
        except CannotSend as exc:
            return dumps(("unreadable", str(exc))), None
        except BaseException as exc:
            self._going.pop(number, None)
            return dumps(("raise", encode_error(exc))), None
        finally:
            self._board.leave()

    def _begun(self, facts: bytes, items: Bytes | None) -> Iterator[tuple[Block, bool]]:
        unread = items is None
        words, rest = pickle.loads(facts)
        block = decode_block(
            ([] if items is None else unfolded(items), *rest), decode_origin(words, self._finder, unread)
        )
        steps = list(zip(self._stages, self._contexts, strict=True))
        if not unread:
            steps = [step for step in steps if not isinstance(step[0].stage, Read)]
        return run_segment(Segment([one for one, _ in steps]), [ctx for _, ctx in steps], block)

    def _answer(self, part: Block, again: bool) -> Answer:
        try:
            items = folded(part.items)
        except CannotSend:  # one of the items
            part = sendable(part, Segment(self._stages), self._contexts)
            items = folded(part.items)
        counts = (time.process_time(), sum(ctx.retried for ctx in self._contexts))
        facts = encode_block(part)[1:]
        return dumps(("done", facts, again, counts, len(part), items.nbytes)), items

    def stop(self) -> None:
        """Let go of everything, and wait for another run, though not for long."""
        for placed, ctx in zip(self._stages, self._contexts, strict=True):
            placed.stage.finish(ctx)
        self._stages, self._contexts, self._finder, self._limit = [], [], None, None
        self._going.clear()
        self._free = time.monotonic()

    def _watch(self) -> None:
        """End the process when nobody needs it any more, or when it has been at one item for too long."""
        while True:
            limit, free = self._limit, self._free
            time.sleep(_REST_S if limit is None else min(_REST_S, limit / _LOOKS))
            at = self._board.read()
            if at is not None and limit is not None and at[2] > limit and limit == self._limit:
                os._exit(1)
            if free is not None and free == self._free and time.monotonic() - free > IDLE_S:
                self._ask_to_leave()
                return

    def _ask_to_leave(self) -> None:
        """Have this actor end as Ray wants it, between two calls."""
        import ray

        with suppress(Exception):  # Ray is gone
            ray.get_runtime_context().current_actor.leave.remote()

    def leave(self) -> None:
        """End, unless a run has come after all."""
        import ray.actor

        if self._free is None:
            threading.Thread(target=self._watch, name="penstock watch", daemon=True).start()
        else:
            end: Any = ray.actor.exit_actor
            end()


def _device() -> str:
    """The device that Ray has set aside for this worker, as torch calls it."""
    import ray

    if not ray.get_gpu_ids():
        return "cpu"
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda:0" if torch.cuda.is_available() else "cpu"
