"""The code of an actor: it runs a segment's stages on the blocks that it receives."""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.engines.local.block_codec import decode_block, encode_block, encode_error
from penstock.engines.local.heartbeat import Heartbeat
from penstock.engines.local.process_worker import without_unsendable
from penstock.engines.local.transport import CannotSend, PackedBytes, dumps, pack_object, unpack_object
from penstock.engines.ray.origin_codec import decode_origin
from penstock.engines.read_stage import Finder
from penstock.engines.segments import Segment, prepare, run_segment
from penstock.plan import Block, Context, PlacedStage, join_columns

IDLE_TIMEOUT_S = 6.0  # how long an actor waits for another run: a new one takes a second or two to start
ABANDONED_S = 60.0  # without a call, after which a shared actor ends: a user that comes back later starts another
_CHECK_S = 0.5
_CHECKS_PER_TIMEOUT = 10  # checks of the time spent on an item before it exceeds the limit

ActorReply = tuple[bytes, PackedBytes | None]  # the fields of a block and its items


class ActorWorker:
    """The state of an actor: the stages, constructed once per run, and the blocks that are returned in parts."""

    def __init__(self) -> None:
        """Wait for a run."""
        self._stages: list[PlacedStage] = []
        self._contexts: list[Context] = []
        self._finder: Finder | None = None
        self._heartbeat = Heartbeat()
        self._timeout_s: float | None = None
        self._idle_since: float | None = time.monotonic()  # None while a run uses it
        self._in_progress: dict[tuple[str, int], Iterator[tuple[Block, bool]]] = {}  # by user and number of the block
        self._users: set[str] = set()
        self._shared = False
        self._last_call = time.monotonic()  # infinity during a call
        threading.Thread(target=self._watch, name="penstock watch", daemon=True).start()

    def load(
        self, refs: list[Any], path: list[str], folder: str, timeout_s: float | None, user: str, shared: bool
    ) -> tuple[str, Any]:
        """Construct the functions of a run, unless another user of a shared actor did.

        Args:
            refs: References to the pickled stages and contexts and, if this actor reads samples, to the sources. They
                are fetched here rather than passed as arguments, so that a failure can be reported.
            path: The module search path of the run.
            folder: The working directory of the run, for relative paths; a node may have another one.
            timeout_s: The maximum time for one item.
            user: The worker proxy that uses the actor.
            shared: Whether other proxies, also in other processes, use the actor with the same functions.

        Returns:
            ``("ready", node id)``, or ``("raise", encoded error)``.
        """
        import ray

        self._idle_since, self._timeout_s, self._shared = None, timeout_s, shared
        self._last_call = time.monotonic()
        self._users.add(user)
        if shared and self._stages:
            return "ready", ray.get_runtime_context().get_node_id()
        with suppress(OSError):  # this machine has no such folder
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path and os.path.exists(entry)]
        try:
            payload, *finders = ray.get(refs)
            self._finder = finders[0] if finders else None
            self._stages, self._contexts = self._construct(payload)
        except BaseException as exc:  # raised by the run
            self._users.discard(user)
            return "raise", encode_error(exc)
        return "ready", ray.get_runtime_context().get_node_id()

    def _construct(self, payload: bytes) -> tuple[list[PlacedStage], list[Context]]:
        stages, contexts = pickle.loads(payload)
        device = _device()
        for number, ctx in enumerate(contexts):
            ctx.device = device
            ctx.watch = partial(self._heartbeat.begin, number)
        prepare(Segment(stages), contexts)
        return stages, contexts

    def work(
        self,
        kind: str,
        number: tuple[str, int],
        encoded: bytes | None,
        slices: list[tuple[int, int]],
        *packed: PackedBytes,
    ) -> ActorReply:
        """Start block ``number`` (``"run"``) or continue it (``"next"``), and return its next part.

        ``"drop"`` forgets the remaining parts of the block.

        Its items are slices of ``packed`` objects, one after another; without any, the actor reads its samples.
        """
        self._last_call = math.inf
        try:
            if kind == "drop":
                self._in_progress.pop(number, None)
                return dumps(("done", (), False, self._counts(), 0, 0)), None
            if kind == "run":
                assert encoded is not None
                parts = [unpack_object(data)[low:high] for data, (low, high) in zip(packed, slices, strict=True)]
                self._in_progress[number] = self._begin(encoded, join_columns(parts) if parts else None)
                del parts
            del packed
            part, more_parts = next(self._in_progress[number])
            if not more_parts:
                del self._in_progress[number]
            return self._reply(part, more_parts)
        except SystemExit:
            raise
        except CannotSend as exc:
            return dumps(("unreadable", str(exc))), None
        except BaseException as exc:
            self._in_progress.pop(number, None)
            return dumps(("raise", encode_error(exc))), None
        finally:
            self._heartbeat.clear()
            self._last_call = time.monotonic()

    def _begin(self, encoded: bytes, items: Sequence[Any] | None) -> Iterator[tuple[Block, bool]]:
        unread = items is None
        encoded_origin, rest = pickle.loads(encoded)
        origin = decode_origin(encoded_origin, self._finder, unread)
        block = decode_block(([] if items is None else items, *rest), origin)
        done = 0 if unread else Segment(self._stages).reading
        return run_segment(Segment(self._stages[done:]), self._contexts[done:], block)

    def _reply(self, part: Block, more_parts: bool) -> ActorReply:
        try:
            items = pack_object(part.items)
        except CannotSend:  # because of one of the items
            part = without_unsendable(part, Segment(self._stages), self._contexts)
            items = pack_object(part.items)
        encoded = encode_block(part)[1:]
        return dumps(("done", encoded, more_parts, self._counts(), len(part), items.nbytes)), items

    def _counts(self) -> tuple[float, int]:
        return time.process_time(), sum(ctx.retried for ctx in self._contexts)

    def stop(self, user: str) -> None:
        """Release what belongs to a user; after the last one, wait for another for ``IDLE_TIMEOUT_S``."""
        self._users.discard(user)
        for number in [number for number in self._in_progress if number[0] == user]:
            del self._in_progress[number]
        if self._users:
            return
        for placed, ctx in zip(self._stages, self._contexts, strict=True):
            placed.stage.finish(ctx)
        self._stages, self._contexts, self._finder, self._timeout_s = [], [], None, None
        self._in_progress.clear()
        self._idle_since = time.monotonic()

    def _watch(self) -> None:
        """End the process when it has been idle, or has worked on one item, for too long."""
        while True:
            limit, since = self._timeout_s, self._idle_since
            time.sleep(_CHECK_S if limit is None else min(_CHECK_S, limit / _CHECKS_PER_TIMEOUT))
            current = self._heartbeat.read()
            if current is not None and limit is not None and current[2] > limit and limit == self._timeout_s:
                os._exit(1)
            if since is not None and since == self._idle_since and time.monotonic() - since > IDLE_TIMEOUT_S:
                self._call_exit()
                return
            if self._shared and time.monotonic() - self._last_call > ABANDONED_S:  # its users may have been killed
                self._users.clear()
                self._idle_since = self._idle_since or time.monotonic() - IDLE_TIMEOUT_S

    def _call_exit(self) -> None:
        """Have Ray call ``exit_if_idle`` between two other calls, as Ray requires."""
        import ray

        with suppress(Exception):  # Ray is gone
            ray.get_runtime_context().current_actor.exit_if_idle.remote()

    def exit_if_idle(self) -> None:
        """End the actor, unless a run has started to use it in the meantime."""
        import ray.actor

        if self._idle_since is None:
            threading.Thread(target=self._watch, name="penstock watch", daemon=True).start()
        else:
            exit_actor: Any = ray.actor.exit_actor
            exit_actor()


def _device() -> str:
    """Return torch's name for the device that Ray has assigned to this worker."""
    import ray

    if not ray.get_gpu_ids():
        return "cpu"
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda:0" if torch.cuda.is_available() else "cpu"
