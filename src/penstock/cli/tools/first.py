"""``penstock first`` (``tarfirst``): a field of the first sample that meets a condition."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.tools import take_inputs, words, wrong

_PICTURES = "img image ppm pgm pbm jpeg jpg png"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    take_inputs(parser)
    about = f"the field to write: the first of these that the sample has ('{_PICTURES}')"
    parser.add_argument("-f", "--field", type=words, default=words(_PICTURES), metavar="FIELDS", help=about)
    about = "the condition a sample must meet, such as 'cls == 3 and size(\"jpg\") > 10000'"
    parser.add_argument("-S", "--select", "--where", dest="where", metavar="EXPR", help=about)
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="where to: a path or URL (-)")
    parser.add_argument("-v", "--verbose", action="store_true", help=argparse.SUPPRESS)  # the name is told anyway
    parser.epilog = """examples:
  penstock first -f cls small.tar
  penstock first -S 'cls == 3' -f 'jpg;png' 's3://bucket/train-{0000..0147}.tar' > three.jpg"""


def run(args: argparse.Namespace) -> int:
    """Write the field, and tell which it is; 1 where no sample has it."""
    from penstock.cli.tools import streams as flow
    from penstock.errors import PlanError
    from penstock.plan.expression_text import TextExpression
    from penstock.storage import open_storage

    try:
        condition = TextExpression(args.where) if args.where else None
    except PlanError as exc:
        wrong(str(exc))
    for raw in flow.stream(args):
        field = next((name for name in args.field if name in raw.kind), None)
        if field is None or (condition is not None and not condition.of(raw)):
            continue
        data = raw.value(field) or b""
        if args.output == "-":
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            with open_storage(args.output).put(args.output, size_hint=len(data)) as upload:
                upload.write(data)
                upload.commit()
        sys.stderr.write(f"{_printable(raw.key)}.{field}\n")
        return 0
    sys.stderr.write("penstock: no sample meets that\n")
    return 1


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
