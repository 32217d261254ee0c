"""``penstock verify``: every checksum, key and count of shards, against their manifest and index."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from penstock.engines.progress import Progress
from penstock.packing.checking import listed, verify
from penstock.storage import spell


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("urls", nargs="+", metavar="URL", help="folders, shards, globs or brace patterns")
    parser.add_argument("--json", action="store_true", help="one JSON line for each thing that is wrong")
    parser.add_argument("--workers", type=int, default=2, help="shards read at a time (2)")
    parser.epilog = "example: penstock verify s3://bucket/photos"


def run(args: argparse.Namespace) -> int:
    """Look at every shard and list all that is wrong; 1 if anything is."""
    shards = listed(spell(args.urls))
    wrong = 0
    with Progress("verifying", len(shards), "shards") as bar, ThreadPoolExecutor(max(1, args.workers)) as pool:
        for problems in pool.map(verify, shards):
            for problem in problems:
                sys.stdout.write(f"{json.dumps(asdict(problem)) if args.json else problem}\n")
            wrong += bool(problems)
            bar.add()
    if not args.json:
        sys.stdout.write(f"{len(shards)} shards, {f'{wrong} of them not as they should be' if wrong else 'all well'}\n")
    return 1 if wrong else 0
