"""``penstock tsv`` (``tar2tsv``): fields as a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.cli.tools import choose, take_inputs, wrong

if TYPE_CHECKING:
    from penstock.tarstream.table import WriteBytes

_FORMATS = ("tsv", "csv", "jsonl", "parquet")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    take_inputs(parser)
    choose(parser)
    about = "columns: 'jpg;png cls' are two, the first from jpg or else png (the texts of the first sample)"
    parser.add_argument("-f", "--fields", metavar="FIELDS", help=about)
    parser.add_argument("-F", "--format", choices=_FORMATS, help="what to write (as the output's name says, else tsv)")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="a path or URL; - is standard output (-)")
    parser.add_argument("--nokey", "--no-key", action="store_true", help="leave out the column __key__")
    parser.add_argument("--noheader", "--no-header", action="store_true", help="leave out the line of names")
    parser.add_argument("--json", action="store_true", help="the same as --format jsonl")
    parser.epilog = """In TSV a tab, a newline and a backslash are written \\t, \\n and \\\\; CSV is quoted as usual.
In JSON lines what is no text is {"base64": ...}.

examples:
  penstock tsv -f cls small.tar
  penstock tsv -f 'cls json' -o labels.parquet 'train-{0000..0147}.tar'"""


def run(args: argparse.Namespace) -> int:
    """Write the table; one that has a name appears when it is whole."""
    from penstock.cli.tools import streams as flow
    from penstock.tarstream import table as tabulating

    format = "jsonl" if args.json else args.format or _by_name(args.output)
    chosen = tabulating.parse_columns(args.fields) if args.fields else ()
    if args.fields and not chosen:
        wrong("no field is named")
    if format == "parquet":
        flow.no_terminal(args.output)
    table: tabulating.SampleTable | None = None
    with _written(args.output) as write:
        for raw in flow.selection(args).samples(flow.stream(args)):
            if table is None:
                chosen = chosen or tabulating.text_columns(raw)
                table = tabulating.open_table(format, chosen, write, key=not args.nokey, header=not args.noheader)
            table.add(raw)
        if table is None:
            table = tabulating.open_table(format, chosen, write, key=not args.nokey, header=not args.noheader)
        table.close()
    return 0


def _by_name(output: str) -> str:
    ending = output.rpartition(".")[2].lower()
    return {"json": "jsonl", "ndjson": "jsonl", "pq": "parquet"}.get(ending, ending if ending in _FORMATS else "tsv")


@contextmanager
def _written(output: str) -> Iterator[WriteBytes]:
    from penstock.storage import open_storage

    if output == "-":
        yield sys.stdout.buffer.write
        sys.stdout.buffer.flush()
        return
    with open_storage(output).put(output) as upload:
        waiting = bytearray()

        def write(data: bytes) -> None:
            waiting.extend(data)
            if len(waiting) >= 1 << 20:
                upload.write(waiting)
                waiting.clear()

        yield write
        upload.write(waiting)
        upload.commit()
