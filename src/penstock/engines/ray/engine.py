"""The Ray engine: a pool of actors for each segment, the order and all that sees more than one item here.

What is meant to happen is what ``local`` says, with these differences:
- a node dies: its blocks are done again on others, the stream does not change;
- what no node can give is refused before the first sample;
- close, Ctrl-C or a forgotten iterator: actors are told to end and killed a second later, in the middle of a block
  if need be; Ray goes on, unless it was started here and the process ends.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engines.cursor import Start
from penstock.engines.devices import with_moves
from penstock.engines.flow import BlockSizer
from penstock.engines.local import engine as local
from penstock.engines.local.engine import PooledRun, PoolSpec
from penstock.engines.local.pool import WorkerProxy
from penstock.engines.local.transport import dumps
from penstock.engines.local.worker_proxy import SegmentPayload
from penstock.engines.meter import Meter, Meters
from penstock.engines.program import Program, Segment
from penstock.engines.ray.actor_proxy import ActorPayload, ActorWorkerProxy, Shipped, fetched, release_idle
from penstock.engines.ray.origin_codec import Later
from penstock.engines.ray.placement import Need, Node, granted
from penstock.engines.ray.session import ensure, imported
from penstock.engines.read_stage import Finder, Read
from penstock.errors import EngineError
from penstock.order import I64, Order, Refs
from penstock.plan import Block, Resources, size_in_bytes

FEW = 32  # samples a block, until it is known what they cost
LONG_S = 0.25  # what a block may take: a way to an actor and back is 3 ms
RAW = 8_000_000  # bytes of a block before it is worked on
SHARE = 0.5  # of the cluster's store, for blocks under way
SHIPPED = 50_000_000  # bytes of samples in memory that may go to every worker, to be read beside others


def run(
    program: Program, order: Order | None, epoch: int, start: Start, meters: Meters, *, ordered: bool = True
) -> Iterator[Block]:
    """Run the plan; one that only reads runs in the caller's thread, and needs no Ray.

    Raises:
        EngineError: the cluster does not have what a stage asks for, or a function cannot be sent to it.
    """
    options = program.plan.engine
    if options.get("sharers", 1) > 1:
        raise EngineError("a worker of a torch DataLoader cannot run a plan on Ray; use ds.loader(), or num_workers=0")
    segments = [segment for level in program.levels for segment in level.segments]
    if not any(segment.heavy for segment in segments):
        return local.run(program, order, epoch, start, meters, ordered=ordered)
    ensure(options.get("address"))
    _end_first()
    cluster = _Cluster.now(options.get("cpus"))
    crews, shipped = _crews(program, order, segments, epoch, cluster)
    asked = options.get("memory")
    memory = max(local.MEMORY, int(SHARE * cluster.store)) if asked is None else size_in_bytes("memory", asked)
    pace = BlockSizer(nbytes=RAW, seconds=LONG_S, ceiling=2048)
    work = _Run(program, epoch, ordered, cluster.cores, memory, asked is not None, meters, crews, pace=pace, few=FEW)
    if shipped is not None:
        work.find = _Estimate(shipped.finder).later
    return work.blocks(order, start)


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What there is now."""

    nodes: list[Node]
    spare: float  # cores that no other run of this process has taken
    store: float
    inside: bool  # this process is an actor or a task of it

    @staticmethod
    def now(cpus: int | None) -> _Cluster:
        ray = imported()
        nodes = _nodes()
        spare = _cores(nodes) - sum(work.held for work in local.live if isinstance(work, _Run))
        inside = ray._private.worker.global_worker.mode == ray.WORKER_MODE
        store = ray.cluster_resources().get("object_store_memory", 0.0)
        return _Cluster(nodes, max(0.0, spare if cpus is None else min(spare, cpus)), store, inside)

    @property
    def cores(self) -> int:
        return max(1, int(_cores(self.nodes)))


def _cores(nodes: list[Node]) -> float:
    return sum(node.get("CPU", 0.0) for node in nodes)


def _nodes() -> list[Node]:
    """What the living nodes have, and what an autoscaler could add."""
    ray = imported()
    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    try:
        more = ray._private.state.state.get_max_resources_from_cluster_config()
    except Exception:  # it is Ray's own business, and not there for every kind of connection
        more = None
    return nodes + ([dict(more)] if more else [])


