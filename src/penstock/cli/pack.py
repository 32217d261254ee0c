"""``penstock pack``: a folder, a list or shards into shards or Parquet files."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.cli.tools import amount, positive, whole, wrong

if TYPE_CHECKING:
    from penstock.packing import Packed
    from penstock.vision import Store

FORMATS = ("tar", "parquet")
_OF_TAR = ("bz2", "gz", "xz", "zst")
_OF_PARQUET = ("brotli", "gzip", "lz4", "none", "snappy", "zstd")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "source", metavar="SRC", help="a folder of class folders, a CSV or JSON-lines list, shards, or hf:PATH"
    )
    parser.add_argument("target", metavar="DST", help="the folder to write to: a path or URL")
    parser.add_argument("--format", choices=FORMATS, default="tar", help="what to write (tar)")
    parser.add_argument("--max-bytes", type=amount, default="100MB", help="the most bytes of a shard (100MB)")
    parser.add_argument("--max-samples", type=positive, default=100_000, help="the most samples of a shard (100000)")
    parser.add_argument("--workers", type=positive, help="how many read at a time")
    parser.add_argument("--no-shuffle", action="store_true", help="keep the order of the source")
    parser.add_argument("--seed", type=whole, default=0, help="decides the order (0)")
    parser.add_argument("--max-side", type=positive, help="scale images down to so many pixels on their longer side")
    parser.add_argument("--quality", type=_percent, help="the quality of images that are scaled down (90)")
    about = f"compress shards ({', '.join(_OF_TAR)}), or what is no media in Parquet ({', '.join(_OF_PARQUET)}; zstd)"
    parser.add_argument("--compress", metavar="KIND", choices=sorted({*_OF_TAR, *_OF_PARQUET}), help=about)
    parser.add_argument("--skip-errors", action="store_true", help="leave out samples that cannot be read")
    parser.add_argument("--dry-run", action="store_true", help="write nothing, tell what would be written")
    parser.add_argument("--append", action="store_true", help="add to the shards that are there")
    parser.add_argument("--no-resume", action="store_true", help="start over, replacing what is there")
    parser.add_argument("--json", action="store_true", help="tell what was written as JSON")
    parser.epilog = """examples:
  penstock pack photos/ s3://bucket/photos --max-bytes 200MB
  penstock pack photos/ tables/ --format parquet
  penstock pack hf:mnist mnist-packed/"""


def run(args: argparse.Namespace) -> int:
    """Pack, and say what came of it."""
    known = _OF_TAR if args.format == "tar" else (*_OF_PARQUET, "gz", "zst")
    if args.compress not in (None, *known):
        wrong(f"--compress {args.compress} is not for --format {args.format}; choose one of {', '.join(known)}")
    if args.quality is not None and args.max_side is None:
        wrong("--quality is for images that --max-side scales down; give both")
    from penstock.packing import pack  # here, as in all commands: help must be quick

    packed = pack(
        args.source,
        args.target,
        format=args.format,
        max_bytes=args.max_bytes,
        max_samples=args.max_samples,
        workers=args.workers,
        shuffle=not args.no_shuffle,
        seed=args.seed,
        resume=not args.no_resume,
        compress=args.compress,
        images=_images(args.max_side, args.quality),
        on_error="skip" if args.skip_errors else None,
        dry_run=args.dry_run,
        append=args.append,
    )
    sys.stdout.write(f"{json.dumps(asdict(packed)) if args.json else _told(packed, args.dry_run)}\n")
    return 0


def _percent(text: str) -> int:
    if (number := positive(text)) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not within 1 to 100")
    return number


def _images(max_side: int | None, quality: int | None) -> Store | None:
    if max_side is None:
        return None
    from penstock.vision import Store

    return Store(max_side) if quality is None else Store(max_side, quality)


def _told(packed: Packed, dry: bool) -> str:
    about = "about " if packed.estimated else ""
    skipped = f", {packed.skipped:,} left out" if packed.skipped else ""
    kind = "files" if packed.shards and packed.shards[0].endswith(".parquet") else "shards"
    size = f"{about}{len(packed.shards):,} {kind} of {about}{packed.nbytes:,} bytes"
    return f"{packed.folder}: {packed.samples:,} samples in {size}{skipped}{' (not written)' if dry else ''}"
