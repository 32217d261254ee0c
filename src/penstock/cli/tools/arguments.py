"""Arguments that several tar tools share, and the argument types that only they use."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from penstock.blobs.compression import COMPRESSION_SUFFIXES
from penstock.cli.argument_types import count


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the shards that are read, and what happens to unreadable samples."""
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="SHARD",
        help="shards: paths, URLs, brace patterns, globs, folders; - is standard input (-)",
    )
    parser.add_argument("-T", "--filelist", metavar="FILE", help="read the names of shards from FILE, one per line")
    add_on_error_argument(parser)


def add_on_error_argument(parser: argparse.ArgumentParser) -> None:
    """Declare what happens to unreadable samples."""
    parser.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="stop at a sample that cannot be read, or skip it (raise)",
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the archive that is written."""
    parser.add_argument(
        "-o",
        "--output",
        default="-",
        metavar="SHARD",
        help="the shard to write: a path or URL; - is standard output (-)",
    )
    parser.add_argument(
        "-z", "--compress", choices=COMPRESSION_SUFFIXES, help="compression of the output (by its extension)"
    )


def add_selection_arguments(parser: argparse.ArgumentParser, *, count_flags: Sequence[str] = ("-c", "--count")) -> None:
    """Declare which samples are selected; ``count_flags`` are the names of the option that limits their number."""
    parser.add_argument(*count_flags, type=count, metavar="N", help="stop after N samples")
    parser.add_argument(
        "--where",
        metavar="EXPR",
        help="select samples that meet a condition, such as 'cls == 3 and \"dog\" in txt'",
    )


def add_temporary_folder_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the folder for temporary copies of inputs that can be read only once."""
    parser.add_argument(
        "-t", "--tmp", metavar="FOLDER", help="folder for temporary copies of pipes and compressed shards (TMPDIR)"
    )


def sample_slice(text: str) -> tuple[int, int | None, int]:
    """Parse a slice such as ``10:20``, ``:100`` or ``::10`` into start, stop and step.

    Raises:
        ArgumentTypeError: The text is not a slice.
    """
    match = re.fullmatch(r"(\d*):(\d*)(?::(\d*))?", text)
    if match is None or match[3] == "0":
        raise argparse.ArgumentTypeError(f"{text!r} is not a slice: write it like 10:20, :100 or ::10")
    return int(match[1] or 0), int(match[2]) if match[2] else None, int(match[3] or 1)


def field_names(text: str) -> list[str]:
    """Parse names of fields, separated by spaces, commas or semicolons, into lower case.

    Raises:
        ArgumentTypeError: The text names no field.
    """
    if names := [name.lower() for name in re.split(r"[\s,;]+", text) if name]:
        return names
    raise argparse.ArgumentTypeError(f"{text!r} names no field: write names like 'jpg cls'")
