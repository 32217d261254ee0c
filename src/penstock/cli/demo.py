"""``penstock demo``: draw, pack and stream a dataset, train on it, interrupt and resume, in a few seconds."""

from __future__ import annotations

import argparse
from functools import partial

from penstock.cli.argument_types import count, positive_count, whole_number

# Enough that each of two ranks has the three batches needed to stop them at different positions.
MIN_SAMPLES = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="keep the shards in this folder, which must be new or empty")
    parser.add_argument(
        "--samples", type=partial(whole_number, minimum=MIN_SAMPLES), default=2500, help="number of images (2500)"
    )
    parser.add_argument("--epochs", type=positive_count, default=8, help="epochs before the interruption (8)")
    parser.add_argument("--seed", type=count, default=0, help="determines everything except the rates (0)")
    parser.epilog = """examples:
  penstock demo --folder shapes
  penstock demo --samples 500 --epochs 3"""


def run(args: argparse.Namespace) -> int:
    from penstock.cli.demo_run import run_demo

    return run_demo(args)
