"""The Ray engine: a pool of actors for each segment; the order and group stages run in this process.

The intended behaviour is that of the local engine, with these differences:
- a node dies: its blocks are processed again on other nodes; the stream does not change;
- a request that no node can meet is refused before the first sample;
- close, Ctrl-C or a forgotten iterator: actors are asked to end, and killed a second later, in the middle of a block
  if necessary. Ray keeps running, unless this process started it and ends.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engines.cursor import Start
from penstock.engines.devices import with_device_copies
from penstock.engines.flow import BlockSizer
from penstock.engines.local import engine as local
from penstock.engines.local.engine import MemoryBound, PooledRun, PoolSpec
from penstock.engines.local.pool import Pool, WorkerProxy
from penstock.engines.local.transport import dumps
from penstock.engines.local.worker_proxy import SegmentPayload
from penstock.engines.meter import Meter, Meters
from penstock.engines.program import Program
from penstock.engines.ray.actor_proxy import ActorPayload, ActorWorkerProxy, SharedSources, fetch_items, release_idle
from penstock.engines.ray.origin_codec import DeferredSamples
from penstock.engines.ray.placement import Need, Node, grant_workers, total_cores
from penstock.engines.ray.session import connect_ray, import_ray
from penstock.engines.read_stage import Finder
from penstock.engines.segments import Segment
from penstock.errors import EngineError
from penstock.order import I64, Order, Refs
from penstock.plan import Block, Reader, Resources, size_in_bytes

ACTOR_FIRST_BLOCK_SAMPLES = 32  # samples of a block until their cost is known
BLOCK_SECONDS = 0.25  # of work on a block: the round trip to an actor takes 3 ms
RAW_BLOCK_BYTES = 8_000_000  # stored bytes of a block
STORE_SHARE = 0.5  # of the cluster's object store, for blocks in progress
MAX_SHARED_BYTES = 50_000_000  # of in-memory samples that may be sent to every worker, next to stored samples


def run(
    program: Program,
    order: Order | None,
    epoch: int,
    start: Start,
    meters: Meters,
    *,
    ordered: bool = True,
    pools: PooledRun | None = None,
) -> Iterator[Block]:
    """Run a plan as ``local.run`` does, with ``pools`` from ``shared_actor_pools``; one that only reads, without Ray.

    Raises:
        EngineError: The cluster lacks the resources that a stage requests, or a function cannot be sent to it.
    """
    if pools is not None:
        return pools.guest(program, epoch, ordered, meters).blocks(order, start)
    options = program.plan.engine
    if options.get("sharers", 1) > 1:
        raise EngineError("a worker of a torch DataLoader cannot run a plan on Ray; use ds.loader(), or num_workers=0")
    segments = [segment for level in program.levels for segment in level.segments]
    if not any(segment.needs_pool for segment in segments):
        return local.run(program, order, epoch, start, meters, ordered=ordered)
    return _ray_run(program, order, epoch, meters, ordered).blocks(order, start)


def shared_actor_pools(program: Program, meters: Meters, keep_remote: bool = False) -> PooledRun | None:
    """Return pools of actors that several runs of one program use at the same time, within the memory of one run.

    With ``keep_remote`` the items of the last pool stay in the object store, for consumers in other processes.

    Raises:
        EngineError: The cluster lacks the resources that a stage requests, or a function cannot be sent to it.
    """
    if not any(segment.needs_pool for level in program.levels for segment in level.segments):
        return None
    host = _ray_run(program, program.order(0), 0, meters, True)
    last = program.levels[-1].segments
    if keep_remote and last and id(last[-1]) in host.pool_specs:
        payload = host.pool_specs[id(last[-1])].payload
        assert isinstance(payload, ActorPayload)
        payload.is_last = False
    return host.as_host()


def _ray_run(program: Program, order: Order | None, epoch: int, meters: Meters, ordered: bool) -> _RayRun:
    options = program.plan.engine
    segments = [segment for level in program.levels for segment in level.segments]
    connect_ray(options.get("address"))
    _close_runs_before_ray()
    cluster = _Cluster.now(options.get("cpus"))
    pool_specs, sources = _pool_specs(program, order, segments, epoch, cluster)
    requested = options.get("memory")
    default_memory = max(local.MEMORY_BYTES, int(STORE_SHARE * cluster.store_bytes))
    memory = default_memory if requested is None else size_in_bytes("memory", requested)
    ray_run = _RayRun(
        program,
        epoch,
        ordered,
        cluster.cores,
        memory,
        requested is not None,
        meters,
        pool_specs,
        sizer=BlockSizer(max_stored_bytes=RAW_BLOCK_BYTES, max_seconds=BLOCK_SECONDS, ceiling=2048),
        first_block_samples=ACTOR_FIRST_BLOCK_SAMPLES,
    )
    if sources is not None:
        ray_run.locate = _SizeEstimate(sources.finder).defer
    return ray_run


def cluster_cores(address: str | None) -> int:
    """Connect to a cluster, and return the number of its cores.

    Raises:
        EngineError: The cluster cannot be reached.
    """
    connect_ray(address)
    _close_runs_before_ray()
    return int(total_cores(_nodes()))


@dataclass(frozen=True, slots=True)
class _Cluster:
    """The resources of the cluster at one moment."""

    nodes: list[Node]
    spare: float  # cores that no other run of this process uses
    store_bytes: float
    inside: bool  # this process is an actor or a task of the cluster

    @staticmethod
    def now(cpus: int | None) -> _Cluster:
        """Return the resources of the cluster that this process is connected to, of which it may use ``cpus``."""
        ray = import_ray()
        nodes = _nodes()
        held = sum(live_run.held_cpus for live_run in local.live_runs if isinstance(live_run, _RayRun))
        spare = total_cores(nodes) - held
        inside = ray._private.worker.global_worker.mode == ray.WORKER_MODE
        store_bytes = ray.cluster_resources().get("object_store_memory", 0.0)
        return _Cluster(nodes, max(0.0, spare if cpus is None else min(spare, cpus)), store_bytes, inside)

    @property
    def cores(self) -> int:
        return max(1, int(total_cores(self.nodes)))


def _nodes() -> list[Node]:
    """Return the resources of the living nodes, and what an autoscaler could add."""
    ray = import_ray()
    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    try:
        addable = ray._private.state.state.get_max_resources_from_cluster_config()
    except Exception:  # a private function of Ray, which not every kind of connection supports
        addable = None
    return nodes + ([dict(addable)] if addable else [])


def _pool_specs(
    program: Program, order: Order | None, segments: list[Segment], epoch: int, cluster: _Cluster
) -> tuple[dict[int, PoolSpec], SharedSources | None]:
    """Return the pool of every segment that needs one, by the segment's ``id``; and the sources, if actors read them.

    Raises:
        EngineError: The cluster lacks the resources that a stage requests, or a function cannot be sent to it.
    """
    copying_segments = [with_device_copies(segment) if segment.needs_pool else segment for segment in segments]
    sources = None if order is None or not segments[0].needs_pool else _shared_sources(program.finder)
    last_segments = {id(level.segments[-1]) for level in program.levels if level.segments}
    first_level = set(map(id, program.levels[0].segments))
    pools: list[tuple[Segment, Segment, ActorPayload]] = []
    for segment, copying in zip(segments, copying_segments, strict=True):
        if segment.needs_pool:
            own_sources = sources if id(segment) in first_level else None
            read_locally = own_sources is None and copying.reading > 0
            contexts = program.contexts(copying, epoch)
            is_last = id(segment) in last_segments
            slots = program.arrangement.slots
            payload = ActorPayload.of(copying, contexts, own_sources, read_locally, slots, is_last)
            payload.need, payload.nodes = _need(copying), _nodes
            payload.shared = _shared_name(program, segment, len(pools))
            pools.append((segment, copying, payload))
    grants = grant_workers([payload.need for _, _, payload in pools], cluster.nodes, cluster.spare)
    pool_specs = {}
    for (segment, copying, payload), grant in zip(pools, grants, strict=True):
        # A caller that is an actor may hold the last core itself; its workers would wait for it forever.
        payload.cpus = 0.0 if cluster.inside and payload.need.cpus is None else grant.cpus
        workers = (grant.min_workers, grant.max_workers, grant.initial_workers)
        pool_specs[id(segment)] = PoolSpec(copying, *workers, [None], payload)
    release_idle(payload for _, _, payload in pools)
    return pool_specs, sources


def _shared_name(program: Program, segment: Segment, number: int) -> str | None:
    """Return the name under which the parts of one split share the actors of a segment; None if they do not."""
    shared = program.plan.cut.shared if program.plan.cut is not None else None
    if shared is None or program.plan.cut is None or program.plan.cut.world == 1:
        return None
    # Stages of branches have large numbers; they are all before the split.
    before = all(placed.number < shared.count or placed.number >= 1000 for placed in segment.stages)
    return f"penstock-{shared.token}-{number}" if before else None


def _need(segment: Segment) -> Need:
    resources = segment.resources or Resources()
    workers = resources.workers
    min_workers, max_workers = workers if isinstance(workers, tuple) else (workers or 1, workers)
    assert resources.memory is None or isinstance(resources.memory, int)
    return Need(segment.describe(), min_workers, max_workers, resources.cpus, resources.gpus, resources.memory or 0)


def _shared_sources(finder: Finder) -> SharedSources | None:
    """Return the sources if actors can read them; ``None`` if this process must, as the samples are in its memory."""
    in_memory = [reader for reader in finder.readers if reader.traits.in_memory]
    if len(in_memory) == len(finder.readers) or not all(reader.traits.sendable for reader in finder.readers):
        return None
    try:
        dumps(finder)
        return SharedSources.of(finder) if len(dumps(in_memory)) <= MAX_SHARED_BYTES else None
    except Exception:  # a reader from outside Penstock that cannot be pickled
        return None


@dataclass(frozen=True, slots=True)
class _SizeEstimate:
    """Estimates the size of samples that have not been located."""

    finder: Finder
    mean_bytes: list[I64]  # by reader and shard

    def __init__(self, finder: Finder) -> None:
        object.__setattr__(self, "finder", finder)
        object.__setattr__(self, "mean_bytes", [_mean_bytes(reader) for reader in finder.readers])

    def defer(self, refs: Refs) -> DeferredSamples:
        """Return samples that the worker will locate, with their estimated sizes."""
        nbytes: I64 = np.zeros(len(refs), np.int64)
        chain: Refs | None = refs
        while chain is not None:
            for leaf in np.unique(chain.leaf).tolist():
                if leaf >= 0:
                    indices = np.flatnonzero(chain.leaf == leaf)
                    nbytes[indices] += self.mean_bytes[leaf][chain.shard[indices]]
            chain = chain.pair
        return DeferredSamples(refs, self.finder, nbytes)


def _mean_bytes(reader: Reader) -> I64:
    """Return the mean size of a sample in each shard; 0 if measuring it would take long."""
    counts = reader.counts(scan=False)
    if counts is None or reader.traits.remote:
        return np.zeros(len(reader.names), np.int64)
    sizes = np.maximum(0, np.array(reader.sizes(), np.int64))
    means: I64 = sizes // np.maximum(1, counts)
    return means


@dataclass(slots=True, weakref_slot=True, eq=False)
class _RayRun(PooledRun):
    """One iteration on a cluster."""

    @property
    def held_cpus(self) -> float:
        """The number of cores that the workers of this run reserve."""
        if self.host is not None:
            return 0.0
        payloads = [(spec.max_workers, spec.payload) for spec in self.pool_specs.values()]
        return sum(workers * payload.cpus for workers, payload in payloads if isinstance(payload, ActorPayload))

    def _pooled(self, blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        out = PooledRun._pooled(self, blocks, segment)
        spec = self.pool_specs.get(id(segment))
        if spec is None or not isinstance(spec.payload, ActorPayload):
            return out
        return fetch_items(out) if spec.payload.is_last else out

    def _start_pool(self, segment: Segment) -> tuple[Pool, MemoryBound]:
        pool, bound = PooledRun._start_pool(self, segment)
        payload = self.pool_specs[id(segment)].payload
        if isinstance(payload, ActorPayload):
            payload.pool = pool
        return pool, bound

    def _remote_proxy(self, payload: SegmentPayload, device: Any, meter: Meter, number: int) -> WorkerProxy:
        assert isinstance(payload, ActorPayload)
        return ActorWorkerProxy(payload, number, meter, self.meters, number)  # its number tells shared actors apart


_registered: list[bool] = []


def _close_runs_before_ray() -> None:
    """Make sure that open runs are closed before Ray when the process exits; later calls do nothing."""
    if not _registered:
        _registered.append(True)
        atexit.register(local.close_all)
