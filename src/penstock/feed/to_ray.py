"""A plan as a Ray dataset: stretches of its order are read tasks, and what comes out of them are blocks of columns.

A task opens the plan in its own process, which keeps it, and what its stages have made, for the tasks to come: a class
given to ``map_batches`` is constructed once a process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import cloudpickle

from penstock.engines import Meters, Program, Segment, Start
from penstock.engines.devices import available_devices
from penstock.engines.flow import BlockSizer, flow
from penstock.engines.program import run_segment
from penstock.engines.ray.placement import Need, granted
from penstock.errors import DataError, PlanError
from penstock.formats.tables.ray import BlockMaker, require_ray
from penstock.order import Order, Piece, ShardOrder, UncountedOrder, head, tail, total
from penstock.plan import Block, Context, EngineOptions, Plan, Skipped, check_count, weight

log = logging.getLogger("penstock")

LEAST = 256  # samples of a task: a block costs Ray some 20 ms
_PER_CORE = 4  # tasks for each core of the cluster, so that the last ones end at about the same time
_SMALL = 100_000  # bytes of a plan that travel with every task; a larger one lies in the object store


def to_ray(plan: Plan, epoch: int, blocks: int | None = None) -> Any:
    """A ``ray.data.Dataset`` of what a plan gives in an epoch, in order.

    Raises:
        EngineError: the cluster does not have what a stage asks for.
        MissingExtra: ray is not installed.
        PlanError: there is no end, or a stream that only this process can read.
    """
    if blocks is not None:
        check_count("blocks", blocks, least=1)
    ray = require_ray("to_ray")
    program = Program(plan)
    _check(program)
    _connect(plan.engine)
    cores = int(ray.cluster_resources().get("CPU", 1))
    starts = [None] if program.stream is not None else stretches(program, epoch, blocks, cores)
    exact = plan.counted and plan.errors.action == "raise" and program.stream is None
    data = cloudpickle.dumps(plan)
    held = data if len(data) <= _SMALL else ray.put(data)
    sent = Sent(held, hashlib.sha256(data).hexdigest(), epoch, os.getcwd())
    tasks = [(partial(sent.tables, start), _rows(start) if exact else None) for start in starts]
    made = ray.data.read_datasource(_datasource(tasks), override_num_blocks=max(1, len(tasks)), **_asked(program, ray))
    made.context.execution_options.preserve_order = True
    return made


def _check(program: Program) -> None:
    if program.stream is not None:
        if any(getattr(source, "patterns", None) == ("-",) for source in program.plan.sources()):
            raise PlanError("standard input is read by this process alone: write_tar() it, and read that")
    elif program.endless:
        raise PlanError("the dataset has no end; use limit(n)")


def _connect(engine: EngineOptions) -> None:
    """Find a cluster, or start one here, where this process has none yet."""
    from penstock.engines.ray.session import ensure

    ensure(engine.get("address") if engine.name == "ray" else None)


def _asked(program: Program, ray: Any) -> dict[str, float]:
    """What every task reserves: as much as the stage that asks for most.

    Raises:
        EngineError: no node has that; Ray would wait for one without end.
    """
    needs = [placed.stage.resources for placed in program.arrangement.body if placed.stage.resources is not None]
    cpus = max((one.cpus for one in needs if one.cpus), default=None)
    gpus = max((one.gpus for one in needs), default=0)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    granted([Need("to_ray()", cpus=cpus, gpus=gpus)], nodes, sum(node.get("CPU", 0) for node in nodes))
    asked = {"num_cpus": cpus, "num_gpus": gpus or None}
    more = {"max_calls": 0} if gpus else {}  # else every task that has a device gets a new process, and a new model
    return {name: value for name, value in asked.items() if value} | more


def _rows(start: Start | None) -> int | None:
    return None if start is None else sum(total(part.pieces) for part in start.parts())


def stretches(program: Program, epoch: int, blocks: int | None, cores: int) -> list[Start]:
    """Where tasks begin that together give an epoch, in order: a shard each, or a range of one, and not too few.

    Where a stage sees more than one sample, or everything is made by one run, there is one task.
    """
    order = program.order(epoch)
    start = program.start(order, program.plan.cut)
    if not program.plan.commutes or any(hasattr(source, "summary") for source in program.plan.sources()):
        return [start]
    if isinstance(order, UncountedOrder):
        many = min(blocks or order.group_count, order.group_count)
        shares = [order.cut(start.left, rank, many, "range") for rank in range(many)]
        return [replace(start, left=share) for share in shares if share] or [start]
    pieces = start.left if start.quota is None else head(start.left, start.quota)
    cuts = _cuts(_edges(order, pieces), blocks, cores)
    short = 0 if start.quota is None or start.pad is None else start.quota - total(pieces)
    shares = [head(tail(pieces, low), high - low) for low, high in pairwise(cuts)] or [pieces]
    starts = [Start(share) for share in shares]
    if short > 0:
        starts[-1] = Start(shares[-1], quota=total(shares[-1]) + short, pad=start.pad)
    return starts


def _edges(order: Order, pieces: Sequence[Piece]) -> list[int]:
    """Where shards begin and end among the positions of ``pieces``, as far as those are in the order of shards."""
    many = total(pieces)
    if not isinstance(order, ShardOrder) or len(pieces) != 1 or pieces[0][2] != 1:
        return [0, many]
    ends = order.groups() - pieces[0][0]
    return [0, *ends[(ends > 0) & (ends < many)].tolist(), many]


def _cuts(edges: list[int], blocks: int | None, cores: int) -> list[int]:
    """Where tasks begin and end: so many of them, or at the edges of shards that are neither small nor large."""
    many = edges[-1]
    if not many:
        return []
    if blocks is not None:
        blocks = min(blocks, many)
        return [number * many // blocks for number in range(blocks + 1)]
    large = max(LEAST, -(-many // (_PER_CORE * max(1, cores))))
    cuts = [0]
    for edge in edges[1:]:
        size = edge - cuts[-1]
        if size < LEAST and edge < many:
            continue  # a small shard goes with the next one
        if size < LEAST and len(cuts) > 1:
            cuts.pop()  # and the last one with those before
            size = edge - cuts[-1]
        parts = max(1, size // large)
        cuts += [cuts[-1] + size * number // parts for number in range(1, parts + 1)]
    return cuts


def _datasource(tasks: Sequence[tuple[Callable[[], Iterator[Any]], int | None]]) -> Any:
    """What Ray asks for read tasks."""
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Penstock(Datasource):
        """The tasks of a plan."""

        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, parallelism: int, *_: Any, **more: Any) -> list[ReadTask]:
            rows = {"per_task_row_limit": more["per_task_row_limit"]} if more.get("per_task_row_limit") else {}
            return [
                ReadTask(read, BlockMetadata(num_rows=many, size_bytes=None, input_files=None, exec_stats=None), **rows)
                for read, many in tasks
            ]

    make: Any = Penstock  # Ray says nothing of its constructor
    return make()


@dataclass(frozen=True, slots=True)
class Sent:
    """A plan on its way to tasks: its pickle, or where that lies."""

    held: Any
    digest: str
    epoch: int
    folder: str  # where relative paths begin

    def tables(self, start: Start | None) -> Iterator[Any]:
        """What the plan gives from ``start`` on, in blocks of Ray's kind."""
        maker = BlockMaker()
        with chdir(self.folder) if os.path.isdir(self.folder) else nullcontext():
            for items in self._opened().runs(start):
                if len(items):
                    yield maker.block(items)

    def _opened(self) -> Opened:
        global _opened
        if _opened is None or _opened[0] != (self.digest, self.epoch):
            if _opened is not None:
                _opened[1].finish()
            data = self.held if isinstance(self.held, bytes) else require_ray("to_ray").get(self.held)
            _opened = ((self.digest, self.epoch), Opened(Program(pickle.loads(data)), self.epoch))
        return _opened[1]


