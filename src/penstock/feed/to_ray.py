"""Turns a plan into a Ray dataset: parts of its order become read tasks, which yield blocks of columns.

A task opens the plan in its process. The process reuses the open plan, and what the stages have constructed, for later
tasks: a class that is given to ``map_batches`` is constructed once per process.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import cloudpickle

from penstock.engines import Meters, Program, Segment, Start, check_limit, log_skipped
from penstock.engines.devices import available_devices
from penstock.engines.flow import BlockSizer, SizeLimit, flow
from penstock.engines.ray.placement import Need, grant_workers
from penstock.engines.segments import run_segment
from penstock.errors import PlanError
from penstock.formats.tables.ray import RayBlockBuilder, require_ray
from penstock.order import Order, Piece, ShardOrder, UncountedOrder, head, tail, total
from penstock.plan import Block, Context, EngineOptions, Plan, Skipped, check_count, estimate_nbytes

MIN_TASK_SAMPLES = 256  # a block costs Ray about 20 ms
_TASKS_PER_CORE = 4  # so that the last tasks end at about the same time
_MAX_INLINE_BYTES = 100_000  # of a pickled plan that is sent with every task; a larger one is put in the object store


def to_ray(plan: Plan, epoch: int, blocks: int | None = None) -> Any:
    """Return a ``ray.data.Dataset`` of the items of an epoch, in order.

    Raises:
        EngineError: The cluster does not have what a stage asks for.
        MissingExtra: ray is not installed.
        PlanError: The dataset has no end, or is a stream that only this process can read.
    """
    if blocks is not None:
        check_count("blocks", blocks, least=1)
    ray = require_ray("to_ray")
    program = Program(plan)
    _check(program)
    _connect(plan.engine)
    cores = int(ray.cluster_resources().get("CPU", 1))
    starts = [None] if program.stream is not None else task_starts(program, epoch, blocks, cores)
    exact = plan.keeps_count and plan.errors.action == "raise" and program.stream is None
    data = cloudpickle.dumps(plan)
    inline_or_ref = data if len(data) <= _MAX_INLINE_BYTES else ray.put(data)
    pickled = PickledPlan(inline_or_ref, hashlib.sha256(data).hexdigest(), epoch, os.getcwd())
    tasks = [(partial(pickled.blocks, start), _row_count(start) if exact else None) for start in starts]
    resources = _task_resources(program, ray)
    dataset = ray.data.read_datasource(_datasource(tasks), override_num_blocks=max(1, len(tasks)), **resources)
    dataset.context.execution_options.preserve_order = True
    return dataset


def _check(program: Program) -> None:
    if program.stream is not None:
        if not all(reader.traits.sendable for reader in program.opened):
            raise PlanError("only this process can read standard input: write_tar() it first, and read the shards")
    elif program.endless:
        raise PlanError("the dataset has no end; use limit(n)")


def _connect(engine: EngineOptions) -> None:
    """Connect to a cluster, or start one on this machine, unless this process is connected already."""
    from penstock.engines.ray.session import connect_ray

    connect_ray(engine.get("address") if engine.name == "ray" else None)


def _task_resources(program: Program, ray: Any) -> dict[str, float]:
    """Return what every task reserves: as much as the most demanding stage asks for.

    Raises:
        EngineError: No node has that much; Ray would wait for such a node forever.
    """
    needs = [placed.stage.resources for placed in program.arrangement.body if placed.stage.resources is not None]
    cpus = max((one.cpus for one in needs if one.cpus), default=None)
    gpus = max((one.gpus for one in needs), default=0)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    grant_workers([Need("to_ray()", cpus=cpus, gpus=gpus)], nodes, sum(node.get("CPU", 0) for node in nodes))
    requested = {"num_cpus": cpus, "num_gpus": gpus or None}
    # By default, every task with a device gets a new process, and loads its model again.
    extra = {"max_calls": 0} if gpus else {}
    return {name: value for name, value in requested.items() if value} | extra


def _row_count(start: Start | None) -> int | None:
    return None if start is None else sum(total(part.pieces) for part in start.parts())


def task_starts(program: Program, epoch: int, blocks: int | None, cores: int) -> list[Start]:
    """Return where the tasks start that yield an epoch, in order.

    A task reads some shards, or a range of one. There is one task if a stage sees more than one sample, or if a source
    computes its samples in one run.
    """
    order = program.order(epoch)
    start = program.start(order, program.plan.cut)
    if not program.plan.commutes or any(leaf.computed for leaf in program.plan.leaves()):
        return [start]
    if isinstance(order, UncountedOrder):
        tasks = min(blocks or order.group_count, order.group_count)
        shares = [order.cut(start.left, number, tasks, "range") for number in range(tasks)]
        return [replace(start, left=share) for share in shares if share] or [start]
    pieces = start.left if start.quota is None else head(start.left, start.quota)
    edges = _task_edges(_shard_edges(order, pieces), blocks, cores)
    padding = 0 if start.quota is None or start.pad is None else start.quota - total(pieces)
    shares = [head(tail(pieces, low), high - low) for low, high in pairwise(edges)] or [pieces]
    starts = [Start(share) for share in shares]
    if padding > 0:
        starts[-1] = Start(shares[-1], quota=total(shares[-1]) + padding, pad=start.pad)
    return starts


def _shard_edges(order: Order, pieces: Sequence[Piece]) -> list[int]:
    """Return where shards begin and end among the positions of ``pieces``; only the ends if they are not by shard."""
    samples = total(pieces)
    if not isinstance(order, ShardOrder) or len(pieces) != 1 or pieces[0][2] != 1:
        return [0, samples]
    ends = order.groups() - pieces[0][0]
    return [0, *ends[(ends > 0) & (ends < samples)].tolist(), samples]


def _task_edges(shard_edges: list[int], blocks: int | None, cores: int) -> list[int]:
    """Return where tasks begin and end: ``blocks`` tasks of equal size, or by shard.

    By shard, small shards are joined, and large ones are cut.
    """
    samples = shard_edges[-1]
    if not samples:
        return []
    if blocks is not None:
        blocks = min(blocks, samples)
        return [number * samples // blocks for number in range(blocks + 1)]
    large = max(MIN_TASK_SAMPLES, -(-samples // (_TASKS_PER_CORE * max(1, cores))))
    edges = [0]
    for edge in shard_edges[1:]:
        size = edge - edges[-1]
        if size < MIN_TASK_SAMPLES and edge < samples:
            continue  # a small shard is joined with the next one
        if size < MIN_TASK_SAMPLES and len(edges) > 1:
            edges.pop()  # a small last shard is joined with the one before
            size = edge - edges[-1]
        parts = max(1, size // large)
        edges += [edges[-1] + size * number // parts for number in range(1, parts + 1)]
    return edges


def _datasource(tasks: Sequence[tuple[Callable[[], Iterator[Any]], int | None]]) -> Any:
    """Return a data source for Ray that consists of these read tasks, each with its number of rows if known."""
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Penstock(Datasource):
        """The tasks of a plan."""

        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, parallelism: int, *_: Any, **options: Any) -> list[ReadTask]:
            limit = options.get("per_task_row_limit")
            row_limit = {"per_task_row_limit": limit} if limit else {}
            return [
                ReadTask(
                    read,
                    BlockMetadata(num_rows=rows, size_bytes=None, input_files=None, exec_stats=None),
                    **row_limit,
                )
                for read, rows in tasks
            ]

    make: Any = Penstock  # Ray does not annotate its constructor
    return make()


@dataclass(frozen=True, slots=True)
class PickledPlan:
    """A plan as it is sent to tasks.

    Attributes:
        data: The pickled plan, or a reference to it in the object store.
        digest: The hash of the pickled plan.
        epoch: The epoch to run.
        folder: The folder to which relative paths refer.
    """

    data: Any
    digest: str
    epoch: int
    folder: str

    def blocks(self, start: Start | None) -> Iterator[Any]:
        """Yield the items from ``start`` on as blocks of Ray; None: the whole stream."""
        builder = RayBlockBuilder()
        with chdir(self.folder) if os.path.isdir(self.folder) else nullcontext():
            for items in self._open().run(start):
                if len(items):
                    yield builder.block(items)

    def _open(self) -> OpenPlan:
        global _open_plan
        if _open_plan is None or _open_plan[0] != (self.digest, self.epoch):
            if _open_plan is not None:
                _open_plan[1].finish()
            data = self.data if isinstance(self.data, bytes) else require_ray("to_ray").get(self.data)
            _open_plan = ((self.digest, self.epoch), OpenPlan(Program(pickle.loads(data)), self.epoch))
        return _open_plan[1]


# The plan of this process's last task, with its digest and epoch. Tasks of one process run one after the other.
_open_plan: tuple[tuple[str, int], OpenPlan] | None = None


@dataclass(slots=True)
class OpenPlan:
    """A plan that is open in this process, with what its stages have constructed.

    Attributes:
        program: The program of the plan.
        epoch: The epoch to run.
        contexts: The contexts of a segment's stages, by the id of the segment.
        order: The order of the epoch, once a task needs it.
    """

    program: Program
    epoch: int
    contexts: dict[int, list[Context]] = field(default_factory=dict)
    order: Order | None = None

    def run(self, start: Start | None) -> Iterator[Sequence[Any]]:
        """Yield the items from ``start`` on, block by block; errors are raised or skipped as the plan demands.

        Raises:
            PenstockError: A sample failed, or more samples failed than the plan allows.
        """
        program = self.program
        if start is not None and self.order is None:
            self.order = program.order(self.epoch)
        sizer = BlockSizer(count=MIN_TASK_SAMPLES, min_samples=program.largest_call, max_stored_bytes=16_000_000)
        begin = program.stream_start() if start is None else start
        skipped: list[Skipped] = []
        delivered = 0
        order = None if start is None else self.order
        run_blocks = partial(self._run_segment, sizer.limit())
        try:
            for block in flow(program, order, self.epoch, begin, run_blocks, sizer, Meters()):
                yield block.items
                delivered += len(block)
                skipped += block.lineage.skips
                self._quarantine_skips(block)
                check_limit(skipped, program.plan.errors.limit, delivered + len(skipped))
        finally:
            program.suspend()
        log_skipped(skipped)

    def _run_segment(self, limit: SizeLimit, blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        if id(segment) not in self.contexts:
            contexts = self.program.contexts(segment, self.epoch)
            if segment.resources is not None and segment.resources.gpus:
                device = next(iter(available_devices()), "cpu")
                for ctx in contexts:
                    ctx.device = device
            self.contexts[id(segment)] = contexts
        contexts = self.contexts[id(segment)]
        for block in blocks:
            for part, _ in run_segment(segment, contexts, block):
                limit.adjust(part.new_inputs, 0.0, estimate_nbytes(part.items))
                yield part

    def _quarantine_skips(self, block: Block) -> None:
        if block.lineage.skips and self.program.quarantine is not None:
            self.program.quarantine.add(block.lineage.skips)
        if block.lineage.error is not None:
            raise block.lineage.error

    def finish(self) -> None:
        """Let the stages release what they have constructed."""
        for level in self.program.levels:
            for segment in level.segments:
                for placed, ctx in zip(segment.stages, self.contexts.get(id(segment), ()), strict=False):
                    placed.stage.finish(ctx)
