"""``penstock demo``: draw, pack and stream a dataset, train on it, interrupt and resume, in a few seconds."""

from __future__ import annotations

import argparse
from collections.abc import Callable

# Enough that each of two ranks has the three batches needed to stop them at different positions.
MIN_SAMPLES = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="keep the shards in this new or empty folder (default: keep nothing)")
    parser.add_argument("--samples", type=_at_least(MIN_SAMPLES), default=2500, help="images (default: 2500)")
    parser.add_argument("--epochs", type=_at_least(1), default=8, help="epochs before the interruption (default: 8)")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="determines everything but the rates (default: 0)")
    parser.epilog = "example:\n  penstock demo --folder shapes"


def run(args: argparse.Namespace) -> int:
    from penstock.cli.demo_run import show

    return show(args)


def _at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    return number
