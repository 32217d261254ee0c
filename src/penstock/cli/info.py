"""``penstock info``: what shards hold."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

_MOST_CLASSES = 20  # lines of the text: the rest is in --json


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("urls", nargs="+", metavar="URL", help="folders, shards, globs or brace patterns")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    parser.add_argument("--workers", type=int, default=2, help="shards looked into at a time (2)")
    parser.epilog = "example:\n  penstock info photos-packed/"


def run(args: argparse.Namespace) -> int:
    """Look at every shard and sum up."""
    from penstock.formats.tar.source import SUFFIXES
    from penstock.packing.describing import classes_of, fields_of, index_of
    from penstock.storage import expand, spell

    urls = expand(spell(args.urls), SUFFIXES)
    with ThreadPoolExecutor(max(1, args.workers)) as pool:
        indexes = list(pool.map(index_of, urls))
    fields = fields_of(indexes)
    has_classes = any(field.name == "cls" for field in fields)
    found: dict[str, Any] = {
        "shards": len(urls),
        "samples": sum(index.samples for index in indexes),
        "bad": sum(len(index.bad) for index in indexes),
        "bytes": sum(index.shard_size for index in indexes),
        "fields": [asdict(field) for field in fields],
        "classes": classes_of(urls) if has_classes else {},
    }
    sys.stdout.write(json.dumps(found) + "\n" if args.json else "".join(f"{line}\n" for line in _lines(found)))
    return 0


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
