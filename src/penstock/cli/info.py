"""``penstock info``: what shards and tables hold."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.cli.tools import positive
from penstock.errors import PlanError

if TYPE_CHECKING:
    from penstock.dataset import Dataset

_MOST_CLASSES = 20  # lines of the text: the rest is in --json


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("urls", nargs="+", metavar="URL", help="folders, shards, tables, globs or brace patterns")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    parser.add_argument("--workers", type=positive, default=2, help="shards looked into at a time (2)")
    parser.epilog = "example:\n  penstock info photos-packed/"


def run(args: argparse.Namespace) -> int:
    """Look at every shard and sum up."""
    from penstock.dataset.conversion import described_as, open_files
    from penstock.storage import spell

    patterns = spell(args.urls)
    kinds = [described_as(pattern) for pattern in patterns]
    if len({*kinds}) > 1:
        raise PlanError(f"these are of several kinds ({', '.join(sorted({*kinds}))}); look at them one after the other")
    if kinds[0] == "tar":
        found, lines = _of_shards(patterns, args.workers), _lines
    else:
        found, lines = _of_tables([open_files(pattern, kinds[0]) for pattern in patterns], kinds[0]), _table_lines
    sys.stdout.write(json.dumps(found) + "\n" if args.json else "".join(f"{line}\n" for line in lines(found)))
    return 0


def _of_tables(tables: list[Dataset], kind: str) -> dict[str, Any]:
    from penstock.codecs.features import Value
    from penstock.engines import Program

    programs = [Program(table.plan) for table in tables]
    readers = [reader for program in programs for reader in program.readers]
    samples = sum(table.count() for table in tables)
    types = tables[0].schema() if samples else {}
    told = ((name, feature) for name, feature in programs[0].features().items() if name in types)
    known = {name: feature.dtype if isinstance(feature, Value) else repr(feature) for name, feature in told}
    return {
        "format": kind,
        "files": sum(len(reader.names) for reader in readers),
        "samples": samples,
        "bytes": sum(max(0, size) for reader in readers for size in reader.sizes()),
        "columns": types | known,
    }


def _table_lines(found: dict[str, Any]) -> Iterator[str]:
    files = f"{found['files']:,} {found['format']} file{'s' * (found['files'] != 1)}"
    yield f"{files}, {found['samples']:,} samples, {found['bytes']:,} bytes"
    if found["columns"]:
        yield ""
        yield f"{'column':<24}type"
    for name, kind in found["columns"].items():
        yield f"{name:<24}{kind}"


def _of_shards(patterns: tuple[str, ...], workers: int) -> dict[str, Any]:
    from penstock.formats.tar.source import SUFFIXES
    from penstock.inspection.info import classes_of, fields_of, index_of
    from penstock.storage import expand

    urls = expand(patterns, SUFFIXES)
    with ThreadPoolExecutor(workers) as pool:
        indexes = list(pool.map(index_of, urls))
    fields = fields_of(indexes)
    has_classes = any(field.name == "cls" for field in fields)
    return {
        "shards": len(urls),
        "samples": sum(index.samples for index in indexes),
        "bad": sum(len(index.bad) for index in indexes),
        "bytes": sum(index.shard_size for index in indexes),
        "fields": [asdict(field) for field in fields],
        "classes": classes_of(urls) if has_classes else {},
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    bad = f", {found['bad']:,} of them bad" if found["bad"] else ""
    yield f"{found['shards']:,} shards, {found['samples']:,} samples{bad}, {found['bytes']:,} bytes"
    if found["fields"]:
        yield ""
        yield f"{'field':<16}{'samples':>12}{'least':>14}{'median':>14}{'most':>14}{'bytes':>18}"
    for field in found["fields"]:
        numbers = "".join(f"{field[name]:>14,}" for name in ("least", "median", "most"))
        yield f"{field['name']:<16}{field['samples']:>12,}{numbers}{field['total']:>18,}"
    classes = found["classes"]
    if classes:
        yield ""
        yield f"{len(classes):,} classes, of {min(classes.values()):,} to {max(classes.values()):,} samples"
    for name, many in list(classes.items())[:_MOST_CLASSES]:
        yield f"  {name:<30}{many:>12,}"
    if len(classes) > _MOST_CLASSES:
        yield f"  and {len(classes) - _MOST_CLASSES:,} more"
