"""``penstock sort`` (``tarsort``): samples in the order of their keys or of a field."""

from __future__ import annotations

import argparse

from penstock.cli.tools import choose, give_output, take_inputs


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    take_inputs(parser)
    give_output(parser)
    choose(parser)
    parser.add_argument(
        "-s", "-k", "--by", "--sortkey", default="key", metavar="FIELD", help="sort by this field (key)"
    )
    about = "how values compare (text); shuffle: by a hash of the key"
    parser.add_argument(
        "-S", "--type", "--sorttype", choices=("text", "int", "float", "shuffle"), default="text", help=about
    )
    parser.add_argument("-r", "--reverse", action="store_true", help="the largest first")
    parser.add_argument("--seed", type=int, default=0, help="decides the order of a shuffle (0)")
    temporary(parser)
    parser.epilog = """examples:
  penstock sort unsorted.tar -o sorted.tar
  penstock sort -s cls -S int 's3://bucket/train-*.tar' | penstock split -o by-class"""


def temporary(parser: argparse.ArgumentParser) -> None:
    """Declare where temporary files go."""
    about = "where what cannot be read twice is kept meanwhile (TMPDIR)"
    parser.add_argument("-t", "--tmp", metavar="FOLDER", help=about)


def run(args: argparse.Namespace) -> int:
    """Sort."""
    from penstock.cli.tools import streams as flow
    from penstock.tarstream.sort import SortOrder, sort_samples

    order = SortOrder(args.by, args.type, args.reverse, args.seed)
    chosen = flow.selection(args)
    with flow.outlet(args) as out:
        for parts in sort_samples(chosen.samples(flow.stream(args, mapped=True)), order, args.tmp):
            out.write_encoded(parts)
    return 0
