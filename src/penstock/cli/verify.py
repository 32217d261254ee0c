"""``penstock verify``: shards and Parquet files as they should be, or a ledger against what it should prove."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from penstock.cli.tools import positive
from penstock.errors import PlanError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("urls", nargs="*", default=[], metavar="URL", help="folders, shards, globs or brace patterns")
    what.add_argument("--ledger", metavar="PATH", help="prove that every sample came once, by a loader's ledger")
    help_json = "one JSON line for each thing that is wrong; of a ledger one for all it says"
    parser.add_argument("--json", action="store_true", help=help_json)
    parser.add_argument("--workers", type=positive, default=2, help="shards read at a time (2)")
    parser.epilog = "examples:\n  penstock verify s3://bucket/photos\n  penstock verify --ledger runs/ledger"


def run(args: argparse.Namespace) -> int:
    """List all that is wrong; 1 if anything is."""
    return _shards(args) if args.ledger is None else _ledger(args.ledger, args.json)


def _ledger(folder: str, as_json: bool) -> int:
    from penstock.feed.ledger import ledger

    proof = ledger(folder).verify()
    sys.stdout.write(f"{json.dumps(proof.to_json()) if as_json else proof}\n")
    return 0 if proof.ok else 1


def _shards(args: argparse.Namespace) -> int:
    from penstock.dataset.conversion import described_as
    from penstock.engines.progress import Progress
    from penstock.inspection.verify import listed, listed_tables, verify, verify_table
    from penstock.storage import spell

    patterns = spell(args.urls)
    kinds = {described_as(pattern) for pattern in patterns}
    if len(kinds) > 1 or not kinds <= {"tar", "parquet"}:
        raise PlanError(f"verify checks tar shards or Parquet files; these are {' and '.join(sorted(kinds))}")
    find, check, what = (listed, verify, "shards") if kinds == {"tar"} else (listed_tables, verify_table, "files")
    shards = find(patterns)
    wrong = 0
    with Progress("verifying", len(shards), what) as bar, ThreadPoolExecutor(args.workers) as pool:
        for problems in pool.map(check, shards):
            for problem in problems:
                sys.stdout.write(f"{json.dumps(asdict(problem)) if args.json else problem}\n")
            wrong += bool(problems)
            bar.add()
    if not args.json:
        sys.stdout.write(f"{len(shards)} {what}, {f'{wrong} of them not as they should be' if wrong else 'all well'}\n")
    return 1 if wrong else 0
