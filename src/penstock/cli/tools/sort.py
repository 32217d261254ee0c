"""``penstock sort`` (``tarsort``): sort samples by key or by a field."""

from __future__ import annotations

import argparse

from penstock.cli.tools.arguments import (
    add_input_arguments,
    add_old_letter,
    add_output_arguments,
    add_selection_arguments,
    add_temporary_folder_argument,
    is_old_name,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    add_output_arguments(parser)
    add_selection_arguments(parser)
    parser.add_argument(
        *["-s"] if is_old_name(parser) else [],
        "-k",
        "--by",
        "--sortkey",
        default="key",
        metavar="FIELD",
        help="sort by this field, or by the key (key)",
    )
    parser.add_argument(
        "-S",
        "--type",
        "--sorttype",
        choices=("text", "int", "float", "shuffle"),
        default="text",
        help="how values are compared; shuffle: by a hash of the key (text)",
    )
    parser.add_argument("-r", "--reverse", action="store_true", help="sort in descending order")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle (0)")
    add_temporary_folder_argument(parser)
    add_old_letter(parser, "-s", "--by")
    parser.epilog = """examples:
  penstock sort unsorted.tar -o sorted.tar
  penstock sort -k cls -S int 's3://bucket/train-*.tar' | penstock split -o by-class"""


def run(args: argparse.Namespace) -> int:
    from penstock.cli.tools import streams
    from penstock.tarstream.gather import gather_parts
    from penstock.tarstream.sort import SortOrder, sort_samples

    order = SortOrder(args.by, args.type, args.reverse, args.seed)
    selection = streams.selection(args)
    select = None if selection.copies_runs and selection.stop is None else selection.samples
    on_error = streams.bad_sample_callback(args)
    urls = streams.shard_urls(args)
    parts = gather_parts(urls, on_error=on_error)
    with streams.open_output(args, urls) as out:
        for samples in sort_samples(parts, order, args.tmp, select=select, on_error=on_error):
            out.write_encoded(samples)
    return 0
