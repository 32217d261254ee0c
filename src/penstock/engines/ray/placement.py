"""Decide how many workers each segment gets from the resources of a cluster's nodes; nothing here imports Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from penstock.errors import EngineError

Node = dict[str, float]  # the resources of a node: CPU, GPU, memory

_MIN_CPUS = 0.01  # the smallest share of a core that a worker reserves, unless no core is free


@dataclass(frozen=True, slots=True)
class Need:
    """The workers that a segment requests."""

    name: str
    min_workers: int = 1
    max_workers: int | None = None  # None: as many as fit
    cpus: float | None = None  # per worker; None: a core, or less if there are too few
    gpus: float = 0
    memory: float = 0

    def per_worker(self, default_cpus: float) -> Node:
        """Return the resources of one worker, which reserves ``default_cpus`` if it does not request cores."""
        cpus = default_cpus if self.cpus is None else self.cpus
        return {"CPU": cpus, "GPU": self.gpus, "memory": self.memory}

    def describe(self) -> str:
        """Return what one worker requests, as arguments of a stage."""
        requested = (("cpus", self.cpus), ("gpus", self.gpus), ("memory", self.memory))
        return ", ".join(f"{name}={value:g}" for name, value in requested if value) or "a core"


@dataclass(frozen=True, slots=True)
class Grant:
    """The workers that a segment gets, and the cores that each of them reserves."""

    min_workers: int
    max_workers: int
    initial_workers: int
    cpus: float


def grant_workers(needs: Sequence[Need], nodes: Sequence[Node], spare: float) -> list[Grant]:
    """Divide a cluster among segments.

    Workers that request cores, devices or memory get them, or nothing starts. A worker that requests nothing reserves
    one core while there are enough, and less otherwise: stages that only set a number of workers never wait for one
    another.

    Args:
        needs: What the segments request, in the order of the stream.
        nodes: The resources of each node.
        spare: The cores that no other run uses.

    Raises:
        EngineError: The cluster lacks the requested resources; the message states what it has.
    """
    for need in needs:
        if not any(_fits(need.per_worker(0), node) for node in nodes):
            raise EngineError(f"{need.name} asks for {need.describe()} for each worker; {_describe(nodes)}")
    default_cpus = _default_cpus(needs, nodes, spare)
    while (free := _place([(need, need.min_workers) for need in needs], nodes, default_cpus)) is None:
        if default_cpus <= 0 or all(need.cpus is not None for need in needs):
            requested = "; ".join(
                f"{need.min_workers} workers of {need.name} with {need.describe()} each" for need in needs
            )
            raise EngineError(f"the stages together ask for {requested}; {_describe(nodes)}")
        default_cpus = default_cpus / 2 if default_cpus > _MIN_CPUS else 0.0
    counts = _grow(needs, free, default_cpus, total_cores(nodes))
    out = []
    for need, max_workers in zip(needs, counts, strict=True):
        initial = max_workers if need.max_workers is None else need.min_workers
        out.append(Grant(need.min_workers, max_workers, initial, default_cpus if need.cpus is None else need.cpus))
    return out


def _default_cpus(needs: Sequence[Need], nodes: Sequence[Node], spare: float) -> float:
    """Return the cores that a worker reserves if it does not request any."""
    elastic = [need for need in needs if need.cpus is None]
    requested = sum(need.min_workers * need.cpus for need in needs if need.cpus is not None)
    wanted = sum(need.min_workers if need.max_workers is not None else 1 for need in elastic)
    free = max(0.0, min(spare, total_cores(nodes)) - requested)
    return min(1.0, int(free / max(1, wanted) / _MIN_CPUS) * _MIN_CPUS)


def total_cores(nodes: Sequence[Node]) -> float:
    """Return the number of cores of all nodes."""
    return sum(node.get("CPU", 0) for node in nodes)


def _fits(resources: Node, node: Node) -> bool:
    return all(node.get(name, 0) >= value - 1e-9 for name, value in resources.items())


def _place(counts: Sequence[tuple[Need, int]], nodes: Sequence[Node], default_cpus: float) -> list[Node] | None:
    """Place that many workers of each segment; return the free resources, or ``None`` if the workers do not fit."""
    free = [dict(node) for node in nodes]
    largest_first = sorted(counts, key=lambda pair: (-pair[0].gpus, -(pair[0].cpus or 0), -pair[0].memory))
    for need, workers in largest_first:
        placing = _Placing(need.per_worker(default_cpus), free)
        if not all(placing.take() for _ in range(workers)):
            return None
    return free


class _Placing:
    """Places the workers of one segment, each on the node with the most free cores; others use the nodes, too."""

    def __init__(self, resources: Node, free: list[Node]) -> None:
        self._resources, self._free = resources, free
        self._heap = [(-node.get("CPU", 0), number) for number, node in enumerate(free)]
        heapify(self._heap)

    def take(self) -> bool:
        """Place one worker; return whether it fits on any node."""
        while self._heap:
            negative, number = self._heap[0]
            node = self._free[number]
            if -negative != node.get("CPU", 0):  # another segment has placed workers there
                heapreplace(self._heap, (-node.get("CPU", 0), number))
            elif not _fits(self._resources, node):  # nor will it later: resources only become fewer
                heappop(self._heap)
            else:
                for name, value in self._resources.items():
                    node[name] = node.get(name, 0) - value
                heapreplace(self._heap, (-node.get("CPU", 0), number))
                return True
        return False


def _grow(needs: Sequence[Need], free: list[Node], default_cpus: float, cores: float) -> list[int]:
    """Return the maximum number of workers of each segment; workers are added segment by segment while they fit."""
    counts = [need.min_workers for need in needs]
    limits = [max(need.min_workers, int(cores)) if need.max_workers is None else need.max_workers for need in needs]
    growing = set(range(len(needs)))
    placing = [_Placing(need.per_worker(default_cpus), free) for need in needs]
    while growing:
        for number in sorted(growing):
            if counts[number] >= limits[number] or not placing[number].take():
                growing.discard(number)
            else:
                counts[number] += 1
    return counts


def describe_free(resources: Node) -> str:
    """Return what is free on all nodes together as text."""
    cores, gpus, memory = (resources.get(name, 0) for name in ("CPU", "GPU", "memory"))
    return f"{cores:g} cores, {gpus:g} GPUs and {memory / 1e9:.1f} GB are free"


def _describe(nodes: Sequence[Node]) -> str:
    """Return the resources of the cluster as text."""
    texts = [
        f"{node.get('CPU', 0):g} cores, {node.get('GPU', 0):g} GPUs and {node.get('memory', 0) / 1e9:.1f} GB"
        for node in nodes
    ]
    kinds = [f"{texts.count(kind)} x ({kind})" if texts.count(kind) > 1 else kind for kind in dict.fromkeys(texts)]
    return f"the cluster has {' + '.join(kinds)}" if kinds else "the cluster has no nodes"
