"""``penstock index``: build the index of shards that other tools wrote, store it beside them, update the manifest."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from penstock.cli import counted
from penstock.cli.argument_types import positive_count

_NOT_STORED = "no sample has the field, or one has a value longer than 64 bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="shards, folders, globs or brace patterns")
    parser.add_argument(
        "--values",
        metavar="FIELDS",
        default="",
        help="also store the values of these fields, such as cls or cls,json, if none is longer than 64 bytes:"
        " `penstock view` then finds the samples of a label at once",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line per shard")
    parser.add_argument("--workers", "-w", type=positive_count, default=2, help="shards indexed at a time (2)")
    parser.epilog = """examples:
  penstock index 'train-{0000..0147}.tar'
  penstock index --values cls s3://bucket/train/"""


def run(args: argparse.Namespace) -> int:
    from penstock.engines.progress import Progress
    from penstock.formats.manifest import MANIFEST
    from penstock.formats.tar.indexing import index_shard, store_index, update_manifest
    from penstock.formats.tar.shard_names import expand_shards
    from penstock.storage import redacted, url_patterns

    urls = expand_shards(url_patterns(args.urls))
    values = tuple(filter(None, args.values.split(",")))
    damaged = 0
    entries: dict[str, list[Any]] = {}
    with Progress("indexing", len(urls), "shards") as bar, ThreadPoolExecutor(args.workers) as pool:
        for url, (index, entry) in zip(urls, pool.map(partial(index_shard, values=values), urls), strict=True):
            store_index(url, index)
            damaged += bool(index.bad)
            if not index.bad:  # a manifest says what a damaged shard held
                entries.setdefault(url.rpartition("/")[0] or ".", []).append(entry)
            name = redacted(url)
            summary = {"shard": name, "samples": index.samples, "bad": len(index.bad), "skipped": index.skipped}
            bad = f", {len(index.bad):,} of them unreadable" if index.bad else ""
            line = f"{name}: {counted(index.samples, 'sample')}{bad}"
            sys.stdout.write(f"{json.dumps(summary) if args.json else line}\n")
            if left_out := [field for field in values if field not in index.values]:
                sys.stderr.write(f"penstock: {name}: no values of {', '.join(left_out)}: {_NOT_STORED}\n")
            bar.add()
    for folder, found in entries.items():
        if changed := update_manifest(folder, found):
            sys.stderr.write(
                f"penstock: {redacted(folder)}/{MANIFEST}: {counted(changed, 'entry', 'entries')} updated\n"
            )
    return 1 if damaged else 0
