"""``penstock example``: make a small dataset to try things on: photos, sounds, a table or text."""

from __future__ import annotations

import argparse
import sys

from penstock.cli import counted
from penstock.cli.argument_types import positive_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("photos", "sounds", "table", "text"), help="what to make")
    parser.add_argument("folder", metavar="FOLDER", help="where to put it; the folder must be new or empty")
    parser.add_argument("--samples", type=positive_count, help="how many samples (photos 400, sounds 100, rows 10000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes another dataset (0)")
    parser.epilog = "examples:\n  penstock example photos photos\n  penstock example table trips --samples 100000"


def run(args: argparse.Namespace) -> int:
    from penstock.cli.example_data import EXAMPLES, make_example

    count = make_example(args.kind, args.folder, args.samples, args.seed)
    example = EXAMPLES[args.kind]
    sys.stdout.write(f"{args.folder}: {counted(count, example.noun)}, {example.contents}\n")
    sys.stdout.write(f"next: {example.next_step.format(folder=args.folder.rstrip('/') or '/')}\n")
    return 0
