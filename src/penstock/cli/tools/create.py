"""``penstock create`` (``tarcreate``): create a shard from a table of fields and files."""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from penstock.cli import counted
from penstock.cli.argument_types import usage_error
from penstock.cli.tools.arguments import add_old_letter, add_output_arguments, is_old_name

_RECORD_NUMBER = re.compile(r"\{record(:0?\d*d)?\}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "table", metavar="TABLE", nargs="?", default="-", help="a TSV or CSV file; - is standard input (-)"
    )
    parser.add_argument("target", metavar="SHARD", nargs="?", help="the same as -o SHARD")
    add_output_arguments(parser)
    parser.add_argument(
        "-f" if is_old_name(parser) else "-d",
        "--delim",
        metavar="CHAR",
        help="the character that separates cells (a comma for .csv, else a tab)",
    )
    parser.add_argument(
        "-k",
        "--key",
        default="{record:09d}",
        metavar="TEMPLATE",
        help="template of the keys if the table has no column __key__ ({record:09d})",
    )
    parser.add_argument(
        "-C",
        "--dir",
        default="",
        metavar="FOLDER",
        help="the folder of the files that the table names: a path or URL (the current folder)",
    )
    add_old_letter(parser, "-f", "--delim")
    parser.epilog = """The first line of the table names the fields. A column 'txt' holds the values of the field txt, a
column '@jpg' the names of files whose content becomes the field jpg, and a column '__key__' the keys.
Cells of a TSV table may hold \\t, \\n and \\\\.

examples:
  printf '__key__\\t@jpg\\tcls\\ncat1\\tphotos/cat1.jpg\\t3\\n' | penstock create -o cats.tar
  penstock create table.csv -C /data/photos -o s3://bucket/cats.tar"""


def run(args: argparse.Namespace) -> int:
    from penstock.cli.tools import streams
    from penstock.errors import DataError
    from penstock.formats.tar.archive import encode_sample

    if args.target is not None:
        if args.output != "-":
            usage_error(f"two outputs are named, {args.target} and -o {args.output}: name one")
        args.output = args.target
    if not _RECORD_NUMBER.search(args.key) or "{" in _RECORD_NUMBER.sub("", args.key):
        usage_error(f"{args.key!r} is not a template of keys: write the number of a row as in '{{record:09d}}'")
    lines = list(_read_table(args.table, args.delim))
    if not lines:
        raise DataError("the table is empty: its first line must name the fields", args.table)
    (_, columns), *rows = lines
    _check_columns(columns, args.table)
    for line, cells in rows:
        if len(cells) != len(columns):
            found = counted(len(cells), "cell")
            raise DataError(f"line {line} has {found}, but the first line has {len(columns)}", args.table)
    _check_files(rows, columns, args.dir, args.table)
    with streams.open_output(args, [args.table]) as out:
        for record, (line, cells) in enumerate(rows):
            key = _record_key(args.key, record)
            fields: dict[str, bytes] = {}
            for column, cell in zip(columns, cells, strict=True):
                if column == "__key__":
                    key = cell
                elif column.startswith("@"):
                    if cell:  # an empty cell: this sample does not have the field
                        fields[column[1:]] = _read_file(os.path.join(args.dir, cell), args.table, line)
                else:
                    fields[column] = cell.encode("utf-8", "surrogateescape")
            try:
                out.write_encoded(encode_sample(key, fields))
            except DataError as exc:
                raise DataError(f"line {line}: {exc.problem}", args.table, exc.key) from exc
    return 0


def _record_key(template: str, record: int) -> str:
    return _RECORD_NUMBER.sub(lambda match: format(record, (match[1] or ":09d")[1:]), template)


def _read_table(table: str, delimiter: str | None) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row."""
    from penstock.errors import DataError, StorageError
    from penstock.tarstream.table import unescape_tsv

    is_csv = delimiter == "," if delimiter is not None else table.lower().endswith(".csv")
    try:
        with ExitStack() as stack:
            file = sys.stdin if table == "-" else stack.enter_context(open(table, newline="", encoding="utf-8-sig"))
            if is_csv:
                reader = csv.reader(file, strict=True)
                yield from ((reader.line_num, row) for row in reader if row)
                return
            for number, line in enumerate(file, 1):
                if text := line.rstrip("\r\n"):
                    yield number, [unescape_tsv(cell) for cell in text.split(delimiter or "\t")]
    except csv.Error as exc:
        raise DataError(f"the table is not valid CSV: {exc}", table) from exc
    except UnicodeDecodeError as exc:
        raise DataError("the table is not UTF-8 text", table) from exc
    except OSError as exc:
        raise StorageError(f"cannot read the table: {exc.strerror or exc}", table) from exc


def _check_columns(columns: list[str], table: str) -> None:
    from penstock.errors import DataError

    names = [column.removeprefix("@") for column in columns]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise DataError(f"two columns are named {repeated!r}", table)
    if not [name for name in names if name and name != "__key__"]:
        raise DataError("the first line names no field", table)


def _check_files(rows: list[tuple[int, list[str]]], columns: list[str], folder: str, table: str) -> None:
    """Check that all local files exist before anything is written; remote ones are checked when they are read."""
    from penstock.errors import DataError
    from penstock.formats.tar.shard_names import on_disk
    from penstock.storage import local_path

    file_columns = [position for position, column in enumerate(columns) if column.startswith("@")]
    for line, cells in rows:
        for cell in (cells[position] for position in file_columns if cells[position]):
            path = os.path.join(folder, cell)
            if on_disk(path) and not os.path.isfile(local_path(path)):
                raise DataError(f"line {line}: there is no file {path!r}", table)


def _read_file(url: str, table: str, line: int) -> bytes:
    from penstock.errors import StorageError
    from penstock.storage import open_storage

    try:
        return b"".join(open_storage(url).stream(url))
    except StorageError as exc:
        raise StorageError(f"line {line} of {table}: {exc.problem}", exc.url) from exc
