"""``penstock tsv`` (``tar2tsv``): write fields as a table: TSV, CSV, JSON lines or Parquet."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.cli.argument_types import usage_error
from penstock.cli.tools.arguments import add_input_arguments, add_selection_arguments

if TYPE_CHECKING:
    from penstock.tarstream.table import WriteBytes

_FORMATS = ("tsv", "csv", "jsonl", "parquet")
_BUFFER_BYTES = 1 << 20  # written to a storage at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    add_selection_arguments(parser)
    parser.add_argument(
        "-f",
        "--fields",
        metavar="FIELDS",
        help="columns: 'jpg;png cls' gives two, the first from jpg or else png (the text fields of the first sample)",
    )
    parser.add_argument(
        "-F", "--format", choices=_FORMATS, help="format to write (by the extension of the output, else tsv)"
    )
    parser.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="the file to write: a path or URL; - is standard output (-)"
    )
    parser.add_argument("--nokey", "--no-key", action="store_true", help="leave out the column __key__")
    parser.add_argument("--noheader", "--no-header", action="store_true", help="leave out the line of column names")
    parser.add_argument("--json", action="store_true", help="the same as --format jsonl")
    parser.epilog = """In TSV, a tab, a newline and a backslash are \\t, \\n and \\\\; CSV is quoted as usual.
In JSON lines, a value that is not text is {"base64": ...}.

examples:
  penstock tsv -f cls small.tar
  penstock tsv -f 'cls json' -o labels.parquet 'train-{0000..0147}.tar'"""


def run(args: argparse.Namespace) -> int:
    from penstock.cli.tools import streams
    from penstock.tarstream import table as tables

    format = "jsonl" if args.json else args.format or _format_of(args.output)
    columns = tables.parse_columns(args.fields) if args.fields else ()
    if args.fields and not columns:
        usage_error(f"{args.fields!r} names no field: write names like 'jpg;png cls'")
    if format == "parquet":
        streams.refuse_terminal(args.output)
    urls = streams.shard_urls(args)
    streams.refuse_inputs([args.output], urls)
    table: tables.SampleTable | None = None
    with _open_file(args.output) as write:
        named = [column.fields for column in columns]
        for raw in streams.selection(args, named).samples(streams.read_samples(args, urls)):
            if table is None:
                columns = columns or tables.text_columns(raw)
                table = tables.open_table(format, columns, write, key=not args.nokey, header=not args.noheader)
            table.add(raw)
        if table is None:
            table = tables.open_table(format, columns, write, key=not args.nokey, header=not args.noheader)
        table.close()
    return 0


def _format_of(output: str) -> str:
    extension = output.rpartition(".")[2].lower()
    aliases = {"json": "jsonl", "ndjson": "jsonl", "pq": "parquet"}
    return aliases.get(extension, extension if extension in _FORMATS else "tsv")


@contextmanager
def _open_file(output: str) -> Iterator[WriteBytes]:
    """Provide a function that writes bytes; a named file appears only if the ``with`` block succeeds."""
    from penstock.storage import open_storage

    if output == "-":
        yield sys.stdout.buffer.write
        sys.stdout.buffer.flush()
        return
    with open_storage(output).put(output) as upload:
        buffer = bytearray()

        def write(data: bytes) -> None:
            buffer.extend(data)
            if len(buffer) >= _BUFFER_BYTES:
                upload.write(buffer)
                buffer.clear()

        yield write
        upload.write(buffer)
        upload.commit()