def _crews(
    program: Program, order: Order | None, segments: list[Segment], epoch: int, cluster: _Cluster
) -> tuple[dict[int, PoolSpec], Shipped | None]:
    """The crew of every heavy segment, by the segment's identity; and the sources, where actors read.

    Raises:
        EngineError: what the cluster cannot give, or a function that cannot travel.
    """
    heavy = [with_moves(segment) if segment.heavy else segment for segment in segments]
    shipped = None if order is None or not segments[0].heavy else _shipped(program.finder)
    ends = {id(level.segments[-1]) for level in program.levels if level.segments}
    there = set(map(id, program.levels[0].segments))
    pairs = []
    for segment, ready in zip(segments, heavy, strict=True):
        if segment.heavy:
            own = shipped if id(segment) in there else None
            here = own is None and any(isinstance(placed.stage, Read) for placed in ready.stages)
            contexts = program.contexts(ready, epoch)
            last = id(segment) in ends
            cargo = ActorPayload.of(ready, contexts, own, here, program.arrangement.slots, last)
            cargo.need, cargo.nodes = _need(ready), _nodes
            pairs.append((segment, ready, cargo))
    grants = granted([cargo.need for _, _, cargo in pairs], cluster.nodes, cluster.spare)
    crews = {}
    for (segment, ready, cargo), grant in zip(pairs, grants, strict=True):
        # A caller that is an actor may hold the last core itself, and would wait for ever.
        cargo.cpus = 0.0 if cluster.inside and cargo.need.cpus is None else grant.cpus
        crews[id(segment)] = PoolSpec(ready, grant.least, grant.most, grant.begin, [None], cargo)
    release_idle(cargo for _, _, cargo in pairs)
    return crews, shipped


def _need(segment: Segment) -> Need:
    asked = segment.resources or Resources()
    least, most = asked.workers if isinstance(asked.workers, tuple) else (asked.workers or 1, asked.workers)
    assert asked.memory is None or isinstance(asked.memory, int)
    return Need(segment.describe(), least, most, asked.cpus, asked.gpus, asked.memory or 0)


def _shipped(finder: Finder) -> Shipped | None:
    """The sources, if others can read them; ``None``: samples are read here, as they are in memory."""
    at_hand = [reader for reader in finder.readers if getattr(reader, "at_hand", False)]
    if len(at_hand) == len(finder.readers):
        return None
    if any(reader.names and reader.url(0).startswith("memory://") for reader in finder.readers):
        return None
    try:
        dumps(finder)
        return Shipped.of(finder) if len(dumps(at_hand)) <= SHIPPED else None
    except Exception:  # a source of somebody else's that cannot travel
        return None


@dataclass(frozen=True, slots=True)
class _Estimate:
    """About what samples weigh that nobody has looked for yet."""

    finder: Finder
    each: list[I64]

    def __init__(self, finder: Finder) -> None:
        object.__setattr__(self, "finder", finder)
        object.__setattr__(self, "each", [_sizes(reader) for reader in finder.readers])

    def later(self, refs: Refs) -> Later:
        """The samples, to be found by whoever reads them."""
        nbytes: I64 = np.zeros(len(refs), np.int64)
        chain: Refs | None = refs
        while chain is not None:
            for leaf in np.unique(chain.leaf).tolist():
                if leaf >= 0:
                    at = np.flatnonzero(chain.leaf == leaf)
                    nbytes[at] += self.each[leaf][chain.shard[at]]
            chain = chain.pair
        return Later(refs, self.finder, nbytes)


def _sizes(reader: Any) -> I64:
    """The mean size of the samples of each shard; 0 where it would take long to know."""
    counts = reader.counts(scan=False)
    if counts is None or getattr(reader, "remote", False):
        return np.zeros(len(reader.names), np.int64)
    sizes = np.maximum(0, np.array(reader.sizes(), np.int64))
    each: I64 = sizes // np.maximum(1, counts)
    return each


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Run(PooledRun):
    """One iteration on a cluster."""

    @property
    def held(self) -> float:
        """Cores that its workers count as."""
        cargos = [(crew.most, crew.cargo) for crew in self.crews.values()]
        return sum(most * cargo.cpus for most, cargo in cargos if isinstance(cargo, ActorPayload))

    def _pooled(self, blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        out = PooledRun._pooled(self, blocks, segment)
        crew = self.crews.get(id(segment))
        if crew is None or not isinstance(crew.cargo, ActorPayload):
            return out
        crew.cargo.pool = self.pools[-1]
        return fetched(out) if crew.cargo.last else out

    def _away(self, cargo: SegmentPayload, device: Any, meter: Meter, number: int) -> WorkerProxy:
        assert isinstance(cargo, ActorPayload)
        return ActorWorkerProxy(cargo, device, meter, self.meters, number)


_ends: list[bool] = []


def _end_first() -> None:
    """Have runs that are never closed end before Ray does, when the process ends."""
    if not _ends:
        _ends.append(True)
        atexit.register(local.close_all)
