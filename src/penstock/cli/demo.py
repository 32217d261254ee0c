"""``penstock demo``: a dataset drawn, packed, streamed, learned from, interrupted and resumed, in a few seconds."""

from __future__ import annotations

import argparse
from typing import Any

# Fewer do not make the three batches a rank that it takes to stop two ranks at different places.
LEAST_SAMPLES = 200


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--folder", help="keep the shards in this new or empty folder (default: keep nothing)")
    parser.add_argument("--samples", type=_at_least(LEAST_SAMPLES), default=2500, help="images (default: 2500)")
    parser.add_argument("--epochs", type=_at_least(1), default=8, help="epochs before the stop (default: 8)")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="all but the rates follows from it")
    parser.epilog = "example:\n  penstock demo --folder shapes"


def run(args: argparse.Namespace) -> int:
    """Show the whole way of a dataset on standard output; the exit code is 1 if a resume was not exact."""
    from penstock.cli.demo_run import show

    return show(args)


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number
