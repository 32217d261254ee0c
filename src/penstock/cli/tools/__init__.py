"""The tools: tar shards as streams, for pipes and shells. Here are the arguments that they share.

A tool imports what it works with when it runs, so that its help is there at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

TOOLS = {
    "cat": "concatenate shards: some samples of them, some fields, other keys, shuffled",
    "create": "make a shard from a table that says what goes into it",
    "first": "write a field of the first sample that meets a condition",
    "mix": "mix the samples of several sources at random, by weights",
    "proc": "run a command on every sample, many at a time, over one shard or thousands",
    "show": "show samples: texts, pictures drawn in the terminal, sounds as waves",
    "shuffle": "shuffle all samples, however many",
    "sort": "sort samples by key or field, however many",
    "split": "split a stream into shards, with an index and a manifest",
    "tsv": "tabulate fields as TSV, CSV, JSON lines or Parquet",
}
OLD_NAMES = {
    "tar2tsv": "tsv",
    "tarcat": "cat",
    "tarcreate": "create",
    "tarfirst": "first",
    "tarmix": "mix",
    "tarpcat": "cat",
    "tarproc": "proc",
    "tarscat": "cat",
    "tarshow": "show",
    "tarsort": "sort",
    "tarsplit": "split",
}
COMPRESSIONS = ("gz", "zst", "bz2", "xz")
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def take_inputs(parser: argparse.ArgumentParser) -> None:
    """Declare where samples come from."""
    about = "shards: paths, URLs, braces, globs, folders; - or nothing is standard input"
    parser.add_argument("inputs", nargs="*", metavar="SHARD", help=about)
    parser.add_argument("-T", "--filelist", metavar="FILE", help="read the names of shards from a file, one a line")
    about = "what to do about samples that cannot be read: stop, or leave them out (raise)"
    parser.add_argument("--on-error", choices=("raise", "skip"), default="raise", help=about)


def give_output(parser: argparse.ArgumentParser) -> None:
    """Declare where samples go."""
    parser.add_argument("-o", "--output", default="-", metavar="SHARD", help="a path or URL; - is standard output (-)")
    parser.add_argument("-z", "--compress", choices=COMPRESSIONS, help="compress (as the output's name says)")


def choose(parser: argparse.ArgumentParser, *, count: bool = True) -> None:
    """Declare which samples are taken."""
    if count:
        parser.add_argument("-c", "--count", type=whole, metavar="N", help="stop after N samples")
    about = "only samples that meet a condition, such as 'cls == 3 and \"dog\" in txt'"
    parser.add_argument("--where", metavar="EXPR", help=about)


def whole(text: str) -> int:
    """Read a count; 1e6 is one too.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        number = float(text.replace("_", ""))
        if number >= 0 and number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no count: write a whole number from 0 on")


def positive(text: str) -> int:
    """Read a count above zero.

    Raises:
        ArgumentTypeError: It is none.
    """
    if (number := whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above zero")
    return number


def amount(text: str) -> float:
    """Read a number of bytes: 1e9, 500MB.

    Raises:
        ArgumentTypeError: It is none.
    """
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    try:
        size = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes: write it like 1e9 or 500MB")
    return size


def seconds(text: str) -> float:
    """Read a time above zero.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above zero")
    return value


def stretch(text: str) -> tuple[int, int | None, int]:
    """Read a slice: ``10:20``, ``:100``, ``::10``.

    Raises:
        ArgumentTypeError: It is none.
    """
    match = re.fullmatch(r"(\d*):(\d*)(?::(\d*))?", text)
    if match is None or match[3] == "0":
        raise argparse.ArgumentTypeError(f"{text!r} is no slice: write it like 10:20, :100 or ::10")
    return int(match[1] or 0), int(match[2]) if match[2] else None, int(match[3] or 1)


def words(text: str) -> list[str]:
    """Read names of fields, apart by spaces, commas or semicolons.

    Raises:
        ArgumentTypeError: There are none.
    """
    if found := [word.lower() for word in re.split(r"[\s,;]+", text) if word]:
        return found
    raise argparse.ArgumentTypeError("no field is named")


def wrong(problem: str) -> NoReturn:
    """End as a wrong call does: one line, and 2.

    Raises:
        SystemExit: Always.
    """
    sys.stderr.write(f"penstock: {problem}\n")
    raise SystemExit(2)
