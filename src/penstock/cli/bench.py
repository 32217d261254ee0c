"""``penstock bench``: how fast shards are on this machine, step by step, and what to do about it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.inspection.bench import Paces

_CLOSE = 0.7  # of a limit: no use to look for more in the step itself
_DOUBTFUL = 1.3  # of the slowest step, for all of them together


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("urls", nargs="+", metavar="URL", help="folders, shards, globs or brace patterns: tar, Parquet")
    how = "how fields are decoded, as Dataset.decode takes it: rgb8, l8, pil, ... (images to RGB)"
    parser.add_argument("--decode", metavar="SPEC", help=how)
    parser.add_argument("--batch", type=_above_0(int), default=64, metavar="N", help="samples in a batch (64)")
    parser.add_argument("--size", type=_above_0(int), default=224, help="pixels images are cropped and scaled to (224)")
    parser.add_argument("--no-antialias", action="store_true", help="scale plainly: faster, coarser")
    parser.add_argument("--workers", type=_above_0(int), metavar="N", help="threads that decode (one a core)")
    parser.add_argument("--seconds", type=_above_0(float), default=2.0, help="for each of about seven figures (2)")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    parser.epilog = "example: penstock bench 'photos-{0000..0147}.tar' --batch 256"


def _above_0(kind: Callable[[str], float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    convert.__name__ = kind.__name__  # argparse names it where the text is no number
    return convert


def run(args: argparse.Namespace) -> int:
    """Measure, tell the figures, and say what they mean."""
    from penstock.inspection.bench import pace

    found = pace(
        args.urls,
        args.decode,
        batch=args.batch,
        size=args.size,
        antialias=not args.no_antialias,
        workers=args.workers,
        seconds=args.seconds,
    )
    told = [*advice(found), *found.notes]
    if args.json:
        values: dict[str, Any] = {**asdict(found), "bottleneck": found.bottleneck.name, "advice": told}
        sys.stdout.write(json.dumps(values) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in (*_lines(found), "", *told))
    return 0


def _lines(found: Paces) -> Iterator[str]:
    images = "" if found.side is None else f", {found.image} of {found.side} px on the long side"
    yield f"{found.shards:,} shards, {found.sample_bytes:,.0f} bytes a sample{images}; {found.workers} workers"
    yield ""
    yield f"{'step':<24}{'samples/s':>12}{'MB/s':>10}"
    for pace in (*found.limits, *found.steps, found.together):
        megabytes = "" if pace.bytes_s is None else f"{pace.bytes_s / 1e6:,.0f}"
        yield f"{_TITLES[pace.name]:<24}{pace.samples_s:>12,.0f}{megabytes:>10}"


_TITLES = {
    "limit: read": "limit: plain reads",
    "limit: decode": "limit: decoder alone",
    "read": "read",
    "decode": "decode",
    "augment": "augment",
    "batch": "batch",
    "all together": "all together",
}


def advice(found: Paces) -> Iterator[str]:
    """What the figures mean, in words: the bottleneck, how near it is to its limit, and what would help."""
    slowest = found.bottleneck
    share = found.together.samples_s / slowest.samples_s
    yield (
        f"All together: {found.together.samples_s:,.0f} samples/s, {share:.0%} of the slowest step alone: "
        f"{slowest.name}, {slowest.samples_s:,.0f}."
    )
    if share > _DOUBTFUL:
        yield "These figures contradict each other: the machine was busy with something else. Measure again, or longer."
    limit = found.named(f"limit: {slowest.name}")
    yield from _ADVICE[slowest.name](found, None if limit is None else slowest.samples_s / limit.samples_s)
    steps = sum(1 / step.samples_s for step in found.steps)
    if found.together.samples_s < _CLOSE / steps:
        yield (
            f"Steps that had the machine one after the other would reach {1 / steps:,.0f}: something else takes the "
            "cores meanwhile, or there are too few workers."
        )


def _about_reading(found: Paces, share: float | None) -> Iterator[str]:
    if share is not None and share >= _CLOSE:
        yield f"Reading is at {share:.0%} of what plain reads of the same bytes reach: the storage is what limits."
        far = "keep a copy near with cache=ps.Cache(folder)" if found.remote else "move the shards to a faster disk"
        yield f"To go faster, {far}, or store less: `penstock pack` with --max-side, or without fields nobody reads."
        return
    yield "Reading takes longer than the bytes do: shards of small samples, without an index, or compressed."
    yield "`penstock index` makes an index; shards that are not compressed are read in place."


def _about_decoding(found: Paces, share: float | None) -> Iterator[str]:
    if share is not None:
        yield f"Decoding is at {share:.0%} of the decoder alone on all cores."
    stored = max(256, -(-found.size * 8 // 7))  # 256 for 224
    if found.side is not None and found.side >= 1.5 * stored:
        times = (found.side / stored) ** 2
        yield (
            f"Images have {found.side} px and {found.size} are kept: `penstock pack --max-side {stored}` stores "
            f"{times:.1f} times fewer pixels, once (small parts of them are then scaled up)."
        )
    if share is not None and share < _CLOSE:
        yield f"With {found.workers} workers it could be nearer: workers= of decode, one a core, is where to look."
    else:
        yield "Beyond that only more cores, or fewer bytes to decode, make it faster."


def _about_augmenting(found: Paces, share: float | None) -> Iterator[str]:
    yield "Scaling and cropping is what limits: antialias=False is the faster way, and a smaller size= costs less."


def _about_batching(found: Paces, share: float | None) -> Iterator[str]:
    yield "Putting batches together is what limits: memory is. Smaller values (uint8 instead of floats) make it faster."


_ADVICE: dict[str, Callable[[Paces, float | None], Iterator[str]]] = {
    "read": _about_reading,
    "decode": _about_decoding,
    "augment": _about_augmenting,
    "batch": _about_batching,
}
