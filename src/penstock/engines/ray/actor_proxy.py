"""The run's side of an actor: start it, send it blocks, replace it when it or its node dies.

If the worker reads its samples itself, a block is sent as a few numbers. It is returned as two objects: a small one
with the fields of the block, and its packed items, which stay in the cluster's object store until they are needed. An
actor of the next segment fetches them from there; the run fetches those of the last segment.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from secrets import token_hex
from typing import Any, ClassVar

from penstock.engines.local.block_codec import decode_error, raise_startup_error
from penstock.engines.local.pool import ABORT_TIMEOUT_S, BlockParts, Pool, ReassignJob
from penstock.engines.local.process_proxy import check_sendable
from penstock.engines.local.transport import CannotSend, PackedBytes, dumps, pack_object, unpack_object
from penstock.engines.local.worker_proxy import ProxyClosed, RemoteWorkerProxy, WorkerDied, WorkerLost, WorkerStuck
from penstock.engines.ray.actor_worker import IDLE_TIMEOUT_S, ActorWorker
from penstock.engines.ray.origin_codec import encode_origin
from penstock.engines.ray.placement import Need, Node, describe_free, grant_workers
from penstock.engines.ray.session import call_actor, import_ray, kill_actor, running_ray
from penstock.engines.read_stage import Finder, Span
from penstock.engines.segments import Segment
from penstock.errors import EngineError
from penstock.plan import Block, Context, JoinableItems, Origin, PlacedStage, join_columns

log = logging.getLogger("penstock")

_CHECK_S = 5.0  # interval at which a worker that waits for resources of the cluster is checked
_CHECKS_BEFORE_WARNING = 6
_CHECKS_PER_MINUTE = 12
_JOINS = 20  # attempts to find or start a shared actor, while the last one of its name is ending
_JOIN_PAUSE_S = 0.5
NAMESPACE = "penstock"  # of the names of shared actors


@dataclass(slots=True, eq=False)
class StoredObject:
    """The packed items of one block, in the cluster's object store; fetched once.

    Attributes:
        ref: The reference of the object.
        length: The number of items.
        nbytes: The size of the object.
        data: The object, if it is mapped in this process.
        recompute: Called if the object is lost; returns another one with the same items.
    """

    ref: Any
    length: int
    nbytes: int
    data: PackedBytes | None = None
    recompute: Callable[[], StoredObject] | None = None
    _items: Sequence[Any] | None = None

    def fetch(self) -> Sequence[Any]:
        """Return the items, fetched from the object store.

        Raises:
            CannotSend: The items cannot be unpickled here.
        """
        if self._items is None:
            data = running_ray().get(self.ref) if self.data is None else self.data
            self._items, self.data = unpack_object(data), None
        return self._items


class StoredItems(JoinableItems):
    """Items of blocks in the cluster's object store; slicing and joining moves references, never items."""

    def __init__(self, parts: Sequence[tuple[StoredObject, int, int]]) -> None:
        self.parts = list(parts)  # an object, its first item here, and the item after its last one

    @staticmethod
    def of(stored: StoredObject) -> StoredItems:
        """Return all items of an object."""
        return StoredItems([(stored, 0, stored.length)])

    def __len__(self) -> int:
        return sum(high - low for _, low, high in self.parts)

    @property
    def nbytes(self) -> int:
        """The approximate size of the items."""
        return sum(stored.nbytes * (high - low) // max(1, stored.length) for stored, low, high in self.parts)

    def __getitem__(self, selection: Any) -> Any:
        if not isinstance(selection, slice):
            return self.fetch()[selection]
        low, high, step = selection.indices(len(self))
        if step != 1:
            return self.fetch()[selection]
        parts, begin = [], 0
        for stored, first, last in self.parts:
            end = begin + last - first
            if begin < high and end > low:
                parts.append((stored, first + max(0, low - begin), last - max(0, end - high)))
            begin = end
        return StoredItems(parts)

    def joined(self, others: Sequence[Any]) -> StoredItems | None:
        return StoredItems([*self.parts, *(part for other in others for part in other.parts)])

    def fetch(self) -> Sequence[Any]:
        """Return the items, fetched from the object store.

        Raises:
            CannotSend: The items cannot be unpickled here.
        """
        return join_columns([stored.fetch()[low:high] for stored, low, high in self.parts])

    def recomputed(self) -> StoredItems | None:
        """Return the same items, computed again because an object is lost; None if that is impossible."""
        if any(stored.recompute is None for stored, _, _ in self.parts):
            return None
        return StoredItems([(stored.recompute(), low, high) for stored, low, high in self.parts if stored.recompute])


class LazyObjectRef:
    """An object that is put in the cluster's object store when its reference is first requested.

    The imports of Ray's first ``put`` take longer than requesting an actor, so actors are requested first and start
    meanwhile.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._ref: Any = None
        self._lock = threading.Lock()  # the workers of a pool are started in parallel

    def ref(self) -> Any:
        """Return the reference of the object in the store."""
        with self._lock:
            if self._ref is None:
                self._ref = running_ray().put(self._make())
            return self._ref


@dataclass(frozen=True, slots=True)
class SharedSources:
    """The open sources of a plan, in this process and in the cluster's object store."""

    finder: Finder
    stored: LazyObjectRef

    @staticmethod
    def of(finder: Finder) -> SharedSources:
        """Share sources that are known to be picklable."""
        return SharedSources(finder, LazyObjectRef(lambda: finder))


@dataclass(slots=True, eq=False)
class ActorPayload:
    """What the actors of a segment need, put in the cluster's object store once, and their resources."""

    segment: Segment
    local_stages: list[tuple[PlacedStage, Context]]  # reading, if the samples are in the memory of this process
    stages: list[PlacedStage]
    contexts: list[Context]
    sources: SharedSources | None  # if actors read samples, or name them in errors
    slots: int
    need: Need
    cpus: float
    is_last: bool  # no other segment in the cluster processes its items
    nodes: Callable[[], list[Node]]
    pool: Pool | None = None
    shared: str | None = None  # the name of the actors, if other processes use them, too
    on: ClassVar[str] = "actors"
    _stored: LazyObjectRef = field(init=False)
    _actor_class: Any = None

    def __post_init__(self) -> None:
        self._stored = LazyObjectRef(lambda: dumps((self.stages, self.contexts)))

    @staticmethod
    def of(
        segment: Segment,
        contexts: list[Context],
        sources: SharedSources | None,
        read_locally: bool,
        slots: int,
        is_last: bool,
    ) -> ActorPayload:
        """Return the payload of a segment; with ``read_locally``, its samples are read in this process.

        Raises:
            EngineError: A function cannot be sent to another process.
        """
        placed_stages = list(zip(segment.stages, contexts, strict=True))
        for placed in segment.stages:
            check_sendable(placed)
        return ActorPayload(
            segment,
            placed_stages[: segment.reading] if read_locally else [],
            segment.stages,
            contexts,
            sources,
            slots,
            Need(segment.describe()),
            0.0,
            is_last,
            list,
        )

    @property
    def timeout_s(self) -> float | None:
        """The maximum time for one item."""
        return self.segment.resources.timeout_s if self.segment.resources else None

    def acquire(self) -> None:
        """Do nothing: actors share only what is in the object store."""

    def release(self) -> None:
        """Do nothing: the object store drops what is no longer referenced."""

    def abort(self) -> None:
        """Do nothing: an actor that is starting can be killed like any other."""

    def start(self, device: Any) -> Actor:
        """Request an actor; the cluster decides on its device, and ``device`` is the number of the worker."""
        return Actor(self, device)

    def take_idle(self) -> Any | None:
        """Return an idle actor of an earlier run, or ``None``."""
        return None if self.shared is not None else _idle_actors.take(self.kind(), self.cpus)

    def new_actor(self, number: int) -> Any:
        """Return a new actor, which may have to wait for resources of the cluster; a shared one may be running."""
        ray = running_ray()
        if self._actor_class is None:
            self._actor_class = ray.remote(ActorWorker)
        resources: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.need.gpus}
        resources["memory"] = self.need.memory or None
        if self.shared is not None:  # it outlives the process that started it, and ends after its last user
            named = {"name": f"{self.shared}-{number}", "namespace": NAMESPACE, "get_if_exists": True}
            resources |= named | {"lifetime": "detached"}
        # Spread over all nodes, and never inside the placement group of a caller that is an actor itself.
        actor_class = self._actor_class.options(
            **resources, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        return actor_class.remote()

    def keep_idle(self, actor: Any) -> None:
        """Keep an idle actor for the next run."""
        _idle_actors.put(self.kind(), self.cpus, actor)

    def kind(self) -> tuple[Any, ...]:
        """Return what actors must have in common to be interchangeable: their cluster, job and requested resources."""
        context = import_ray().get_runtime_context()
        return context.gcs_address, context.get_job_id(), self.need.cpus, self.need.gpus, self.need.memory

    def load_into(self, actor: Any, user: str) -> Any:
        """Make an actor construct its functions; return the reference of its reply."""
        objects = [self._stored] if self.sources is None else [self._stored, self.sources.stored]
        refs, shared = [lazy.ref() for lazy in objects], self.shared is not None
        return call_actor(actor.load, refs, sys.path, os.getcwd(), self.timeout_s, user, shared)


class Actor:
    """One actor; a ``RemoteWorker``."""

    def __init__(self, payload: ActorPayload, number: int) -> None:
        """Take an idle actor, or request a new one.

        Raises:
            EngineError: Ray was shut down.
        """
        self._ray = import_ray()
        self._payload, self._number = payload, number
        self._user = token_hex(8)  # tells the users of a shared actor apart
        self._node: str | None = None
        try:
            self._nodes_at_start = self._living_nodes()
        except self._ray.exceptions.RaySystemError as exc:
            raise EngineError("Ray was shut down in the middle of the run") from exc
        self.cpu_s = 0.0
        self.retried = 0
        idle = payload.take_idle()
        self._reused = idle is not None
        self._actor = payload.new_actor(number) if idle is None else idle
        self._joins = _JOINS if payload.shared is not None else 0

    def wait_ready(self) -> None:
        try:
            kind, fact = self._startup_reply()
        except self._ray.exceptions.RayError as exc:
            if not (self._reused or self._joins):
                raise self._death(exc, "at its start") from None
            if self._joins:  # the actor that was found by its name was about to end
                self._joins -= 1
                time.sleep(_JOIN_PAUSE_S)
            self._reused, self._actor = False, self._payload.new_actor(self._number)
            return self.wait_ready()
        if kind == "raise":
            self.close()
            raise_startup_error(fact, "construct its functions")
        self._node = fact

    def _startup_reply(self) -> tuple[str, Any]:
        ready = self._payload.load_into(self._actor, self._user)
        need = self._payload.need
        for check in count(1):
            if running_ray().wait([ready], timeout=_CHECK_S)[0]:
                break
            grant_workers([need], self._payload.nodes(), 1.0)
            if check >= _CHECKS_BEFORE_WARNING and (check - _CHECKS_BEFORE_WARNING) % _CHECKS_PER_MINUTE == 0:
                free = describe_free(running_ray().available_resources())
                waited = "%s: a worker has been waiting for %d s to start with %s on the cluster, where %s"
                log.warning(waited, need.name, check * _CHECK_S, need.describe(), free)
        reply: tuple[str, Any] = running_ray().get(ready)
        return reply

    def request(self, origin: Origin, *message: Any) -> tuple[tuple[Any, ...], bool]:
        kind, number, encoded = message
        begun = time.monotonic()
        items = encoded[0] if encoded is not None else None
        while True:
            try:
                reply, ref = self._send(origin, kind, number, encoded, items)
                return self._decode_reply(running_ray().get(reply), ref)
            except self._ray.exceptions.ObjectLostError:
                items = items.recomputed() if isinstance(items, StoredItems) else None
                if items is None:
                    raise WorkerLost("its result was lost with its machine") from None
            except self._ray.exceptions.RayError as exc:
                raise self._death(exc, "in the middle of a block", time.monotonic() - begun) from None

    def _send(self, origin: Origin, kind: str, number: int, encoded: Any, items: Any) -> tuple[Any, Any]:
        """Send a message; return the references of the reply's fields and of its items."""
        call = self._actor.work.options(num_returns=2)
        key = (self._user, number)
        if encoded is None:
            reply, ref = call_actor(call, kind, key, None, [])
            return reply, ref
        _, keys, inputs, *rest = encoded
        sources = self._payload.sources
        encoded_origin = encode_origin(origin, inputs, None if sources is None else sources.finder, self._payload.slots)
        packed, slices = [], []
        if isinstance(items, StoredItems):
            packed, slices = [part[0].ref for part in items.parts], [part[1:] for part in items.parts]
        elif not is_unread(origin, items):
            packed, slices = [pack_object(items)], [(0, len(items))]
        reply, ref = call_actor(call, kind, key, dumps((encoded_origin, (keys, inputs, *rest))), slices, *packed)
        return reply, ref

    def _decode_reply(self, reply: bytes, ref: Any) -> tuple[tuple[Any, ...], bool]:
        kind, *fields = pickle.loads(reply)
        if kind == "raise":
            raise decode_error(fields[0])
        if kind == "unreadable":
            raise CannotSend(fields[0])
        encoded, more_parts, (self.cpu_s, self.retried), length, nbytes = fields
        data = running_ray().get(ref) if self._payload.is_last else None
        return (StoredItems.of(StoredObject(ref, length, nbytes, data)), *encoded), more_parts

    def current_stage(self) -> int | None:
        """Return ``None``: it is unknown for an actor."""
        return None

    def _death(self, exc: Exception, when: str, seconds: float = 0.0) -> WorkerDied:
        """Kill the actor and return an error that says why it ended; log the end of one that others use, too."""
        self.kill()
        death = self._reason(exc, when, seconds)
        if self._payload.shared is not None:
            log.warning("%s: the parts of a split share a worker, and %s", self._payload.need.name, death)
        return death

    def _reason(self, exc: Exception, when: str, seconds: float) -> WorkerDied:
        timeout_s = self._payload.timeout_s
        if timeout_s is not None and seconds > timeout_s:
            return WorkerStuck(f"it took longer than timeout_s={timeout_s:g} and was killed")
        try:
            alive = self._living_nodes()
        except self._ray.exceptions.RayError:
            return WorkerDied(f"Ray was shut down {when}")
        if self._nodes_at_start - alive if self._node is None else self._node not in alive:
            return NodeLost(f"its cluster node died {when}")
        reason = " ".join(str(exc).split())
        return WorkerDied(f"its worker process ended {when}: {reason}")

    def _living_nodes(self) -> set[str]:
        return {node["NodeID"] for node in running_ray().nodes() if node["Alive"]}

    def kill(self) -> None:
        if self._payload.shared is None:
            kill_actor(self._actor)
        else:
            with suppress(Exception):  # it is gone; if not, others use it
                call_actor(self._actor.stop, self._user)

    def close(self) -> None:
        """Let the actor clean up, then keep it briefly for another run; kill it if that fails."""
        try:
            stopped = call_actor(self._actor.stop, self._user)
            if self._payload.shared is None:
                running_ray().get(stopped, timeout=ABORT_TIMEOUT_S)
                self._payload.keep_idle(self._actor)
        except Exception:  # it is gone or busy
            self.kill()


class _IdleActors:
    """Idle actors of this process, for reuse by later runs; an actor that is not reused soon ends by itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actors: list[tuple[tuple[Any, ...], float, float, Any]] = []  # kind, cores, expiry, actor

    def put(self, kind: tuple[Any, ...], cpus: float, actor: Any) -> None:
        with self._lock:
            self._actors.append((kind, cpus, time.monotonic() + IDLE_TIMEOUT_S / 2, actor))

    def take(self, kind: tuple[Any, ...], cpus: float) -> Any | None:
        """Remove and return an actor of this kind that holds at most ``cpus`` cores; ``None`` if there is none."""
        with self._lock:
            now = time.monotonic()
            self._actors = [entry for entry in self._actors if entry[2] > now]  # the others end by themselves
            for number, (actor_kind, held, _, actor) in enumerate(self._actors):
                if actor_kind == kind and held <= cpus:
                    del self._actors[number]
                    return actor
        return None

    def release(self, wanted: Collection[tuple[tuple[Any, ...], float]]) -> None:
        """Kill the actors that cannot be used as any of the ``wanted`` (kind, cores)."""
        with self._lock:
            usable = [any(entry[0] == kind and entry[1] <= cpus for kind, cpus in wanted) for entry in self._actors]
            unusable = [entry for entry, use in zip(self._actors, usable, strict=True) if not use]
            self._actors = [entry for entry, use in zip(self._actors, usable, strict=True) if use]
        for *_, actor in unusable:
            kill_actor(actor)


_idle_actors = _IdleActors()


def release_idle(payloads: Iterable[ActorPayload]) -> None:
    """Kill idle actors to free their resources, except those that ``payloads`` can use."""
    _idle_actors.release([(payload.kind(), payload.cpus) for payload in payloads])


class NodeLost(WorkerLost):
    """A worker's node is gone, and there may be no resources for another worker."""


def is_unread(origin: Origin, items: Any) -> bool:
    """Return whether the worker still has to read the samples of a block."""
    return isinstance(origin, Span) and origin.is_unread(items)


@dataclass(slots=True, eq=False)
class ActorWorkerProxy(RemoteWorkerProxy):
    """A worker proxy whose work is done by an actor."""

    payload: ActorPayload

    def _parts(self, block: Block, delivered: int = 0) -> BlockParts:
        """Yield the parts of a block; if its node dies, another worker continues: a new one may start slowly."""
        number = delivered
        try:
            for part, more_parts in RemoteWorkerProxy._parts(self, block, delivered):
                if isinstance(part.items, StoredItems):
                    for stored, _, _ in part.items.parts:
                        stored.recompute = partial(_recompute, self.payload, block, number)
                number += 1
                yield part, more_parts
        except _NodeGone:
            raise ReassignJob(_restarted_parts(block, number)) from None

    def _request(self, worker: Any, origin: Origin, *message: Any) -> Any:
        try:
            return RemoteWorkerProxy._request(self, worker, origin, *message)
        except NodeLost:
            raise _NodeGone from None

    def _one_by_one(self, block: Block) -> Block:
        """Process a block item by item; if its samples are unread, read them in this process first."""
        if is_unread(block.lineage.origin, block.items):
            reading = next((p, c) for p, c in zip(self.payload.stages, self.payload.contexts, strict=True))
            block = reading[0].stage.run(block, reading[1])
        elif isinstance(block.items, StoredItems):
            block = block.with_items(block.items.fetch())
        return RemoteWorkerProxy._one_by_one(self, block)


class _NodeGone(Exception):
    """Carries a ``NodeLost`` past the retries of ``RemoteWorkerProxy``, which catch every ``WorkerDied``."""


def _restarted_parts(block: Block, delivered: int) -> BlockParts:
    """Return parts that make the next worker start the block again."""
    raise ProxyClosed(block, delivered)
    yield


def _recompute(payload: ActorPayload, block: Block, number: int) -> StoredObject:
    """Process a block again, and return the object with the items of its part ``number``."""
    assert payload.pool is not None
    part, rest = payload.pool.submit(block).result()
    for _ in range(number):
        assert rest is not None
        part, rest = payload.pool.submit(rest).result()
    assert isinstance(part.items, StoredItems)
    ((stored, _, _),) = part.items.parts
    return stored


def fetch_items(blocks: Iterator[Block]) -> Iterator[Block]:
    """Yield the blocks with their items fetched from the object store."""
    for block in blocks:
        if isinstance(block.items, StoredItems):
            block.items = block.items.fetch()
        yield block
        del block
