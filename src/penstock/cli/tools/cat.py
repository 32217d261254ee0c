"""``penstock cat`` (``tarcat``, ``tarscat``, ``tarpcat``): concatenate shards, or select samples and fields of them."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.argument_types import count, positive_count
from penstock.cli.tools.arguments import (
    add_input_arguments,
    add_output_arguments,
    add_selection_arguments,
    field_names,
    sample_slice,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # In tarpcat -s is --shuffle and shards are read in parallel by default; under its other names -s is --skip.
    parallel = parser.prog == "tarpcat"
    add_input_arguments(parser)
    add_output_arguments(parser)
    add_selection_arguments(parser)
    parser.add_argument(
        *["--skip"] if parallel else ["-s", "--skip"],
        type=count,
        default=0,
        metavar="N",
        help="skip the first N samples",
    )
    parser.add_argument(
        "--slice",
        type=sample_slice,
        metavar="A:B:STEP",
        help="select every STEP-th of the samples from A up to, but not including, B",
    )
    parser.add_argument("-f", "--fields", type=field_names, metavar="FIELDS", help="keep only these fields: 'jpg cls'")
    parser.add_argument("-x", "--drop", type=field_names, metavar="FIELDS", help="drop these fields")
    parser.add_argument(
        "--rename",
        metavar="TEMPLATE",
        help="rename keys by a template with {key}, {name}, {folder}, {shard}, {number:06d}",
    )
    parser.add_argument(
        *["-s", "--shuffle"] if parallel else ["--shuffle"],
        type=count,
        default=0,
        metavar="N",
        help="shuffle through a buffer of N samples (0: keep the order)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle (0)")
    default_workers = 8 if parallel else 1
    parser.add_argument(
        "-p",
        "-w",
        "--parallel",
        "--workers",
        type=positive_count,
        default=default_workers,
        metavar="N",
        help=f"read N shards at a time; the samples of different shards are then interleaved ({default_workers})",
    )
    # Braces are always expanded; the option is accepted because tarscat has it.
    parser.add_argument("-b", "--braceexpand", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the number of samples at the end")
    parser.epilog = """examples:
  penstock cat -c 10 big.tgz > small.tar
  penstock cat 's3://bucket/train-{0000..0147}.tar' --where 'cls == 3' -f 'jpg cls' -o cats.tar
  penstock cat a.tar b.tar --rename '{shard}/{key}' --shuffle 1000 | penstock split -n 10000 -o mixed"""


def run(args: argparse.Namespace) -> int:
    from penstock.cli.tools import streams

    selection = streams.selection(args)
    urls = streams.shard_urls(args)
    with streams.open_output(args, urls) as out:
        if selection.copies_runs:
            encoded = selection.encode_runs(streams.read_runs(args, urls, args.parallel, mapped=args.compress is None))
        else:
            encoded = selection.encode(streams.read_samples(args, urls, args.parallel))
        written = 0
        for samples in encoded:
            out.write_encoded(samples)
            written += len(samples.keys)
    if args.verbose:
        sys.stderr.write(f"{written:,} samples\n")
    return 0