# The plan that this process read last. Tasks of one process come one after the other.
_opened: tuple[tuple[str, int], Opened] | None = None


@dataclass(slots=True)
class Opened:
    """A plan that is open in this process, with what its stages have made."""

    program: Program
    epoch: int
    contexts: dict[int, list[Context]] = field(default_factory=dict)  # by segment
    order: Order | None = None

    def runs(self, start: Start | None) -> Iterator[Sequence[Any]]:
        """The items from ``start`` on; samples that fail are left out as the plan says.

        Raises:
            DataError: one failed, or too many.
        """
        program = self.program
        if start is not None and self.order is None:
            self.order = program.order(self.epoch)
        least = max((placed.stage.prefers for placed in program.arrangement.body), default=1)
        pace = BlockSizer(count=LEAST, least=least, nbytes=16_000_000)
        begin = program.front() if start is None else start
        skipped: list[Skipped] = []
        seen = 0
        order = None if start is None else self.order
        try:
            for block in flow(program, order, self.epoch, begin, partial(self._each, pace.limit()), pace, Meters()):
                yield block.items
                seen += len(block)
                skipped += block.skips
                self._note(block)
                _check_skips(program.plan, skipped, seen)
        finally:
            program.rest()
        if skipped:
            log.warning("skipped %d samples that failed", len(skipped))

    def _each(self, limit: Any, blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        if id(segment) not in self.contexts:
            made = self.program.contexts(segment, self.epoch)
            if segment.resources is not None and segment.resources.gpus:
                device = next(iter(available_devices()), "cpu")
                for ctx in made:
                    ctx.device = device
            self.contexts[id(segment)] = made
        contexts = self.contexts[id(segment)]
        for block in blocks:
            for part, _ in run_segment(segment, contexts, block):
                limit.measured(part.inputs - part.begin, 0.0, weight(part.items))
                yield part

    def _note(self, block: Block) -> None:
        if block.skips and self.program.quarantine is not None:
            self.program.quarantine.add(block.skips)
        if block.error is not None:
            raise block.error

    def finish(self) -> None:
        """Let go of it all."""
        for level in self.program.levels:
            for segment in level.segments:
                for placed, ctx in zip(segment.stages, self.contexts.get(id(segment), ()), strict=False):
                    placed.stage.finish(ctx)


def _check_skips(plan: Plan, skipped: list[Skipped], seen: int) -> None:
    """Whether more samples failed than may, of those of this task."""
    limit = plan.errors.limit
    if limit is None or not skipped:
        return
    if len(skipped) > (limit * (seen + len(skipped)) if 0 < limit < 1 else limit):
        last = skipped[-1]
        many = f"{len(skipped)} samples failed, more than on_error's limit of {limit}"
        raise DataError(f"{many}; the last: {last.problem}", last.place.shard, last.place.key)
