"""``penstock cat`` (``tarcat``, ``tarscat``, ``tarpcat``): shards into one stream."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.tools import choose, give_output, positive, stretch, take_inputs, whole, words


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes; ``-s`` of ``tarpcat`` is another one."""
    parallel = parser.prog == "tarpcat"
    take_inputs(parser)
    give_output(parser)
    choose(parser)
    parser.add_argument(
        *["--skip"] if parallel else ["-s", "--skip"],
        type=whole,
        default=0,
        metavar="N",
        help="leave out the first N samples",
    )
    parser.add_argument(
        "--slice", type=stretch, metavar="A:B:STEP", help="the samples from number A up to B, every STEP-th"
    )
    parser.add_argument("-f", "--fields", type=words, metavar="FIELDS", help="keep these fields only: 'jpg cls'")
    parser.add_argument("-x", "--drop", type=words, metavar="FIELDS", help="leave these fields out")
    about = "make keys of a template with {key}, {name}, {folder}, {shard}, {number:06d}"
    parser.add_argument("--rename", metavar="TEMPLATE", help=about)
    about = "hold N samples in memory and take one at random each time (0: keep the order)"
    parser.add_argument(
        *["-s", "--shuffle"] if parallel else ["--shuffle"], type=whole, default=0, metavar="N", help=about
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the order (0)")
    about = f"read N shards at a time; they come in any order ({8 if parallel else 1})"
    parser.add_argument(
        "-p", "--parallel", "--workers", type=positive, default=8 if parallel else 1, metavar="N", help=about
    )
    parser.add_argument("-b", "--braceexpand", action="store_true", help=argparse.SUPPRESS)  # done anyway
    parser.add_argument("-v", "--verbose", action="store_true", help="tell at the end how many samples went through")
    parser.epilog = """examples:
  penstock cat -c 10 big.tgz > small.tar
  penstock cat 's3://bucket/train-{0000..0147}.tar' --where 'cls == 3' -f 'jpg cls' -o cats.tar
  penstock cat a.tar b.tar --rename '{shard}/{key}' --shuffle 1000 | penstock split -n 10000 -o mixed"""


def run(args: argparse.Namespace) -> int:
    """Copy the samples that are chosen."""
    from penstock.cli.tools import streams as flow

    chosen = flow.selection(args)
    with flow.outlet(args) as out:
        if chosen.copies_runs:
            parts = chosen.encode_runs(flow.stretches(args, args.parallel, mapped=args.compress is None))
        else:
            parts = chosen.encode(flow.stream(args, args.parallel))
        written = 0
        for some in parts:
            out.write_encoded(some)
            written += len(some.keys)
    if args.verbose:
        sys.stderr.write(f"{written:,} samples\n")
    return 0
