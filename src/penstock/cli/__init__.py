"""The command ``penstock``: one file per family of commands, imported when it is called."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from penstock import __version__
from penstock.cli.tools import OLD_NAMES, TOOLS
from penstock.errors import PenstockError

_AS_WRITTEN = argparse.RawDescriptionHelpFormatter  # examples stay on their lines
_STIR_S = 0.25

COMMANDS = {
    "bench": "measure shards: read, decode, augment, batch, alone and together, and say what limits",
    "completion": "print what makes a shell complete these commands: bash, zsh or fish",
    "convert": "read files of one format and write the same samples in another: tar, Parquet, CSV, JSON, TFRecord",
    "demo": "pack a small dataset, stream it, train on it, interrupt and resume, print the rates",
    "index": "make the index of shards that other tools wrote, and put it beside them",
    "info": "tell what shards or tables hold: samples, bytes, fields and their sizes or types, classes",
    "pack": "pack a folder, a list or shards into shards or Parquet files, here or elsewhere",
    "process": "call a function on files: outputs appear whole, rows are collected, a rerun does what is missing",
    "verify": "check shards against their manifest and index, read Parquet files through, or prove a ledger",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code says how it went: 0 well, 1 not, 2 wrongly called."""
    given = list(sys.argv[1:] if argv is None else argv)
    asked = next((word for word in given if not word.startswith("-")), None)
    if asked in TOOLS and given[0] == asked:
        # Not below the others: only so may options and names stand in any order.
        return _run(asked, parser_of(asked).parse_intermixed_args(given[1:]))
    parser = argparse.ArgumentParser(prog="penstock", description="Feeds accelerators.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, about in sorted((COMMANDS | TOOLS).items()):
        command = commands.add_parser(name, help=about, description=about, formatter_class=_AS_WRITTEN)
        if name == asked:  # only the command that is called is imported
            module_of(name).arguments(command)
    args = parser.parse_args(given)
    return _run(args.command, args)


def old_name() -> int:
    """Run a tool under the name it had elsewhere: ``tarcat``, ``tarproc``, ...; that of the script that was called."""
    name = os.path.basename(sys.argv[0])
    return _run(OLD_NAMES[name], parser_of(OLD_NAMES[name], name).parse_intermixed_args(sys.argv[1:]))


def parser_of(name: str, prog: str | None = None) -> argparse.ArgumentParser:
    """Give the parser of a command; the one source of its help, of the pages about it and of completion."""
    about = (COMMANDS | TOOLS)[name]
    parser = argparse.ArgumentParser(prog or f"penstock {name}", description=about, formatter_class=_AS_WRITTEN)
    module_of(name).arguments(parser)
    return parser


def module_of(name: str) -> Any:
    """Import the file of a command: it has ``arguments(parser)`` and ``run(args)``."""
    return import_module(f"penstock.cli.tools.{name}" if name in TOOLS else f"penstock.cli.{name}")


def _run(name: str, args: argparse.Namespace) -> int:
    """Run a command, with one line and a code for what a user can do something about."""
    try:
        with _terminated():
            code: int = module_of(name).run(args)
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PenstockError as exc:
        sys.stderr.write(f"penstock: {exc}\n")
        return 1
    except OSError as exc:
        where = f" ({exc.filename})" if exc.filename else ""
        sys.stderr.write(f"penstock: {exc.strerror or exc}{where}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("penstock: interrupted\n")
        exec("")  # Python notes an interrupt inside any exec, and would end by it; another one clears that
        return 130
    except _Terminated:
        sys.stderr.write("penstock: terminated\n")
        return 143
    return code


class _Terminated(BaseException):
    """The process was asked to end: what has been begun is tidied up."""


@contextmanager
def _terminated() -> Iterator[None]:
    """Let a request to end unwind what runs, as Ctrl-C does, so that no half file stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        with _stirred():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _stirred() -> Iterator[None]:
    """Wake the main thread now and then.

    Python sees a signal between two of its steps; one that comes just before a wait for a thread is seen after it,
    which may be never. Another signal ends that wait, and the first one is seen.
    """
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:  # somebody has a use for it
        yield
        return
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, _STIR_S, _STIR_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
