"""``penstock convert``: convert files from one format to another."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from penstock.cli import counted
from penstock.cli.argument_types import add_engine, positive_count, size_argument
from penstock.cli.tools.arguments import field_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", help="a file, folder or pattern: tar, Parquet, CSV, JSON lines, LMDB, ..."
    )
    parser.add_argument("target", metavar="DST", help="a folder or file: a path or URL")
    parser.add_argument(
        "--format",
        choices=("tar", "parquet", "csv", "json", "tfrecords"),
        help="format to write (by the extension of DST, else Parquet for tar shards and tar for other files)",
    )
    parser.add_argument("--max-bytes", type=size_argument, help="maximum size of a file")
    parser.add_argument(
        "--shards", type=positive_count, help="number of ranges, each one file, that are written in parallel"
    )
    parser.add_argument("--workers", "-w", type=positive_count, help="number of workers that read")
    add_engine(parser, "where samples are read, and with --shards written")
    parser.add_argument(
        "--tiles", action="store_true", help="store JPEGs in tiles, without loss: crops of them decode faster"
    )
    parser.add_argument(
        "-x", "--drop", type=field_names, default=[], metavar="FIELDS", help="leave out these fields: 'jpg json'"
    )
    parser.add_argument(
        "--mode",
        choices=("new", "replace", "append"),
        default="new",
        help="continue an interrupted run, but refuse other files (new), replace the existing files, or add to them",
    )
    parser.add_argument(
        "--fields",
        choices=("tf.Example", "msgpack", "caffe", "pickle"),
        help="how the records of an LMDB environment are decoded (as they are, in a field named value)",
    )
    parser.add_argument("--trust-pickle", action="store_true", help="decode pickled records, which can run code")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.epilog = """examples:
  penstock convert shards/ tables/ --format parquet
  penstock convert shards/ labels.csv --drop 'jpg json'"""


def run(args: argparse.Namespace) -> int:
    from penstock.dataset.conversion import convert

    result = convert(
        args.source,
        args.target,
        format=args.format,
        max_bytes=args.max_bytes,
        shards=args.shards,
        workers=args.workers,
        engine=args.engine,
        tiles=args.tiles,
        drop=args.drop,
        mode=args.mode,
        progress=sys.stderr.isatty(),
        fields=args.fields,
        trust_pickle=args.trust_pickle,
    )
    samples, files = counted(result.samples, "sample"), counted(len(result.shards), "file")
    summary = f"{result.folder}: {samples} in {files}, {result.nbytes:,} bytes"
    sys.stdout.write(f"{json.dumps(asdict(result)) if args.json else summary}\n")
    return 0
