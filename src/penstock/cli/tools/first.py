"""``penstock first`` (``tarfirst``): write one field of the first sample that meets a condition."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.argument_types import usage_error
from penstock.cli.tools.arguments import add_input_arguments, field_names

_DEFAULT_FIELDS = "img image ppm pgm pbm jpeg jpg png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    parser.add_argument(
        "-f",
        "--field",
        type=field_names,
        default=field_names(_DEFAULT_FIELDS),
        metavar="FIELDS",
        help=f"the field to write: the first of these that the sample has ('{_DEFAULT_FIELDS}')",
    )
    parser.add_argument(
        "-S",
        "--select",
        "--where",
        dest="where",
        metavar="EXPR",
        help="the condition that the sample must meet, such as 'cls == 3 and size(\"jpg\") > 10000'",
    )
    parser.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="the file to write: a path or URL; - is standard output (-)"
    )
    # The key is always printed; the option is accepted because tarfirst has it.
    parser.add_argument("-v", "--verbose", action="store_true", help=argparse.SUPPRESS)
    parser.epilog = """examples:
  penstock first -f cls small.tar
  penstock first -S 'cls == 3' -f 'jpg;png' 's3://bucket/train-{0000..0147}.tar' > three.jpg"""


def run(args: argparse.Namespace) -> int:
    from penstock.cli.tools import streams
    from penstock.errors import DataError, PlanError, printable
    from penstock.plan import no_field
    from penstock.plan.expression_text import TextExpression
    from penstock.storage import open_storage

    try:
        condition = TextExpression(args.where) if args.where else None
    except PlanError as exc:
        usage_error(str(exc))
    present: set[str] = set()
    urls = streams.shard_urls(args)
    streams.refuse_inputs([args.output], urls)
    for raw in streams.read_samples(args, urls):
        present.update(raw.field_names)
        field = next((name for name in args.field if name in raw.field_names), None)
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
        sys.stderr.write(f"{printable(raw.key)}.{field}\n")
        return 0
    for name in sorted(condition.fields()) if condition is not None else ():
        if present and name not in present:
            raise DataError(f"the samples have {no_field([name], present)}")
    if present and not present.intersection(args.field):
        raise DataError(f"the samples have {no_field(args.field, present)}")
    fields = "the field" if len(args.field) == 1 else "any of the fields"
    sys.stderr.write(f"penstock: no sample that meets the condition has {fields} {', '.join(args.field)}\n")
    return 1
