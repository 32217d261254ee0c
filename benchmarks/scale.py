"""What a very large dataset and a very large cluster cost, from the code that runs them, with simulated clocks.

``python benchmarks/scale.py`` computes the order, the cuts, the states and the placement of 10^9 samples in 100,000
shards for 256 and 4,096 ranks and 1,000 nodes, as a run would, and prints the tables of ``docs/scale.md``. Nothing is
read: the shards are synthetic, and what networks, disks and functions take is assumed (see ``Assumed``).
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from penstock.blobs.prefetch import CHUNK
from penstock.engines import Program, Start
from penstock.engines.ray.engine import BLOCK_SECONDS
from penstock.engines.ray.placement import Need, Node, grant_workers
from penstock.engines.restoring import make_state, restore
from penstock.engines.run import Run
from penstock.plan import Cut
from penstock.testing import numbers


@dataclass(frozen=True)
class Assumed:
    """What is not measured here."""

    sample_bytes: int = 110_000  # a photo of 500 pixels
    request_s: float = 0.05  # until the first byte of an object arrives
    rank_samples_s: float = 2_500.0  # what one accelerator takes
    worker_samples_s: float = 120.0  # what one core decodes and resizes
    node_workers: int = 16
    call_s: float = 0.001  # of the process that calls an actor, for each call


@dataclass(frozen=True)
class Dataset:
    """The size of the dataset."""

    shards: int
    samples_per_shard: int

    @property
    def samples(self) -> int:
        return self.shards * self.samples_per_shard


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result, and the processor seconds that it took."""
    begun = time.process_time()
    return function(), time.process_time() - begun


def peak_mb() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def table(title: str, rows: list[tuple[str, ...]]) -> None:
    """Print a table in Markdown, whose first row is the head."""
    print(f"\n## {title}\n")
    for number, row in enumerate(rows):
        print(f"| {' | '.join(row)} |")
        if not number:
            print(f"|{'---|' * len(row)}")


