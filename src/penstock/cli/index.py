"""``penstock index``: build the index of shards that other tools wrote, and store it beside them."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from penstock.cli import counted
from penstock.cli.argument_types import positive_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="shards, folders, globs or brace patterns")
    parser.add_argument("--json", action="store_true", help="print one JSON line per shard")
    parser.add_argument("--workers", type=positive_count, default=2, help="shards indexed at a time (2)")
    parser.epilog = "example:\n  penstock index 'train-{0000..0147}.tar'"


def run(args: argparse.Namespace) -> int:
    from penstock.engines.progress import Progress
    from penstock.formats.tar.indexing import build_index, store_index
    from penstock.formats.tar.shard_names import TAR_SUFFIXES
    from penstock.storage import expand, redacted, url_patterns

    urls = expand(url_patterns(args.urls), TAR_SUFFIXES)
    damaged = 0
    with Progress("indexing", len(urls), "shards") as bar, ThreadPoolExecutor(args.workers) as pool:
        for url, index in zip(urls, pool.map(build_index, urls), strict=True):
            store_index(url, index)
            damaged += bool(index.bad)
            name = redacted(url)
            summary = {"shard": name, "samples": index.samples, "bad": len(index.bad), "skipped": index.skipped}
            bad = f", {len(index.bad):,} of them unreadable" if index.bad else ""
            line = f"{name}: {counted(index.samples, 'sample')}{bad}"
            sys.stdout.write(f"{json.dumps(summary) if args.json else line}\n")
            bar.add()
    return 1 if damaged else 0
