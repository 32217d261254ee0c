"""The command ``penstock``: one file per family of commands, imported when it is called."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from penstock import __version__
from penstock.errors import PenstockError

COMMANDS = {
    "demo": "pack a small dataset, stream it, train on it, interrupt and resume, print the rates",
    "index": "make the index of shards that other tools wrote, and put it beside them",
    "info": "tell what shards hold: samples, bytes, fields and their sizes, classes",
    "pack": "pack a folder, a list or shards into shards, here or elsewhere",
    "verify": "check shards against their manifest and index, or prove by a ledger that every sample came once",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code says how it went: 0 well, 1 not, 2 wrongly called."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="penstock", description="Feeds accelerators.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in given if not word.startswith("-")), None)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        if name == asked:  # only the command that is called is imported
            import_module(f"penstock.cli.{name}").arguments(command)
    args = parser.parse_args(given)
    try:
        code: int = import_module(f"penstock.cli.{args.command}").run(args)
    except PenstockError as exc:
        sys.stderr.write(f"penstock: {exc}\n")
        return 1
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        sys.stderr.write("penstock: interrupted\n")
        return 130
    return code
