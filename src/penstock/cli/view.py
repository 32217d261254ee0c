"""``penstock view``: look at samples, stages, balance, shards, a ledger and a live run in a browser."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from contextlib import suppress

from penstock.cli.argument_types import port_number, usage_error
from penstock.errors import MissingExtra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "urls",
        nargs="*",
        metavar="URL",
        help="shards, tables, folders of images, LMDB, patterns; or PROGRAM.py:NAME for the dataset of a program, whose"
        " samples are shown before and after each stage",
    )
    parser.add_argument("--ledger", metavar="FOLDER", help="the folder of a loader's ledger: what was in each step")
    parser.add_argument("--run", metavar="FOLDER", help="the folder of on(monitor=...): a run, live or over")
    parser.add_argument("--port", type=port_number, default=0, help="the port on 127.0.0.1 (0: any that is free)")
    parser.add_argument("--no-browser", action="store_true", help="print the address, and do not open a browser")
    parser.epilog = (
        "The page is reached from this machine only, by the address that is printed; it holds a token.\n\nexamples:\n"
        "  penstock view photos-packed/\n  penstock view train.py:ds\n  penstock view --run runs/monitor"
    )


def run(args: argparse.Namespace) -> int:
    if not (args.urls or args.ledger or args.run):
        usage_error("name what to view: URLs, --ledger or --run")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise MissingExtra("penstock view", "view") from None
    from penstock.feed.ledger import ledger
    from penstock.view import View, open_target, serve_view
    from penstock.view.target import is_program

    if args.ledger is not None:
        ledger(args.ledger)  # raises if it cannot be read
    program = len(args.urls) == 1 and is_program(args.urls[0])
    ds = open_target(args.urls) if args.urls else None
    view = View(ds, () if program else tuple(args.urls), program, args.ledger, args.run)
    if view.browser is not None:
        with suppress(IndexError):  # there are no samples; any other problem ends the command
            view.browser.place(0)

    def opened(address: str) -> None:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        if not args.no_browser:
            webbrowser.open(address)

    serve_view(view, args.port, opened=opened)
    return 0
