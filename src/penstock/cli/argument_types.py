"""Types of command-line arguments for argparse, options that several commands share, and usage errors."""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def count(text: str) -> int:
    """Parse a whole number, 0 or more; ``1e6`` and ``1_000`` are accepted too.

    Raises:
        ArgumentTypeError: The text is not such a number.
    """
    return whole_number(text, minimum=0)


def positive_count(text: str) -> int:
    """Parse a whole number, 1 or more, written as for :func:`count`.

    Raises:
        ArgumentTypeError: The text is not such a number.
    """
    return whole_number(text, minimum=1)


def port_number(text: str) -> int:
    """Parse the number of a port; 0 stands for any that is free.

    Raises:
        ArgumentTypeError: The text is not such a number.
    """
    if (number := whole_number(text, minimum=0)) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
    return number


def whole_number(text: str, minimum: int) -> int:
    """Parse a whole number of at least ``minimum``, written as for :func:`count`.

    Raises:
        ArgumentTypeError: The text is not such a number.
    """
    try:
        number = float(text.replace("_", ""))
        if number >= minimum and number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")


def size_argument(text: str) -> float:
    """Parse a size in bytes, such as ``1e9`` or ``500MB``; units are powers of 1000.

    Raises:
        ArgumentTypeError: The text is not a size above zero.
    """
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    try:
        size = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes: write it like 1e9 or 500MB")
    return size


def seconds(text: str) -> float:
    """Parse a finite number of seconds above zero.

    Raises:
        ArgumentTypeError: The text is not such a number.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above zero: write it like 10 or 0.5")
    return value


def add_engine(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the option ``--engine``, whose default is the local engine."""
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help=f"{help} (local)")


def usage_error(problem: str) -> NoReturn:
    """Print what is wrong with the arguments in one line and exit.

    Raises:
        SystemExit: Always, with 2, as argparse does.
    """
    sys.stderr.write(f"penstock: {problem}\n")
    raise SystemExit(2)
