"""``penstock index``: make the index of foreign shards and put it beside them."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from penstock.cli.tools import positive


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("urls", nargs="+", metavar="URL", help="shards, folders, globs or brace patterns")
    parser.add_argument("--json", action="store_true", help="one JSON line for each shard")
    parser.add_argument("--workers", type=positive, default=2, help="shards looked into at a time (2)")
    parser.epilog = "example:\n  penstock index 'train-{0000..0147}.tar'"


def run(args: argparse.Namespace) -> int:
    """Index every shard; 1 if one of them is damaged."""
    from penstock.engines.progress import Progress
    from penstock.formats.tar.source import SUFFIXES
    from penstock.inspection.verify import make_index, put_index
    from penstock.storage import expand, redacted, spell

    urls = expand(spell(args.urls), SUFFIXES)
    damaged = 0
    with Progress("indexing", len(urls), "shards") as bar, ThreadPoolExecutor(args.workers) as pool:
        for url, index in zip(urls, pool.map(make_index, urls), strict=True):
            put_index(url, index)
            damaged += bool(index.bad)
            name = redacted(url)
            found = {"shard": name, "samples": index.samples, "bad": len(index.bad), "skipped": index.skipped}
            trouble = f", {len(index.bad)} of them bad" if index.bad else ""
            sys.stdout.write(f"{json.dumps(found) if args.json else f'{name}: {index.samples} samples{trouble}'}\n")
            bar.add()
    return 1 if damaged else 0
