"""``penstock show`` (``tarshow``): samples for people to look at."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys

from penstock.cli.tools import choose, positive, take_inputs, words

_MOST_WIDE = 64


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    take_inputs(parser)
    choose(parser)
    parser.add_argument("-f", "--field", "--fields", type=words, metavar="FIELDS", help="show these fields only")
    about = "how pictures are drawn: auto is not at all where the output is no terminal (auto)"
    parser.add_argument("--draw", choices=("auto", "blocks", "kitty", "iterm", "none"), default="auto", help=about)
    parser.add_argument(
        "--width", type=positive, metavar="N", help=f"columns of a picture (the terminal's, at most {_MOST_WIDE})"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON line for each sample: key, shard, and bytes of its fields"
    )
    parser.epilog = """examples:
  penstock show -c 2 small.tar
  penstock show -f 'jpg txt' --where 'cls == 3' s3://bucket/train-0000.tar"""


def run(args: argparse.Namespace) -> int:
    """Show them."""
    from penstock.cli.tools import drawing
    from penstock.cli.tools import streams as flow
    from penstock.tarstream.raw import RawSample

    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    how = args.draw if args.draw != "auto" else "none" if plain else drawing.protocol()
    columns = shutil.get_terminal_size().columns
    width = args.width or min(_MOST_WIDE, columns - 2)

    def told(name: str, data: bytes) -> str:
        kind = name.rpartition(".")[2]
        drawn = None
        if how != "none" and kind in drawing.PICTURES:
            drawn = drawing.picture(data, how, width)
        elif how != "none" and kind in drawing.SOUNDS:
            drawn = drawing.sound(data, width)
        head = f"  {name:<12} {len(data):>12,} bytes"
        if drawn is not None:
            return f"{head}\n{drawn.rstrip()}\n"
        return f"{head}  {drawing.safe(_start(data, columns * 4), max(20, columns - 36))}".rstrip() + "\n"

    def sample(raw: RawSample) -> str:
        fields = {name: data for name, data in raw.fields().items() if args.field is None or name in args.field}
        if args.json:
            sizes = {name: len(data) for name, data in fields.items()}
            return json.dumps({"key": raw.key, "shard": raw.shard, "fields": sizes}) + "\n"
        lines = "".join(told(name, data) for name, data in fields.items())
        return f"{drawing.safe(raw.key)}\n{lines}\n"

    for raw in flow.selection(args).samples(flow.stream(args)):
        sys.stdout.write(sample(raw))
    sys.stdout.flush()
    return 0


def _start(data: bytes, most: int) -> str:
    """The beginning of a text; nothing of what is none."""
    start = data[:most]
    try:
        text = start.decode()
    except UnicodeDecodeError as exc:
        if exc.start < len(start) - 3 or len(start) == len(data):
            return ""
        text = start[: exc.start].decode()
    return "" if "\0" in text else text
