"""``penstock info``: print a summary of shards or tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.cli import counted
from penstock.cli.argument_types import positive_count
from penstock.errors import PlanError, printable

if TYPE_CHECKING:
    from penstock.dataset import Dataset

_MAX_CLASSES = 20  # lines of text; --json has all of them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="folders, shards, tables, globs or brace patterns")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--workers", "-w", type=positive_count, default=2, help="shards read at a time (2)")
    parser.epilog = """examples:
  penstock info photos-packed/
  penstock info 's3://bucket/train-*.tar' --json"""


def run(args: argparse.Namespace) -> int:
    from penstock.dataset.conversion import format_to_inspect, open_files
    from penstock.storage import url_patterns

    patterns = url_patterns(args.urls)
    formats = [format_to_inspect(pattern) for pattern in patterns]
    if len({*formats}) > 1:
        raise PlanError(
            f"these files have several formats ({', '.join(sorted({*formats}))}); name files of one format at a time"
        )
    if formats[0] == "tar":
        summary, lines = _summarise_shards(patterns, args.workers), _shard_lines
    else:
        tables = [open_files(pattern, formats[0]) for pattern in patterns]
        summary, lines = _summarise_tables(tables, formats[0]), _table_lines
    sys.stdout.write(
        json.dumps(summary) + "\n" if args.json else "".join(f"{printable(line)}\n" for line in lines(summary))
    )
    return 0


def _summarise_tables(tables: list[Dataset], format: str) -> dict[str, Any]:
    from penstock.codecs.features import Value
    from penstock.engines import Program

    programs = [Program(table.plan) for table in tables]
    readers = [reader for program in programs for reader in program.readers]
    samples = sum(table.count() for table in tables)
    types = tables[0].schema() if samples else {}
    features = ((name, feature) for name, feature in programs[0].features().items() if name in types)
    typed = {name: feature.dtype if isinstance(feature, Value) else repr(feature) for name, feature in features}
    return {
        "format": format,
        "files": sum(len(reader.names) for reader in readers),
        "samples": samples,
        "bytes": sum(max(0, size) for reader in readers for size in reader.sizes()),
        "columns": types | typed,
    }


def _table_lines(summary: dict[str, Any]) -> Iterator[str]:
    files = counted(summary["files"], f"{summary['format']} file")
    yield f"{files}, {counted(summary['samples'], 'sample')}, {summary['bytes']:,} bytes"
    if summary["columns"]:
        yield ""
        yield f"{'column':<24}type"
    for name, column_type in summary["columns"].items():
        yield f"{name:<24}{column_type}"


def _summarise_shards(patterns: tuple[str, ...], workers: int) -> dict[str, Any]:
    from penstock.formats.tar.shard_names import expand_shards
    from penstock.inspection.info import count_classes, load_shard_index, measure_fields

    urls = expand_shards(patterns)
    with ThreadPoolExecutor(workers) as pool:
        indexes = list(pool.map(load_shard_index, urls))
    fields = measure_fields(indexes)
    has_classes = any(field.name == "cls" for field in fields)
    return {
        "shards": len(urls),
        "samples": sum(index.samples for index in indexes),
        "bad": sum(len(index.bad) for index in indexes),
        "bytes": sum(index.shard_size for index in indexes),
        "fields": [asdict(field) for field in fields],
        "classes": count_classes(urls) if has_classes else {},
    }


def _shard_lines(summary: dict[str, Any]) -> Iterator[str]:
    shards, samples = counted(summary["shards"], "shard"), counted(summary["samples"], "sample")
    bad = f" ({summary['bad']:,} of them unreadable)" if summary["bad"] else ""
    yield f"{shards}, {samples}{bad}, {summary['bytes']:,} bytes"
    if summary["fields"]:
        yield ""
        yield f"{'field':<16}{'samples':>12}{'min bytes':>14}{'median':>14}{'max':>14}{'total':>18}"
    for field in summary["fields"]:
        sizes = "".join(f"{field[name]:>14,}" for name in ("least", "median", "most"))
        yield f"{field['name']:<16}{field['samples']:>12,}{sizes}{field['total']:>18,}"
    classes = summary["classes"]
    if classes:
        yield ""
        least, most = min(classes.values()), max(classes.values())
        sizes = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        yield f"{counted(len(classes), 'class', 'classes')}, {sizes} samples each"
    for name, class_samples in list(classes.items())[:_MAX_CLASSES]:
        yield f"  {name:<30}{class_samples:>12,}"
    if len(classes) > _MAX_CLASSES:
        yield f"  and {len(classes) - _MAX_CLASSES:,} more"
