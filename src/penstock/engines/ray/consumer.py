"""A consumer in an actor: blocks are sent to it by reference, so that their items never pass through the run's process.

The intended behaviour:
- success: every block is taken in order; ``close`` returns the consumer's result;
- the consumer fails: its error is raised by a later ``add``, or by ``close``;
- the actor, its node or a block that it was to take is lost: ``ConsumerLost`` is raised, and the run starts over with a
  new consumer.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from penstock.engines.consumer import Consumer, ConsumerLost
from penstock.engines.local.block_codec import decode_error, encode_error
from penstock.engines.local.transport import PackedBytes, dumps, pack_object, unpack_object
from penstock.engines.ray.actor_proxy import StoredItems
from penstock.engines.ray.session import call_actor, import_ray, kill_actor, running_ray
from penstock.plan import join_columns

log = logging.getLogger("penstock")

_PENDING_ADDS = 4  # blocks on their way to a consumer: one being taken, the others being fetched
_CHECK_S = 30.0  # after which a consumer that has not started is named, and then once a minute


class ConsumerActor:
    """The code of the actor: it holds one consumer at a time."""

    def __init__(self) -> None:
        self._consumer: Consumer | None = None

    def make(self, make: bytes, path: list[str], folder: str) -> bytes:
        """Construct the consumer of the next run, in the working directory and module path of the run."""
        with suppress(OSError):  # this machine has no such folder
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path and os.path.exists(entry)]

        def construct() -> None:
            self._consumer = pickle.loads(make)()

        return self._reply(construct)

    def add(self, slices: list[tuple[int, int]], *packed: PackedBytes) -> bytes:
        """Take the items of a block: slices of objects, one after another."""
        return self._reply(lambda: self._add(slices, packed))

    def _add(self, slices: list[tuple[int, int]], packed: Sequence[PackedBytes]) -> None:
        parts = [unpack_object(data)[low:high] for data, (low, high) in zip(packed, slices, strict=True)]
        assert self._consumer is not None
        self._consumer.add(join_columns(parts))

    def close(self) -> bytes:
        """Finish the consumer and return its result."""
        assert self._consumer is not None
        return self._reply(self._consumer.close)

    def drop(self) -> None:
        """End the consumer, if there is one."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.drop()

    def _reply(self, call: Callable[[], Any]) -> bytes:
        try:
            return dumps(("done", call()))
        except BaseException as exc:  # raised by the run
            return dumps(("raise", encode_error(exc)))


class ActorHost:
    """Starts an actor for the consumers of one lane, and another one if it is lost."""

    def __init__(self) -> None:
        self._actor: Any = None

    def make(self, make: Callable[[], Consumer]) -> RemoteConsumer:
        """Return a consumer in the actor.

        Raises:
            ConsumerLost: The actor ended before it was ready.
        """
        ray = import_ray()
        if self._actor is None:
            # It reserves no core: it waits for blocks most of the time, and must never wait for the pools it drains.
            actor_class = ray.remote(ConsumerActor).options(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD")
            self._actor = actor_class.remote()
        consumer = RemoteConsumer(self._actor, self._forget)
        consumer.begin(make)
        return consumer

    def _forget(self) -> None:
        self.close()

    def close(self) -> None:
        """Kill the actor."""
        actor, self._actor = self._actor, None
        if actor is not None:
            kill_actor(actor)


class RemoteConsumer:
    """The run's side of a consumer in an actor.

    Args:
        actor: The actor.
        on_loss: Called when the actor cannot be used any more.
    """

    def __init__(self, actor: Any, on_loss: Callable[[], None]) -> None:
        self._actor, self._on_loss = actor, on_loss
        self._pending: deque[tuple[Any, Any]] = deque()  # replies, and the items that must be kept until then
        self._open = False

    def begin(self, make: Callable[[], Any]) -> None:
        """Construct the consumer, and wait for it.

        Raises:
            ConsumerLost: The actor ended before that.
        """
        with self._losses():
            reply = call_actor(self._actor.make, dumps(make), sys.path, os.getcwd())
        for minute in count():
            with self._losses():
                if running_ray().wait([reply], timeout=_CHECK_S * (1 + (minute > 0)))[0]:
                    break
            log.warning(
                "a writer is still waiting for a process on the cluster, after %d s", _CHECK_S * (1 + 2 * minute)
            )
        self._result(reply)
        self._open = True

    def add(self, items: Sequence[Any]) -> None:
        """Send a block, and wait while too many are on their way.

        Raises:
            ConsumerLost: The actor or a block is lost.
            PenstockError: The consumer failed, on this block or on one before it.
        """
        with self._losses():
            if isinstance(items, StoredItems):
                refs = [stored.ref for stored, _, _ in items.parts]
                slices = [(low, high) for _, low, high in items.parts]
            else:
                refs, slices = [running_ray().put(pack_object(items))], [(0, len(items))]
            self._pending.append((call_actor(self._actor.add, slices, *refs), items))
        while len(self._pending) >= _PENDING_ADDS:
            self._take()

    def close(self) -> Any:
        """Finish, and return the consumer's result.

        Raises:
            ConsumerLost: The actor or a block is lost.
            PenstockError: The consumer failed.
        """
        while self._pending:
            self._take()
        with self._losses():
            reply = call_actor(self._actor.close)
        result = self._result(reply)
        self._open = False
        return result

    def drop(self) -> None:
        """End without finishing."""
        self._pending.clear()
        was_open, self._open = self._open, False
        if was_open:
            with suppress(Exception):  # the actor is gone
                running_ray().get(call_actor(self._actor.drop), timeout=5.0)

    def _take(self) -> None:
        reply, items = self._pending.popleft()
        self._result(reply)
        del items

    def _result(self, reply: Any) -> Any:
        with self._losses():
            kind, value = pickle.loads(running_ray().get(reply))
        if kind == "raise":
            raise decode_error(value)
        return value

    def _losses(self) -> _Losses:
        return _Losses(self)

    def lost(self, exc: BaseException) -> ConsumerLost:
        """Forget the actor, and return the error that says why."""
        self._open = False
        self._on_loss()
        return ConsumerLost(f"a writer on the cluster was lost: {' '.join(str(exc).split())[:300]}")


class _Losses:
    """Turns Ray's errors into ``ConsumerLost``."""

    def __init__(self, consumer: RemoteConsumer) -> None:
        self._consumer = consumer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, exc: BaseException | None, tb: Any) -> None:
        if exc is not None and isinstance(exc, import_ray().exceptions.RayError):
            raise self._consumer.lost(exc) from None
