"""Arguments that several tar tools share, and the argument types that only they use."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

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


def add_selection_arguments(
    parser: argparse.ArgumentParser, *, count_flags: Sequence[str] = ("-c", "--count"), **count_options: Any
) -> None:
    """Declare which samples are selected; ``count_flags`` are the names of the option that limits their number."""
    options = count_options or {"type": count}
    parser.add_argument(*count_flags, metavar="N", help="stop after N samples", **options)
    parser.add_argument(
        "--where",
        metavar="EXPR",
        help="select samples that meet a condition, such as 'cls == 3 and \"dog\" in txt'",
    )


def is_old_name(parser: argparse.ArgumentParser) -> bool:
    """Return whether the tool was called by its tarproc name, under which letters keep tarproc's meanings."""
    return not parser.prog.startswith("penstock ")


def add_old_letter(parser: argparse.ArgumentParser, letter: str, name: str) -> None:
    """Accept tarproc's letter for an option under the new name of the tool too, without showing it.

    In ``penstock``, a letter has one meaning for all commands: -c count, -s skip, -f fields, -w workers.
    """
    if not is_old_name(parser):
        option = parser._option_string_actions[name]
        hidden: dict[str, Any] = {"dest": option.dest, "type": option.type, "default": argparse.SUPPRESS}
        parser.add_argument(letter, help=argparse.SUPPRESS, **hidden)


class NumberOr(argparse.Action):
    """An option that takes a number; its letter also takes other text, as in tarproc, for another option."""

    def __init__(self, *args: Any, number: Callable[[str], int], other: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._number, self._other = number, other

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the number, or the text in the other option's place."""
        try:
            setattr(namespace, self.dest, self._number(values))
        except argparse.ArgumentTypeError as exc:
            if option is None or option.startswith("--"):
                raise argparse.ArgumentError(self, str(exc)) from exc
            setattr(namespace, self._other, values)


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
