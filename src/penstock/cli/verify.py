"""``penstock verify``: check shards and Parquet files for damage, or prove a ledger."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from penstock.cli import counted
from penstock.cli.argument_types import positive_count
from penstock.errors import PlanError, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("urls", nargs="*", default=[], metavar="URL", help="folders, shards, globs or brace patterns")
    target.add_argument(
        "--ledger", metavar="PATH", help="prove from a loader's ledger that every sample was delivered exactly once"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON line per problem; for a ledger, one JSON object"
    )
    parser.add_argument("--workers", "-w", type=positive_count, default=2, help="shards or files read at a time (2)")
    parser.epilog = "examples:\n  penstock verify s3://bucket/photos\n  penstock verify --ledger runs/ledger"


def run(args: argparse.Namespace) -> int:
    return _verify_shards(args) if args.ledger is None else _verify_ledger(args.ledger, args.json)


def _verify_ledger(folder: str, as_json: bool) -> int:
    from penstock.feed.ledger import ledger

    proof = ledger(folder).verify()
    sys.stdout.write(f"{json.dumps(proof.to_json()) if as_json else proof}\n")
    return 0 if proof.ok else 1


def _verify_shards(args: argparse.Namespace) -> int:
    from penstock.dataset.conversion import format_to_inspect
    from penstock.engines.progress import Progress
    from penstock.inspection.verify import shards_to_verify, tables_to_verify, verify_shard, verify_table
    from penstock.storage import url_patterns

    patterns = url_patterns(args.urls)
    formats = {format_to_inspect(pattern) for pattern in patterns}
    if len(formats) > 1 or not formats <= {"tar", "parquet"}:
        raise PlanError(
            f"verify checks either tar shards or Parquet files; these files are {' and '.join(sorted(formats))}"
        )
    if formats == {"tar"}:
        files, verify, noun = shards_to_verify(patterns), verify_shard, "shard"
    else:
        files, verify, noun = tables_to_verify(patterns), verify_table, "file"
    faulty = 0
    with Progress("verifying", len(files), f"{noun}s") as bar, ThreadPoolExecutor(args.workers) as pool:
        for problems in pool.map(verify, files):
            for problem in problems:
                sys.stdout.write(f"{json.dumps(asdict(problem)) if args.json else printable(str(problem))}\n")
            faulty += bool(problems)
            bar.add()
    if not args.json:
        verdict = f"{faulty} with problems" if faulty else "no problems found"
        sys.stdout.write(f"{counted(len(files), noun)}, {verdict}\n")
    return 1 if faulty else 0
