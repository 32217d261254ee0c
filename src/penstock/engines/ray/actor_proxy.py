"""Workers that are actors of a cluster, as the run sees them: started, asked, replaced when they or their nodes die.

A block goes out as a few numbers where the worker reads its samples itself, and comes back in two objects: what became
of it, which is small, and its items, encoded, which stay in the cluster's store until somebody needs them. An actor of
the next segment gets them from there; the run gets those of the last one.
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
from typing import Any, ClassVar

from penstock.engines.local.block_codec import decode_error, raise_unready
from penstock.engines.local.pool import ABORT_S, Parts, Pool, Stranded
from penstock.engines.local.process_proxy import check_travels
from penstock.engines.local.transport import Bytes, CannotSend, dumps, folded, unfolded
from penstock.engines.local.worker_proxy import Left, RemoteWorkerProxy, WorkerDied, WorkerLost, WorkerStuck
from penstock.engines.program import Segment
from penstock.engines.ray.actor_worker import IDLE_S, ActorWorker
from penstock.engines.ray.origin_codec import Later, encode_origin
from penstock.engines.ray.placement import Need, Node, granted
from penstock.engines.ray.session import imported
from penstock.engines.read_stage import Finder, Read, Span
from penstock.plan import Block, Context, Origin, PlacedStage

log = logging.getLogger("penstock")

_LOOK_S = 5.0  # how often a worker that waits for a place is looked after
_LOOKS = 6  # until the log says that it waits


class Remote(Sequence[Any]):
    """Items that lie in the cluster's store."""

    def __init__(self, ref: Any, many: int, nbytes: int, data: Bytes | None) -> None:
        self.ref, self.many, self.nbytes = ref, many, nbytes
        self.data = data  # the same, mapped here
        self.remake: Callable[[], Remote] | None = None
        self._items: Sequence[Any] | None = None

    def __len__(self) -> int:
        return self.many

    def __getitem__(self, which: Any) -> Any:
        return self.fetch()[which]

    def fetch(self) -> Sequence[Any]:
        """The items.

        Raises:
            CannotSend: they cannot be made again here.
        """
        if self._items is None:
            data = imported().get(self.ref) if self.data is None else self.data
            self._items, self.data = unfolded(data), None
        return self._items


class Stored:
    """Something that is put in the cluster's store when it is first asked for: what Ray needs for that takes longer
    to import than an actor to be asked for, so actors come first and start meanwhile."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._ref: Any = None
        self._lock = threading.Lock()  # workers of one pool are started side by side

    def ref(self) -> Any:
        """Where it lies."""
        with self._lock:
            if self._ref is None:
                self._ref = imported().put(self._make())
            return self._ref


@dataclass(frozen=True, slots=True)
class Shipped:
    """The open sources, here and in the cluster's store."""

    finder: Finder
    stored: Stored

    @staticmethod
    def of(finder: Finder) -> Shipped:
        """Sources that are known to travel."""
        return Shipped(finder, Stored(lambda: finder))