def first_batch(program: Program, world: int, assumed: Assumed) -> tuple[str, ...]:
    """Return what a rank in the middle does until its first batch of 64 can be decoded."""
    before = peak_mb()
    order, order_s = timed(lambda: program.order(0))
    start, cut_s = timed(lambda: program.start(order, Cut(world // 2, world)))
    (_, refs, _), walk_s = timed(lambda: next(iter(order.walk(start.left[0], repeat(64)))))
    shards = len(np.unique(refs.shard))
    cpu_s = order_s + cut_s + walk_s
    requests = 2 * shards  # the index of each shard, then a range of it
    wall_s = cpu_s + 2 * assumed.request_s
    return str(world), f"{cpu_s:.2f}", str(shards), str(requests), f"{wall_s:.2f}", f"{peak_mb() - before:.0f}"


def states(program: Program, world: int) -> tuple[str, ...]:
    """Return the size of the states of all ranks in the middle of an epoch, and what restoring them takes."""
    order = program.order(0)
    halfway, saved = [], []

    def save() -> None:
        for rank in range(world):
            cut = Cut(rank, world)
            start = program.start(order, cut)
            first, stop, step, _ = start.left[0]
            middle = Start([[first + (stop - first) // 2, stop, step, 0], *start.left[1:]])
            halfway.append(middle)
            saved.append(make_state(program, cut, middle, (0, order, start), {}).to_json())

    _, save_s = timed(save)
    size = max(len(json.dumps(state, separators=(",", ":"))) for state in saved)

    def epoch_start(cut: Cut, epoch: int) -> tuple[int, Any, Start]:
        return epoch, order, program.start(order, cut)

    same = Cut(3, world)
    _, own_s = timed(lambda: restore(program, same, [saved[3]], lambda epoch: epoch_start(same, epoch)))
    other = Cut(3, world // 2)
    restored, other_s = timed(lambda: restore(program, other, saved, lambda epoch: epoch_start(other, epoch)))
    pieces = len(restored.start.left)
    ms = 1000 * save_s / world
    return str(world), str(size), f"{ms:.2f}", f"{1000 * own_s:.1f}", f"{other_s:.2f}", str(pieces)


def requests(world: int, assumed: Assumed) -> tuple[str, ...]:
    """Return the requests of all ranks to the object store: in the first second, and afterwards."""
    at_start = world * 2 * 16  # each rank opens the 16 shards of its first window: an index and a range of each
    per_s = world * assumed.rank_samples_s * assumed.sample_bytes / CHUNK
    gigabytes = world * assumed.rank_samples_s * assumed.sample_bytes / 1e9
    return str(world), f"{at_start:,}", f"{per_s:,.0f}", f"{gigabytes:,.0f}"


def driver(program: Program, nodes: int, assumed: Assumed) -> list[tuple[str, ...]]:
    """Return what the process that runs a plan on a cluster does for each block, and when it is the limit."""
    cluster: list[Node] = [{"CPU": float(assumed.node_workers), "memory": 64e9} for _ in range(nodes)]
    needs = [Need("decode", nodes * assumed.node_workers // 2, None), Need("model", 8, 8, cpus=1)]
    _, place_s = timed(lambda: grant_workers(needs, cluster, float(nodes * assumed.node_workers)))
    order = program.order(0)
    start = program.start(order, Cut(0, 4096))
    samples = 200_000
    piece = [start.left[0][0], start.left[0][0] + samples, 1, 0]
    run = Run(program, order, 0, Start([piece]))
    blocks, seconds = timed(lambda: sum(1 for _ in run.runs()))
    per_block = seconds / blocks + assumed.call_s
    workers = nodes * assumed.node_workers
    wanted = workers / BLOCK_SECONDS
    return [
        (f"placing the workers on {nodes:,} nodes", f"{place_s:.2f} s of a processor"),
        ("blocks per second that keep all workers busy", f"{wanted:,.0f}"),
        ("processor time of this process for a block, and for its call", f"{1000 * per_block:.2f} ms"),
        ("blocks per second that one such process can pass on", f"{1 / per_block:,.0f}"),
        ("workers that it keeps busy", f"{BLOCK_SECONDS / per_block:,.0f} of {workers:,}"),
    ]


def node_loss(nodes: int, assumed: Assumed, seed: int = 0) -> list[tuple[str, ...]]:
    """Simulate a tenth of the nodes ending at one moment, in the middle of writing 4,096 ranges."""
    rng = np.random.default_rng(seed)
    workers, lanes, shards = nodes * assumed.node_workers, 32, 4096
    lost_nodes = set(rng.choice(nodes, nodes // 10, replace=False).tolist())
    in_progress = rng.random(workers)  # share of the current block that is done
    node_of = np.repeat(np.arange(nodes), assumed.node_workers)
    is_lost = np.isin(node_of, list(lost_nodes))
    # A lost worker loses its current block, the next one that it was sent, and finished ones in the store of its node.
    redone_s = float((in_progress[is_lost] * BLOCK_SECONDS + BLOCK_SECONDS).sum())
    writers = rng.choice(nodes, lanes, replace=False)
    ranges = int(np.isin(writers, list(lost_nodes)).sum())
    written = float(rng.random(ranges).sum()) / shards  # of the dataset
    return [
        ("workers lost", f"{int(is_lost.sum()):,} of {workers:,}"),
        (
            "work done again for lost blocks",
            f"{redone_s:,.0f} s of one core: {redone_s / workers * 1000:.0f} ms of all",
        ),
        ("ranges that are written again", f"{ranges} of {lanes} that are open, of {shards:,}"),
        ("samples that are run again for them", f"{100 * written:.3f}%"),
        ("pace afterwards", f"{100 * (1 - len(lost_nodes) / nodes):.0f}%"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--samples-per-shard", type=int, default=10_000)
    parser.add_argument("--worlds", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--nodes", type=int, default=1000)
    args = parser.parse_args()
    data, assumed = Dataset(args.shards, args.samples_per_shard), Assumed()
    program = Program(numbers((data.samples_per_shard,) * data.shards).shuffle().plan)
    opening = timed(lambda: program.order(0))[1]
    print(
        f"{data.samples:,} samples in {data.shards:,} shards; the first order takes {opening:.1f} s, {peak_mb():.0f} MB"
    )
    head: tuple[str, ...] = ("ranks", "processor s", "shards", "requests", "seconds to the first batch", "MB more")
    table("The first batch of a rank", [head, *(first_batch(program, world, assumed) for world in args.worlds)])
    head = ("ranks", "bytes of a state", "ms to save", "ms to restore", "s to re-cut for half the ranks", "pieces")
    table("States in the middle of an epoch", [head, *(states(program, world) for world in args.worlds)])
    head = ("ranks", "requests at the start", "requests per second", "GB per second")
    table("Requests to the object store", [head, *(requests(world, assumed) for world in args.worlds)])
    table(
        f"One process in front of {args.nodes:,} nodes", [("what", "how much"), *driver(program, args.nodes, assumed)]
    )
    table("A tenth of the nodes is lost", [("what", "how much"), *node_loss(args.nodes, assumed)])


if __name__ == "__main__":
    main()
