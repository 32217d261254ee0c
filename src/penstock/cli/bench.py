"""``penstock bench``: measure how fast shards are read, decoded, augmented and batched, and advise what would help."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.cli.argument_types import positive_count, seconds

if TYPE_CHECKING:
    from penstock.inspection.bench import BenchReport

_NEAR_LIMIT = 0.7  # share of a limit above which the step itself can hardly get faster
_CONTRADICTION = 1.3  # all steps together cannot be this much faster than the slowest one: the rates are not reliable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="folders, files, globs or brace patterns: tar shards or Parquet"
    )
    parser.add_argument(
        "--decode",
        metavar="SPEC",
        help="how fields are decoded, as in Dataset.decode: rgb8, l8, pil, ... (images to RGB)",
    )
    parser.add_argument("--batch", type=positive_count, default=64, metavar="N", help="samples per batch (64)")
    parser.add_argument(
        "--size", type=positive_count, default=224, help="crop and scale images to SIZE x SIZE pixels (224)"
    )
    parser.add_argument("--no-antialias", action="store_true", help="scale without antialiasing: faster, coarser")
    parser.add_argument("--workers", "-w", type=positive_count, metavar="N", help="decoder threads (one per core)")
    parser.add_argument("--seconds", type=seconds, default=2.0, help="time for each of about seven measurements (2)")
    parser.add_argument(
        "--cache",
        action="store_true",
        help="measure nothing; simulate which share of an epoch a cache of 25, 50 and 75 percent of the shards serves",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.epilog = """examples:
  penstock bench 'photos-{0000..0147}.tar' --batch 256
  penstock bench s3://bucket/photos --decode rgb8 --workers 4"""


def run(args: argparse.Namespace) -> int:
    if args.cache:
        return _simulate(args)
    from penstock.inspection.bench import bench

    report = bench(
        args.urls,
        args.decode,
        batch=args.batch,
        size=args.size,
        antialias=not args.no_antialias,
        workers=args.workers,
        seconds=args.seconds,
    )
    comments = [*advice(report), *report.notes]
    if args.json:
        values: dict[str, Any] = {**asdict(report), "bottleneck": report.bottleneck.name, "advice": comments}
        sys.stdout.write(json.dumps(values) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in (*_table(report), "", *comments, *_stored_table(report)))
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from penstock.inspection.cache_bench import simulate_cache

    report = simulate_cache(args.urls)
    if args.json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
        return 0
    sys.stdout.write(
        f"{report.shards:,} shards, {report.nbytes:,} bytes; the share of an epoch that a cache serves\n\n"
    )
    sys.stdout.write(f"{'cache':>6} {'epochs':<12}{'best possible':>14}{'ps.Cache':>10}{'least recent':>14}\n")
    for row in report.results:
        epochs = "reshuffled" if row.shuffled else "in one order"
        rates = f"{row.best:>14.1%}{row.planned:>10.1%}{row.recent:>14.1%}"
        sys.stdout.write(f"{row.share:>6.0%} {epochs:<12}{rates}\n")
    return 0


def _table(report: BenchReport) -> Iterator[str]:
    images = "" if report.side is None else f", {report.image} of {report.side} px on the long side"
    yield f"{report.shards:,} shards, {report.sample_bytes:,.0f} bytes per sample{images}; {report.workers} workers"
    yield ""
    yield f"{'step':<24}{'samples/s':>12}{'MB/s':>10}"
    for result in (*report.limits, *report.steps, report.together):
        megabytes = "" if result.bytes_s is None else f"{result.bytes_s / 1e6:,.0f}"
        yield f"{_TITLES.get(result.name, result.name):<24}{result.samples_s:>12,.0f}{megabytes:>10}"


def _stored_table(report: BenchReport) -> Iterator[str]:
    """Yield what crops would gain if the images were stored in other ways."""
    if not report.stored:
        return
    yield ""
    yield f"{'crops, images stored':<24}{'samples/s':>12}{'KB each':>10}"
    for result in report.stored:
        kilobytes = (result.bytes_s or 0) / result.samples_s / 1000
        gain = result.samples_s / report.stored[0].samples_s
        yield f"{result.name:<24}{result.samples_s:>12,.0f}{kilobytes:>10,.1f}{gain:>9.1f}x"


_TITLES = {
    "limit: read": "limit: plain reads",
    "limit: decode": "limit: decoder alone",
}


def advice(report: BenchReport) -> Iterator[str]:
    """Yield sentences that name the bottleneck, how near it is to its limit, and what would help."""
    slowest = report.bottleneck
    share = report.together.samples_s / slowest.samples_s
    yield (
        f"All together: {report.together.samples_s:,.0f} samples/s, {share:.0%} of the rate of the slowest step alone "
        f"({slowest.name}: {slowest.samples_s:,.0f} samples/s)."
    )
    if share > _CONTRADICTION:
        yield (
            "These rates contradict each other: the machine was busy with something else. Measure again, with a larger "
            "--seconds if necessary."
        )
    limit = report.result(f"limit: {slowest.name}")
    yield from _ADVICE[slowest.name](report, None if limit is None else slowest.samples_s / limit.samples_s)
    seconds_per_sample = sum(1 / step.samples_s for step in report.steps)
    if report.together.samples_s < _NEAR_LIMIT / seconds_per_sample:
        yield (
            f"Running the steps one after the other would reach {1 / seconds_per_sample:,.0f} samples/s: other "
            "programs use the cores, or there are too few workers."
        )


def _reading_advice(report: BenchReport, share: float | None) -> Iterator[str]:
    if share is not None and share >= _NEAR_LIMIT:
        yield f"Reading reaches {share:.0%} of plain reads of the same bytes: the storage is the limit."
        action = (
            "keep a local copy with cache=ps.Cache(folder)" if report.remote else "move the shards to a faster disk"
        )
        yield f"To go faster, {action}, or store less: `penstock pack` with --max-side, or without unused fields."
        return
    yield "Reading is slower than the storage: the samples are small, or the shards have no index or are compressed."
    yield "`penstock index` builds an index; uncompressed shards are read in place."


def _decoding_advice(report: BenchReport, share: float | None) -> Iterator[str]:
    if share is not None:
        yield f"Decoding reaches {share:.0%} of the decoder alone on all cores."
    stored = max(256, -(-report.size * 8 // 7))  # the customary margin for random crops: 256 for 224
    if report.side is not None and report.side >= 1.5 * stored:
        times = (report.side / stored) ** 2
        yield (
            f"Images have {report.side} px on the long side, but are scaled to {report.size}: packing them once with "
            f"`penstock pack --max-side {stored}` stores {times:.1f} times fewer pixels (small crops are scaled up)."
        )
    if share is not None and share < _NEAR_LIMIT:
        yield f"With {report.workers} workers it could get closer: try one worker per core with decode(workers=...)."
    else:
        yield "Beyond that, only more cores or fewer bytes to decode make it faster."


def _augmenting_advice(report: BenchReport, share: float | None) -> Iterator[str]:
    yield "Cropping and scaling are the limit: antialias=False and a smaller size= make them faster."


def _batching_advice(report: BenchReport, share: float | None) -> Iterator[str]:
    yield "Batching is limited by memory bandwidth: smaller values (uint8 instead of floats) make it faster."


_ADVICE: dict[str, Callable[[BenchReport, float | None], Iterator[str]]] = {
    "read": _reading_advice,
    "decode": _decoding_advice,
    "augment": _augmenting_advice,
    "batch": _batching_advice,
}