@dataclass(slots=True, eq=False)
class ActorPayload:
    """What the actors of a segment need, put in the cluster's store once, and what each may use."""

    segment: Segment
    before: list[tuple[PlacedStage, Context]]  # reading, where the samples are in the memory of this process
    stages: list[PlacedStage]
    contexts: list[Context]
    shipped: Shipped | None  # the sources, where actors read or name samples
    slots: int
    need: Need
    cpus: float
    last: bool  # nobody in the cluster goes on with its items
    nodes: Callable[[], list[Node]]
    pool: Pool | None = None
    on: ClassVar[str] = "actors"
    _stored: Stored = field(init=False)
    _made: Any = None

    def __post_init__(self) -> None:
        self._stored = Stored(lambda: dumps((self.stages, self.contexts)))

    @staticmethod
    def of(
        segment: Segment, contexts: list[Context], shipped: Shipped | None, here: bool, slots: int, last: bool
    ) -> ActorPayload:
        """Pack a segment; ``here``: its samples are read in this process.

        Raises:
            EngineError: a function cannot travel.
        """
        placed = list(zip(segment.stages, contexts, strict=True))
        for one in segment.stages:
            check_travels(one)
        reading = [(one, ctx) for one, ctx in placed if isinstance(one.stage, Read)]
        return ActorPayload(
            segment,
            reading if here else [],
            segment.stages,
            contexts,
            shipped,
            slots,
            Need(segment.describe()),
            0.0,
            last,
            list,
        )

    @property
    def timeout_s(self) -> float | None:
        """How long one item may take."""
        return self.segment.resources.timeout_s if self.segment.resources else None

    def enter(self) -> None:
        """Nothing is shared between actors but what is in the store."""

    def leave(self) -> None:
        """The store drops what nobody refers to."""

    def abort(self) -> None:
        """Actors are started at once: there is one to kill."""

    def start(self, device: Any) -> Actor:
        """Start a worker; on which device is the cluster's to say."""
        return Actor(self)

    def idle(self) -> Any | None:
        """An actor of another run that has nothing to do, if there is one."""
        return _idle.take(self.kind(), self.cpus)

    def actor(self) -> Any:
        """A new actor, which may have to wait for its place."""
        if self._made is None:
            self._made = imported().remote(ActorWorker)
        asked = {"num_cpus": self.cpus, "num_gpus": self.need.gpus, "memory": self.need.memory or None}
        # Over all nodes, and never inside the placement group of a caller that is an actor itself.
        made = self._made.options(**asked, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")
        return made.remote()

    def keep(self, actor: Any) -> None:
        """Keep one that has nothing to do for the next run."""
        _idle.put(self.kind(), self.cpus, actor)

    def kind(self) -> tuple[Any, ...]:
        """What makes actors alike: their cluster, and what they asked of it."""
        context = imported().get_runtime_context()
        return context.gcs_address, context.get_job_id(), self.need.cpus, self.need.gpus, self.need.memory

    def loaded(self, actor: Any) -> Any:
        """Have it make its functions; its answer to come."""
        needed = [self._stored] if self.shipped is None else [self._stored, self.shipped.stored]
        return actor.load.remote([one.ref() for one in needed], sys.path, os.getcwd(), self.timeout_s)


class Actor:
    """One worker. One thread at a time, but for ``kill``."""

    def __init__(self, cargo: ActorPayload) -> None:
        """Ask the cluster for it."""
        self._ray = imported()
        self._cargo = cargo
        self._node: str | None = None
        self.cpu = 0.0
        self.retried = 0
        idle = cargo.idle()
        self._second_hand = idle is not None
        self._actor = cargo.actor() if idle is None else idle

    def load(self) -> None:
        """Wait until it is ready.

        Raises:
            WorkerDied: it ended before that.
            EngineError: it cannot make its functions, or the cluster has no place for it any more.
            StageError: the constructor of one of them fails.
        """
        try:
            word, fact = self._ready()
        except self._ray.exceptions.RayError as exc:
            if not self._second_hand:
                raise self._died(exc, "at its start") from None
            self._second_hand, self._actor = False, self._cargo.actor()
            return self.load()
        if word == "raise":
            self.close()
            raise_unready(fact, "make its functions")
        self._node = fact

    def _ready(self) -> tuple[str, Any]:
        ready = self._cargo.loaded(self._actor)
        for look in count(1):
            if self._ray.wait([ready], timeout=_LOOK_S)[0]:
                break
            granted([self._cargo.need], self._cargo.nodes(), 1.0)
            if look == _LOOKS:
                log.warning("%s: a worker still waits for its place in the cluster", self._cargo.need.name)
        answer: tuple[str, Any] = self._ray.get(ready)
        return answer

    def ask(self, origin: Origin, *words: Any) -> tuple[tuple[Any, ...], bool]:
        """Have it work.

        Raises:
            WorkerDied: it did, or ended itself since it took too long.
            CannotSend: what was sent, or its answer, could not be made again at the other end.
        """
        word, number, facts = words
        begun = time.monotonic()
        items = facts[0] if facts is not None else None
        while True:
            try:
                answer, ref = self._sent(origin, word, number, facts, items)
                return self._received(self._ray.get(answer), ref)
            except self._ray.exceptions.ObjectLostError:
                if not isinstance(items, Remote) or items.remake is None:
                    raise WorkerLost("what it made is lost with its machine") from None
                items = items.remake()
            except self._ray.exceptions.RayError as exc:
                raise self._died(exc, "in the middle of a block", time.monotonic() - begun) from None

    def _sent(self, origin: Origin, word: str, number: int, facts: Any, items: Any) -> tuple[Any, Any]:
        call = self._actor.work.options(num_returns=2)
        if facts is None:
            answer, ref = call.remote(word, number, None, None)
            return answer, ref
        _, keys, inputs, *rest = facts
        shipped = self._cargo.shipped
        words = encode_origin(origin, inputs, None if shipped is None else shipped.finder, self._cargo.slots)
        payload: Any = None
        if isinstance(items, Remote):
            payload = items.ref
        elif not is_unread(origin, items):
            payload = folded(items)
        answer, ref = call.remote(word, number, dumps((words, (keys, inputs, *rest))), payload)
        return answer, ref

    def _received(self, answer: bytes, ref: Any) -> tuple[tuple[Any, ...], bool]:
        word, *rest = pickle.loads(answer)
        if word == "raise":
            raise decode_error(rest[0])
        if word == "unreadable":
            raise CannotSend(rest[0])
        facts, again, (self.cpu, self.retried), many, nbytes = rest
        data = self._ray.get(ref) if self._cargo.last else None
        return (Remote(ref, many, nbytes, data), *facts), again

    def stage(self) -> int | None:
        """Not known of an actor that is gone."""
        return None

    def _died(self, exc: Exception, when: str, seconds: float = 0.0) -> WorkerDied:
        """What became of it."""
        self.kill()
        limit = self._cargo.timeout_s
        if limit is not None and seconds > limit:
            return WorkerStuck(f"it took longer than timeout_s={limit:g} and was ended")
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if self._node is not None and self._node not in alive:
            return NodeLost(f"its node of the cluster died {when}")
        said = " ".join(str(exc).split())
        return WorkerDied(f"its worker process ended {when}: {said}")

    def kill(self) -> None:
        """End it at once; whoever waits for it is told."""
        with suppress(Exception):  # it is gone, or Ray is
            self._ray.kill(self._actor)

    def close(self) -> None:
        """Let it clean up, and keep it for a moment, in which another run may want it; or end it."""
        try:
            self._ray.get(self._actor.stop.remote(), timeout=ABORT_S)
            self._cargo.keep(self._actor)
        except Exception:  # it is gone, it is busy, or Ray is gone
            self.kill()


class _Idle:
    """Actors that have nothing to do; they end by themselves soon after they are not taken from here any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actors: list[tuple[tuple[Any, ...], float, float, Any]] = []  # kind, cores, until when, the actor

    def put(self, kind: tuple[Any, ...], cpus: float, actor: Any) -> None:
        with self._lock:
            self._actors.append((kind, cpus, time.monotonic() + IDLE_S / 2, actor))

    def take(self, kind: tuple[Any, ...], cpus: float) -> Any | None:
        """One of this kind that holds no more cores, if there is."""
        with self._lock:
            now = time.monotonic()
            self._actors = [one for one in self._actors if one[2] > now]  # the others end by themselves
            for number, (its, held, _, actor) in enumerate(self._actors):
                if its == kind and held <= cpus:
                    del self._actors[number]
                    return actor
        return None

    def release(self, wanted: Collection[tuple[tuple[Any, ...], float]]) -> None:
        """Have those give back what they hold that none of the ``wanted`` can be."""
        with self._lock:
            of_use = [any(one[0] == kind and one[1] <= cpus for kind, cpus in wanted) for one in self._actors]
            gone = [one for one, good in zip(self._actors, of_use, strict=True) if not good]
            self._actors = [one for one, good in zip(self._actors, of_use, strict=True) if good]
        for *_, actor in gone:
            with suppress(Exception):  # it ended by itself
                imported().kill(actor)


_idle = _Idle()


def release_idle(cargos: Iterable[ActorPayload]) -> None:
    """Give back what idle actors hold, but for those that ``cargos`` can use."""
    _idle.release([(cargo.kind(), cargo.cpus) for cargo in cargos])


class NodeLost(WorkerLost):
    """A worker's node is gone, and there may be no place for another worker."""


def is_unread(origin: Origin, items: Any) -> bool:
    """Whether a block's samples are still to be read, by whoever works on it."""
    return isinstance(origin, Span) and isinstance(origin.spots, Later) and not len(items)


@dataclass(slots=True, eq=False)
class ActorWorkerProxy(RemoteWorkerProxy):
    """What a worker thread works with when its work is done by an actor."""

    cargo: ActorPayload

    def _parts(self, block: Block, given: int = 0) -> Parts:
        """The parts of a block; if its node dies it is for somebody else, as a new worker may be long in coming."""
        number = given
        try:
            for part, again in RemoteWorkerProxy._parts(self, block, given):
                if isinstance(part.items, Remote):
                    part.items.remake = partial(_remade, self.cargo, block, number)
                number += 1
                yield part, again
        except _Stranding:
            raise Stranded(_handed_over(block, number)) from None

    def _asked(self, child: Any, origin: Origin, *words: Any) -> Any:
        try:
            return RemoteWorkerProxy._asked(self, child, origin, *words)
        except NodeLost:
            raise _Stranding from None

    def _one_by_one(self, block: Block) -> Block:
        """The block done item by item, read here if it must be."""
        if is_unread(block.origin, block.items):
            reading = next((p, c) for p, c in zip(self.cargo.stages, self.cargo.contexts, strict=True))
            block = reading[0].stage.run(block, reading[1])
        elif isinstance(block.items, Remote):
            block = block.become(block.items.fetch())
        return RemoteWorkerProxy._one_by_one(self, block)


class _Stranding(Exception):
    """On the way from a lost node to ``Stranded``."""


def _handed_over(block: Block, given: int) -> Parts:
    """The parts of a block that somebody else begins with anew."""
    raise Left(block, given)
    yield


def _remade(cargo: ActorPayload, block: Block, number: int) -> Remote:
    """Part ``number`` of what becomes of a block, made again."""
    assert cargo.pool is not None
    part, rest = cargo.pool.submit(block).result()
    for _ in range(number):
        assert rest is not None
        part, rest = cargo.pool.submit(rest).result()
    assert isinstance(part.items, Remote)
    return part.items


def fetched(blocks: Iterator[Block]) -> Iterator[Block]:
    """The blocks with their items at hand."""
    for block in blocks:
        if isinstance(block.items, Remote):
            block.items = block.items.fetch()
        yield block
        del block
