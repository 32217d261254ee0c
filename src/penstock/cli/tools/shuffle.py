"""``penstock shuffle``: shuffle all samples, by sorting them by a hash of their keys."""

from __future__ import annotations

import argparse

from penstock.cli.tools import sort
from penstock.cli.tools.arguments import (
    add_input_arguments,
    add_output_arguments,
    add_selection_arguments,
    add_temporary_folder_argument,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    add_output_arguments(parser)
    add_selection_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle (0)")
    add_temporary_folder_argument(parser)
    parser.set_defaults(by="key", type="shuffle", reverse=False)
    parser.epilog = """examples:
  penstock shuffle --seed 7 'train-*.tar' | penstock split -n 10000 -o shuffled
  penstock shuffle -t /scratch big.tar.gz -o shuffled.tar"""


def run(args: argparse.Namespace) -> int:
    return sort.run(args)
