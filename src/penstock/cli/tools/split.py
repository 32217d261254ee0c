"""``penstock split`` (``tarsplit``): split a stream into shards."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.blobs.compression import COMPRESSION_SUFFIXES
from penstock.cli.argument_types import positive_count, size_argument, usage_error
from penstock.cli.tools.arguments import add_input_arguments, add_old_letter, is_old_name

if TYPE_CHECKING:
    from penstock.formats.tar.archive import EncodedSamples
    from penstock.tarstream.raw import RawRun

_SHARD_NUMBER = re.compile(r"\{shard(?::(0?\d*)d)?\}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        default="shards",
        metavar="NAME",
        help="NAME writes NAME-000000.tar, ...; NAME/ writes into a folder; in a pattern, %%06d or {shard:06d} is the "
        "number of the shard (shards)",
    )
    parser.add_argument(
        "-n",
        "--num-samples",
        type=positive_count,
        default=100_000,
        metavar="N",
        help="maximum number of samples in a shard (100000)",
    )
    parser.add_argument(
        *["-s"] if is_old_name(parser) else [],
        "--max-size",
        type=size_argument,
        default=1e9,
        metavar="BYTES",
        help="maximum size of a shard (1e9)",
    )
    parser.add_argument("--maxshards", "--max-shards", type=positive_count, metavar="N", help="stop after N shards")
    parser.add_argument(
        "-z",
        "--compress",
        nargs="?",
        const="gz",
        choices=COMPRESSION_SUFFIXES,
        help="compress the shards; -z alone means gz",
    )
    parser.add_argument("--no-manifest", action="store_true", help="do not write a manifest")
    parser.add_argument("--json", action="store_true", help="print one JSON line per shard")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each shard when it is written")
    add_old_letter(parser, "-s", "--max-size")
    parser.epilog = """examples:
  tar -cf - --sort=name -C /data/imagenet train | penstock split --max-size 1e9 -o imagenet_train --maxshards 2
  penstock cat 'raw-*.tar' | penstock split -n 10000 -o s3://bucket/train/"""


def shard_pattern(name: str) -> str:
    """Return the %-pattern of shard names that the value of ``--output`` stands for.

    >>> shard_pattern("train"), shard_pattern("out/"), shard_pattern("a-{shard:04d}.tar")
    ('train-%06d.tar', 'out/shard-%06d.tar', 'a-%04d.tar')

    Raises:
        SystemExit: With 2 if the name is standard output.
    """
    if name == "-":
        usage_error("several shards cannot go to standard output: name them with -o")
    if _SHARD_NUMBER.search(name):
        return _SHARD_NUMBER.sub(lambda match: f"%{match[1] or '06'}d", name.replace("%", "%%"))
    if "%" in name:
        return name
    return f"{name}shard-%06d.tar" if name.endswith("/") else f"{name}-%06d.tar"


def run(args: argparse.Namespace) -> int:
    from penstock.cli.tools import streams
    from penstock.formats.manifest import ShardEntry
    from penstock.formats.tar.writer import ShardWriter

    def on_published(entry: ShardEntry, _: object) -> None:
        if args.json:
            sys.stdout.write(f"{json.dumps(entry._asdict())}\n")
        elif args.verbose:
            sys.stderr.write(f"{entry.name}: {entry.samples:,} samples, {entry.bytes:,} bytes\n")

    urls = streams.shard_urls(args)
    streams.refuse_inputs(_written(args, urls), urls)
    writer = ShardWriter(
        shard_pattern(args.output),
        max_bytes=args.max_size,
        max_samples=args.num_samples,
        compress=args.compress,
        manifest=not args.no_manifest,
        background=True,
        published=on_published,
    )
    full_shards = 0
    skipped: Counter[str] = Counter()
    with streams.write_errors_name(args.output), writer:
        runs = streams.read_runs(args, urls, mapped=args.compress is None, skipped=skipped)
        for samples in _cut(runs, writer.fits):
            if not writer.fits(len(samples.keys), samples.nbytes):
                full_shards += 1
                if full_shards == args.maxshards:
                    break
            writer.write_encoded(samples)
    if skipped:
        kinds = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(skipped.items()))
        sys.stderr.write(f"penstock: left out members that belong to no sample ({kinds})\n")
    return 0


def _written(args: argparse.Namespace, urls: list[str]) -> Iterator[str]:
    """Yield the files that a new shard may replace: those in a local folder, or the inputs in a remote one."""
    from penstock.formats.manifest import set_pattern
    from penstock.formats.tar.shard_names import on_disk, parse_target
    from penstock.storage import local_path

    pattern = shard_pattern(args.output)
    folder, name, _ = parse_target(local_path(pattern) if on_disk(pattern) else pattern, args.compress)
    if on_disk(pattern):
        there = os.listdir(folder) if os.path.isdir(folder) else []
    else:
        there = [url.rpartition("/")[2] for url in urls]
    yield from (f"{folder}/{file}" for file in there if set_pattern("tar", name).fullmatch(file))


def _cut(runs: Iterator[RawRun], fits: Callable[[int, int], bool]) -> Iterator[EncodedSamples]:
    """Yield as many samples at once as fit into the open shard; if none fits, the first sample of the next shard."""
    for raw_run in runs:
        start = 0
        while start < len(raw_run):
            rest = raw_run.slice(start, len(raw_run))
            counts = range(1, len(rest) + 1)
            fitting = bisect_left(counts, True, key=lambda count: not fits(count, rest.nbytes(count)))
            stop = start + max(fitting, 1)
            yield from raw_run.slice(start, stop).encode()
            start = stop
