"""``penstock index``: build the index of shards that other tools wrote, store it beside them, update the manifest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.cli import counted
from penstock.cli.argument_types import positive_count
from penstock.errors import printable

_NOT_STORED = "no sample has the field, or one has a value longer than 64 bytes"
_LOCAL, _REMOTE = 2, 16  # shards at a time: local ones are limited by the processor, remote ones by the network


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="shards, folders, globs or brace patterns")
    parser.add_argument(
        "--values",
        metavar="FIELDS",
        default="",
        help="also store the values of these fields, such as cls or cls,json, if none is longer than 64 bytes:"
        " `penstock view` then finds the samples of a label at once",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line per shard")
    parser.add_argument(
        "--manifest",
        metavar="URL",
        help="write a manifest here, and the indexes beside it, instead of beside the shards; for read_tar(manifest=)",
    )
    parser.add_argument(
        "--workers", "-w", type=positive_count, help=f"shards indexed at a time (local: {_LOCAL}, remote: {_REMOTE})"
    )
    parser.epilog = (
        "examples:\n  penstock index 'train-{0000..0147}.tar'\n"
        "  penstock index --values cls s3://bucket/train/\n"
        "  penstock index s3://theirs/train --manifest ours/train.json"
    )


def run(args: argparse.Namespace) -> int:
    from penstock.formats.manifest import write_manifest_file
    from penstock.formats.tar.shard_names import expand_shards
    from penstock.storage import redacted, relative_names, url_patterns

    urls = expand_shards(url_patterns(args.urls))
    values = tuple(filter(None, args.values.split(",")))
    names = relative_names(urls)
    damaged = 0
    entries: dict[str, list[Any]] = {}
    apart: list[Any] = []
    for url, name, (index, entry) in zip(urls, names, _indexed(urls, names, values, args), strict=True):
        damaged += bool(index.bad)
        apart.append(entry._replace(name=name))
        if not index.bad:  # a manifest says what a damaged shard held
            entries.setdefault(url.rpartition("/")[0] or ".", []).append(entry)
        shown = redacted(url)
        summary = {"shard": shown, "samples": index.samples, "bad": len(index.bad), "skipped": index.skipped}
        bad = f", {len(index.bad):,} of them unreadable" if index.bad else ""
        line = f"{shown}: {counted(index.samples, 'sample')}{bad}"
        sys.stdout.write(f"{json.dumps(summary) if args.json else printable(line)}\n")
        if left_out := [field for field in values if field not in index.values]:
            sys.stderr.write(f"penstock: {printable(shown)}: no values of {', '.join(left_out)}: {_NOT_STORED}\n")
    if args.manifest is None:
        _update_manifests(entries)
    else:
        write_manifest_file(args.manifest, apart)
    return 1 if damaged else 0


def _indexed(
    urls: list[str], names: list[str], values: tuple[str, ...], args: argparse.Namespace
) -> Iterator[tuple[Any, Any]]:
    """Index shards, several at a time, store the indexes, and show the progress; yield each index and entry."""
    from penstock.blobs.prefetch import Fetcher
    from penstock.engines.progress import Progress
    from penstock.formats.tar.indexing import index_shard, store_index, store_index_apart
    from penstock.formats.tar.shard_names import on_disk

    fetcher = Fetcher(connections=_REMOTE)

    def index_and_store(url: str, name: str) -> tuple[Any, Any]:
        index, entry = index_shard(url, None, fetcher, values=values)
        if args.manifest is None:
            store_index(url, index)
        else:
            store_index_apart(args.manifest, name, index)
        return index, entry

    workers = args.workers or (_LOCAL if all(map(on_disk, urls)) else _REMOTE)
    try:
        with Progress("indexing", len(urls), "shards") as bar, ThreadPoolExecutor(workers) as pool:
            for result in pool.map(index_and_store, urls, names):
                yield result
                bar.add()
    finally:
        fetcher.stop()


def _update_manifests(entries: dict[str, list[Any]]) -> None:
    from penstock.formats.manifest import MANIFEST
    from penstock.formats.tar.indexing import update_manifest
    from penstock.storage import redacted

    for folder, found in entries.items():
        if changed := update_manifest(folder, found):
            sys.stderr.write(
                f"penstock: {redacted(folder)}/{MANIFEST}: {counted(changed, 'entry', 'entries')} updated\n"
            )
