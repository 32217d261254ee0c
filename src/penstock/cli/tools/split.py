"""``penstock split`` (``tarsplit``): a stream into shards."""

from __future__ import annotations

import argparse
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.cli.tools import COMPRESSIONS, amount, positive, take_inputs, wrong

if TYPE_CHECKING:
    from penstock.formats.tar.archive import EncodedSamples
    from penstock.tarstream.raw import RawRun

_NUMBER = re.compile(r"\{shard(?::(0?\d*)d)?\}")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    take_inputs(parser)
    about = "NAME gives NAME-000000.tar, ...; or a folder (with a slash), or a pattern: %%06d or {shard:06d} (shards)"
    parser.add_argument("-o", "--output", default="shards", metavar="NAME", help=about)
    parser.add_argument(
        "-n", "--num-samples", type=positive, default=100_000, metavar="N", help="the most samples of a shard (100000)"
    )
    parser.add_argument(
        "-s", "--max-size", type=amount, default=1e9, metavar="BYTES", help="the most bytes of a shard (1e9)"
    )
    parser.add_argument("--maxshards", "--max-shards", type=positive, metavar="N", help="stop when N shards are full")
    parser.add_argument(
        "-z", "--compress", nargs="?", const="gz", choices=COMPRESSIONS, help="compress the shards (gz)"
    )
    parser.add_argument("--no-manifest", action="store_true", help="write no manifest")
    parser.add_argument("--json", action="store_true", help="tell what was written, one JSON line for each shard")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell each shard as it appears")
    parser.epilog = """examples:
  tar -cf - --sort=name -C /data/imagenet train | penstock split -s 1e9 -o imagenet_train --maxshards 2
  penstock cat 'raw-*.tar' | penstock split -n 10000 -o s3://bucket/train/"""


def pattern(name: str) -> str:
    """Read how the shards are called: a name, a folder or a pattern.

    >>> pattern("train"), pattern("out/"), pattern("a-{shard:04d}.tar")
    ('train-%06d.tar', 'out/shard-%06d.tar', 'a-%04d.tar')
    """
    if name == "-":
        wrong("several shards cannot go to standard output: name them with -o")
    if _NUMBER.search(name):
        return _NUMBER.sub(lambda match: f"%{match[1] or '06'}d", name.replace("%", "%%"))
    if "%" in name:
        return name
    return f"{name}shard-%06d.tar" if name.endswith("/") else f"{name}-%06d.tar"


def run(args: argparse.Namespace) -> int:
    """Split, and say what came of it."""
    from penstock.cli.tools import streams as flow
    from penstock.formats.manifest import ShardEntry
    from penstock.formats.tar.writer import ShardWriter

    def appeared(entry: ShardEntry, _: object) -> None:
        if args.json or args.verbose:
            told = (
                json.dumps(entry._asdict())
                if args.json
                else f"{entry.name}: {entry.samples:,} samples, {entry.bytes:,} bytes"
            )
            (sys.stdout if args.json else sys.stderr).write(f"{told}\n")

    writer = ShardWriter(
        pattern(args.output),
        max_bytes=args.max_size,
        max_samples=args.num_samples,
        compress=args.compress,
        manifest=not args.no_manifest,
        background=True,
        published=appeared,
    )
    full = 0
    with flow.failures_at(args.output), writer:
        for parts in _cut(flow.stretches(args, mapped=args.compress is None), writer.fits):
            if not writer.fits(len(parts.keys), parts.nbytes):
                full += 1
                if full == args.maxshards:
                    break
            writer.write_encoded(parts)
    return 0


def _cut(stretches: Iterator[RawRun], fits: Callable[[int, int], bool]) -> Iterator[EncodedSamples]:
    """Give as many samples at once as fit into the open shard; where none does, the one that begins the next."""
    for stretch in stretches:
        at = 0
        while at < len(stretch):
            left = stretch.slice(at, len(stretch))
            count = bisect_left(range(1, len(left) + 1), True, key=lambda some: not fits(some, left.nbytes(some)))
            at += max(count, 1)
            yield from left.slice(0, max(count, 1)).encode()
