"""``penstock pack``: pack a folder, a list or shards into shards or Parquet files."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.cli import counted
from penstock.cli.argument_types import add_engine, count, positive_count, size_argument, usage_error

if TYPE_CHECKING:
    from penstock.packing import Packed
    from penstock.vision import Store

_TAR_COMPRESSIONS = ("bz2", "gz", "xz", "zst")
_PARQUET_COMPRESSIONS = ("brotli", "gzip", "lz4", "none", "snappy", "zstd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", help="a folder of class folders, a CSV or JSON-lines list, shards, or hf:PATH"
    )
    parser.add_argument("target", metavar="DST", help="the folder to write to: a path or URL")
    parser.add_argument("--format", choices=("tar", "parquet"), default="tar", help="format to write (tar)")
    parser.add_argument("--max-bytes", type=size_argument, help="maximum size of a shard (100MB; none with --shards)")
    parser.add_argument(
        "--max-samples", type=positive_count, help="maximum number of samples in a shard (100000; none with --shards)"
    )
    parser.add_argument(
        "--shards", type=positive_count, help="number of ranges, each one shard, that are written in parallel"
    )
    parser.add_argument("--workers", "-w", type=positive_count, help="number of workers that read and encode")
    add_engine(parser, "where samples are read, and with --shards written")
    parser.add_argument("--no-shuffle", action="store_true", help="keep the order of the source instead of shuffling")
    parser.add_argument("--seed", type=count, default=0, help="seed of the shuffle (0)")
    parser.add_argument(
        "--max-side", type=positive_count, help="scale images down to at most this many pixels on the longer side"
    )
    parser.add_argument("--quality", type=_percent, help="quality of JPEG and WebP images that are scaled down (90)")
    parser.add_argument(
        "--tiles", action="store_true", help="store JPEGs in tiles, without loss: crops of them decode faster"
    )
    parser.add_argument(
        "--compress",
        metavar="KIND",
        choices=sorted({*_TAR_COMPRESSIONS, *_PARQUET_COMPRESSIONS}),
        help=f"compress tar shards ({', '.join(_TAR_COMPRESSIONS)}), or columns of Parquet files that are not media "
        f"({', '.join(_PARQUET_COMPRESSIONS)}; default zstd)",
    )
    parser.add_argument("--skip-errors", action="store_true", help="skip samples that cannot be read")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    parser.add_argument(
        "--mode",
        choices=("new", "replace", "append"),
        default="new",
        help="continue an interrupted run, but refuse other shards (new), replace the existing shards, or add to them",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.epilog = """examples:
  penstock pack photos/ s3://bucket/photos --max-bytes 200MB
  penstock pack photos/ tables/ --format parquet
  penstock pack hf:mnist mnist-packed/"""


def run(args: argparse.Namespace) -> int:
    supported = _TAR_COMPRESSIONS if args.format == "tar" else (*_PARQUET_COMPRESSIONS, "gz", "zst")
    if args.compress not in (None, *supported):
        usage_error(
            f"--compress {args.compress} does not work with --format {args.format}: choose {', '.join(supported)}"
        )
    if args.quality is not None and args.max_side is None:
        usage_error("--quality needs --max-side: it applies to images that are scaled down")
    from penstock.packing import pack

    packed = pack(
        args.source,
        args.target,
        format=args.format,
        max_bytes=args.max_bytes,
        max_samples=args.max_samples,
        shards=args.shards,
        workers=args.workers,
        engine=args.engine,
        shuffle=not args.no_shuffle,
        seed=args.seed,
        mode=args.mode,
        compress=args.compress,
        images=_image_store(args.max_side, args.quality),
        tiles=args.tiles,
        on_error="skip" if args.skip_errors else None,
        dry_run=args.dry_run,
    )
    sys.stdout.write(f"{json.dumps(asdict(packed)) if args.json else _summary(packed, args.dry_run)}\n")
    return 0


def _percent(text: str) -> int:
    if (number := positive_count(text)) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100")
    return number


def _image_store(max_side: int | None, quality: int | None) -> Store | None:
    if max_side is None:
        return None
    from penstock.vision import Store

    return Store(max_side) if quality is None else Store(max_side, quality)


def _summary(packed: Packed, dry_run: bool) -> str:
    about = "about " if packed.estimated else ""
    skipped = f", {packed.skipped:,} skipped" if packed.skipped else ""
    noun = "file" if packed.shards and packed.shards[0].endswith(".parquet") else "shard"
    size = f"{about}{counted(len(packed.shards), noun)}, {about}{packed.nbytes:,} bytes"
    note = " (dry run: nothing was written)" if dry_run else ""
    return f"{packed.folder}: {counted(packed.samples, 'sample')} in {size}{skipped}{note}"
