"""``penstock show`` (``tarshow``): show samples in a terminal."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING

from penstock.cli.argument_types import positive_count
from penstock.cli.tools.arguments import add_input_arguments, add_selection_arguments, field_names

if TYPE_CHECKING:
    from penstock.tarstream.raw import RawSample

_MAX_WIDTH = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    add_selection_arguments(parser)
    parser.add_argument("-f", "--field", "--fields", type=field_names, metavar="FIELDS", help="show only these fields")
    parser.add_argument(
        "--draw",
        choices=("auto", "blocks", "kitty", "iterm", "none"),
        default="auto",
        help="how images and audio are drawn; auto draws what the terminal can show, and nothing to a pipe (auto)",
    )
    parser.add_argument(
        "--width",
        type=positive_count,
        metavar="N",
        help=f"width of images, in columns (the width of the terminal, at most {_MAX_WIDTH})",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON line per sample: its key, its shard, and the sizes of its fields",
    )
    parser.epilog = """examples:
  penstock show -c 2 small.tar
  penstock show -f 'jpg txt' --where 'cls == 3' s3://bucket/train-0000.tar"""


def run(args: argparse.Namespace) -> int:
    from penstock.cli.tools import drawing, streams
    from penstock.codecs.audio import AUDIO_EXTENSIONS
    from penstock.codecs.images import IMAGE_EXTENSIONS

    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    protocol = args.draw if args.draw != "auto" else "none" if plain else drawing.image_protocol()
    columns = shutil.get_terminal_size().columns
    width = args.width or min(_MAX_WIDTH, columns - 2)

    def draw_field(name: str, data: bytes) -> str:
        extension = name.rpartition(".")[2]
        drawn = None
        if protocol != "none" and extension in IMAGE_EXTENSIONS:
            drawn = drawing.draw_image(data, protocol, width)
        elif protocol != "none" and extension in AUDIO_EXTENSIONS:
            drawn = drawing.draw_waveform(data, width)
        heading = f"  {drawing.escape(name):<12} {len(data):>12,} bytes"
        if drawn is not None:
            return f"{heading}\n{drawn.rstrip()}\n"
        return f"{heading}  {drawing.escape(_text_start(data, columns * 4), max(20, columns - 36))}".rstrip() + "\n"

    def draw_sample(raw: RawSample) -> str:
        fields = {name: data for name, data in raw.fields().items() if args.field is None or name in args.field}
        if args.json:
            sizes = {name: len(data) for name, data in fields.items()}
            return json.dumps({"key": raw.key, "shard": raw.shard, "fields": sizes}) + "\n"
        lines = "".join(draw_field(name, data) for name, data in fields.items())
        return f"{drawing.escape(raw.key)}\n{lines}\n"

    named = [(name,) for name in args.field or ()]
    for raw in streams.selection(args, named).samples(streams.read_samples(args, streams.shard_urls(args))):
        sys.stdout.write(draw_sample(raw))
    sys.stdout.flush()
    return 0


def _text_start(data: bytes, max_bytes: int) -> str:
    """Return the start of a text; empty if the data is not UTF-8 text."""
    start = data[:max_bytes]
    try:
        text = start.decode()
    except UnicodeDecodeError as exc:
        if exc.start < len(start) - 3 or len(start) == len(data):  # not a character that was cut in two
            return ""
        text = start[: exc.start].decode()
    return "" if "\0" in text else text
