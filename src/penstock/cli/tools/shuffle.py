"""``penstock shuffle``: all samples in a random order."""

from __future__ import annotations

import argparse

from penstock.cli.tools import choose, give_output, sort, take_inputs


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    take_inputs(parser)
    give_output(parser)
    choose(parser)
    parser.add_argument("--seed", type=int, default=0, help="decides the order (0)")
    sort.temporary(parser)
    parser.set_defaults(by="key", type="shuffle", reverse=False)
    parser.epilog = "example:\n  penstock shuffle --seed 7 'train-*.tar' | penstock split -n 10000 -o shuffled"


def run(args: argparse.Namespace) -> int:
    """Shuffle: sort by a hash of keys and seed."""
    return sort.run(args)
