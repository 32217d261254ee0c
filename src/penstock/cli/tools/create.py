"""``penstock create`` (``tarcreate``): a shard from a table that says what goes into it."""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from penstock.cli.tools import give_output

_KEY = re.compile(r"\{record(:0?\d*d)?\}")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "plan", metavar="PLAN", nargs="?", default="-", help="a TSV or CSV file; - is standard input (-)"
    )
    parser.add_argument("target", metavar="SHARD", nargs="?", help="the same as -o SHARD")
    give_output(parser)
    parser.add_argument("-f", "--delim", metavar="CHAR", help="what stands between cells (a comma in .csv, else a tab)")
    parser.add_argument(
        "-k",
        "--key",
        default="{record:09d}",
        metavar="TEMPLATE",
        help="keys where no column __key__ says ({record:09d})",
    )
    parser.add_argument(
        "-C", "--dir", default="", metavar="FOLDER", help="where the files of the plan are: a folder or URL"
    )
    parser.epilog = """The first line of the plan names the fields. A column 'txt' holds the field itself; a
column '@jpg' the names of files whose content becomes the field 'jpg'; a column '__key__' the keys.
Cells of TSV may hold \\t, \\n and \\\\.

examples:
  printf '__key__\\t@jpg\\tcls\\ncat1\\tphotos/cat1.jpg\\t3\\n' | penstock create -o cats.tar
  penstock create plan.csv -C /data/photos -o s3://bucket/cats.tar"""


def run(args: argparse.Namespace) -> int:
    """Write the shard; nothing of it where a file is missing."""
    from penstock.cli.tools import streams as flow
    from penstock.cli.tools import wrong
    from penstock.errors import DataError
    from penstock.formats.tar.archive import encode_sample

    if args.target is not None:
        args.output = args.target
    if not _KEY.search(args.key) or "{" in _KEY.sub("", args.key):
        wrong(f"{args.key!r} is no template for keys: write it like '{{record:09d}}'")
    rows = list(_rows(args.plan, args.delim))
    if not rows:
        raise DataError("the plan is empty: its first line names the fields", args.plan)
    _, names = rows[0]
    _check_names(names, args.plan)
    for number, cells in rows[1:]:
        if len(cells) != len(names):
            raise DataError(f"line {number} has {len(cells)} cells, the first line {len(names)}", args.plan)
    _check_files(rows[1:], names, args.dir, args.plan)
    with flow.outlet(args) as out:
        for record, (number, cells) in enumerate(rows[1:]):
            key = _KEY.sub(lambda match, record=record: format(record, (match[1] or ":09d")[1:]), args.key)  # type: ignore[misc]
            fields: dict[str, bytes] = {}
            for name, cell in zip(names, cells, strict=True):
                if name == "__key__":
                    key = cell
                elif name.startswith("@"):
                    if cell:  # an empty cell: this sample has no such field
                        fields[name[1:]] = _content(os.path.join(args.dir, cell), args.plan, number)
                else:
                    fields[name] = cell.encode("utf-8", "surrogateescape")
            try:
                out.write_encoded(encode_sample(key, fields))
            except DataError as exc:
                raise DataError(f"line {number}: {exc.problem}", args.plan, exc.key) from exc
    return 0


def _rows(plan: str, delim: str | None) -> Iterator[tuple[int, list[str]]]:
    """Read the cells of a plan, each row with the number of its line."""
    from penstock.errors import DataError, StorageError
    from penstock.tarstream.table import unescape_tsv

    comma = delim == "," if delim is not None else plan.lower().endswith(".csv")
    try:
        with ExitStack() as stack:
            file = sys.stdin if plan == "-" else stack.enter_context(open(plan, newline="", encoding="utf-8-sig"))
            if comma:
                reader = csv.reader(file, strict=True)
                yield from ((reader.line_num, row) for row in reader if row)
                return
            for number, line in enumerate(file, 1):
                if text := line.rstrip("\r\n"):
                    yield number, [unescape_tsv(cell) for cell in text.split(delim or "\t")]
    except csv.Error as exc:
        raise DataError(f"the plan is no CSV: {exc}", plan) from exc
    except UnicodeDecodeError as exc:
        raise DataError("the plan is no UTF-8", plan) from exc
    except OSError as exc:
        raise StorageError(f"the plan cannot be read: {exc.strerror or exc}", plan) from exc


def _check_names(names: list[str], plan: str) -> None:
    from penstock.errors import DataError

    bare = [name.removeprefix("@") for name in names]
    twice = next((name for name in bare if bare.count(name) > 1), None)
    if twice is not None or not [name for name in bare if name and name != "__key__"]:
        problem = f"two columns are {twice!r}" if twice is not None else "the first line names no field"
        raise DataError(problem, plan)


def _check_files(rows: list[tuple[int, list[str]]], names: list[str], folder: str, plan: str) -> None:
    """See that all files are there before anything is written; those elsewhere are found out when they are read."""
    from penstock.errors import DataError
    from penstock.formats.tar.shard_names import on_disk
    from penstock.storage import local_path

    places = [place for place, name in enumerate(names) if name.startswith("@")]
    for number, cells in rows:
        for cell in (cells[place] for place in places if cells[place]):
            path = os.path.join(folder, cell)
            if on_disk(path) and not os.path.isfile(local_path(path)):
                raise DataError(f"line {number}: there is no file {path!r}", plan)


def _content(url: str, plan: str, number: int) -> bytes:
    from penstock.errors import StorageError
    from penstock.storage import open_storage

    try:
        return b"".join(open_storage(url).stream(url))
    except StorageError as exc:
        raise StorageError(f"line {number} of {plan}: {exc.problem}", exc.url) from exc
