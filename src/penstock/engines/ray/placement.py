"""How many workers each segment gets of a cluster, decided from what its nodes have: nothing here knows Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import EngineError

Node = dict[str, float]  # what a node has: CPU, GPU, memory

_SMALLEST = 0.01  # of a core: what a worker counts as at least, unless there is nothing left


@dataclass(frozen=True, slots=True)
class Need:
    """What a segment asks for."""

    name: str
    least: int = 1
    most: int | None = None  # None: as many as there is room for
    cpus: float | None = None  # of each worker; None: a core, or what can be spared
    gpus: float = 0
    memory: float = 0

    def asks(self, unit: float) -> Node:
        """What one worker takes, where one that asks for no cores counts as ``unit``."""
        cpus = unit if self.cpus is None else self.cpus
        return {"CPU": cpus, "GPU": self.gpus, "memory": self.memory}

    def words(self) -> str:
        """What one worker asks for, as it is written."""
        asked = (("cpus", self.cpus), ("gpus", self.gpus), ("memory", self.memory))
        return ", ".join(f"{name}={value:g}" for name, value in asked if value) or "a core"


@dataclass(frozen=True, slots=True)
class Grant:
    """What a segment gets: its fewest and most workers, how many to begin with, and what each counts as."""

    least: int
    most: int
    begin: int
    cpus: float


def granted(needs: Sequence[Need], nodes: Sequence[Node], spare: float) -> list[Grant]:
    """Share out a cluster.

    Workers that ask for cores, devices or memory get them or nothing begins. Those that ask for nothing count as a
    core each while there are enough, and as less where there are not: stages that only say how many workers they want
    never wait for one another.

    Args:
        needs: What segments ask for, in the order of the stream.
        nodes: What each node has.
        spare: Cores that nobody else has taken.

    Raises:
        EngineError: the cluster does not have what is asked for; it says what it has.
    """
    for need in needs:
        if not any(_fits(need.asks(0), node) for node in nodes):
            raise EngineError(f"{need.name} asks for {need.words()} for each worker; {_has(nodes)}")
    unit = _unit(needs, nodes, spare)
    while (free := _placed([(need, need.least) for need in needs], nodes, unit)) is None:
        if unit <= 0 or all(need.cpus is not None for need in needs):
            asked = "; ".join(f"{need.least} workers of {need.name} with {need.words()} each" for need in needs)
            raise EngineError(f"the stages together ask for {asked}; {_has(nodes)}")
        unit = unit / 2 if unit > _SMALLEST else 0.0
    many = _grown(needs, free, unit, _cores(nodes))
    out = []
    for need, most in zip(needs, many, strict=True):
        begin = most if need.most is None else need.least
        out.append(Grant(need.least, most, begin, unit if need.cpus is None else need.cpus))
    return out


def _unit(needs: Sequence[Need], nodes: Sequence[Node], spare: float) -> float:
    """What a worker counts as that asks for no cores."""
    elastic = [need for need in needs if need.cpus is None]
    taken = sum(need.least * need.cpus for need in needs if need.cpus is not None)
    wanted = sum(need.least if need.most is not None else 1 for need in elastic)
    free = max(0.0, min(spare, _cores(nodes)) - taken)
    return min(1.0, int(free / max(1, wanted) / _SMALLEST) * _SMALLEST)


def _cores(nodes: Sequence[Node]) -> float:
    return sum(node.get("CPU", 0) for node in nodes)


def _fits(asked: Node, node: Node) -> bool:
    return all(node.get(name, 0) >= value - 1e-9 for name, value in asked.items())


def _placed(crews: Sequence[tuple[Need, int]], nodes: Sequence[Node], unit: float) -> list[Node] | None:
    """What is left of the nodes with so many workers of each; ``None``: they do not fit."""
    free = [dict(node) for node in nodes]
    hard_first = sorted(crews, key=lambda crew: (-crew[0].gpus, -(crew[0].cpus or 0), -crew[0].memory))
    for need, many in hard_first:
        for _ in range(many):
            if not _take(need.asks(unit), free):
                return None
    return free


def _take(asked: Node, free: list[Node]) -> bool:
    """Place one worker on the node that has most cores left; say whether there is one."""
    fitting = [node for node in free if _fits(asked, node)]
    if not fitting:
        return False
    best = max(fitting, key=lambda node: node.get("CPU", 0))
    for name, value in asked.items():
        best[name] = best.get(name, 0) - value
    return True


def _grown(needs: Sequence[Need], free: list[Node], unit: float, cores: float) -> list[int]:
    """How many workers each can have at most, given out in turn."""
    many = [need.least for need in needs]
    limits = [max(need.least, int(cores)) if need.most is None else need.most for need in needs]
    growing = set(range(len(needs)))
    while growing:
        for number in sorted(growing):
            if many[number] >= limits[number] or not _take(needs[number].asks(unit), free):
                growing.discard(number)
            else:
                many[number] += 1
    return many


def _has(nodes: Sequence[Node]) -> str:
    """What the cluster has, in words."""
    shown = [
        f"{node.get('CPU', 0):g} cores, {node.get('GPU', 0):g} GPUs and {node.get('memory', 0) / 1e9:.1f} GB"
        for node in nodes
    ]
    kinds = [f"{shown.count(kind)} x ({kind})" if shown.count(kind) > 1 else kind for kind in dict.fromkeys(shown)]
    return f"the cluster has {' + '.join(kinds)}" if kinds else "the cluster has no nodes"
