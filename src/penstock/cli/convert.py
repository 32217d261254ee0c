"""``penstock convert``: files of one format into another."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from penstock.cli.tools import amount, positive

FORMATS = ("tar", "parquet", "csv", "json", "tfrecords")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("source", metavar="SRC", help="a file, folder or pattern: tar, Parquet, CSV, JSON lines, ...")
    parser.add_argument("target", metavar="DST", help="a folder or file: a path or URL")
    parser.add_argument("--format", choices=FORMATS, help="what to write, where the name of DST does not tell")
    parser.add_argument("--max-bytes", type=amount, help="the most bytes of a file")
    parser.add_argument("--workers", type=positive, help="how many read at a time")
    parser.add_argument("--no-resume", action="store_true", help="start over an interrupted conversion")
    parser.add_argument("--json", action="store_true", help="tell what was written as JSON")
    parser.epilog = "example: penstock convert shards/ tables/ --format parquet"


def run(args: argparse.Namespace) -> int:
    """Convert, and say what came of it."""
    from penstock.dataset.conversion import convert  # here, as in all commands: help must be quick

    made = convert(
        args.source,
        args.target,
        format=args.format,
        max_bytes=args.max_bytes,
        workers=args.workers,
        resume=not args.no_resume,
        progress=sys.stderr.isatty(),
    )
    told = f"{made.folder}: {made.samples:,} samples in {len(made.shards):,} files of {made.nbytes:,} bytes"
    sys.stdout.write(f"{json.dumps(asdict(made)) if args.json else told}\n")
    return 0
