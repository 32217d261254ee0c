"""The ``penstock`` command: one module per subcommand, imported only when that subcommand is called."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn, Protocol

from penstock import __version__
from penstock.cli.tools import OLD_NAMES, TOOLS
from penstock.errors import PenstockError

_EXAMPLES = """examples:
  penstock example photos photos/
  penstock pack photos/ packed/"""
_HELP_FORMATTER = argparse.RawDescriptionHelpFormatter  # keeps the line breaks of the examples
_WAKEUP_INTERVAL_S = 0.25  # the longest that a signal waits for its handler

COMMANDS = {
    "bench": "measure how fast shards are read, decoded, augmented and batched, and name the bottleneck",
    "completion": "print a completion script for bash, zsh or fish",
    "convert": "convert files from one format to another: tar, Parquet, CSV, JSON, TFRecord",
    "demo": "pack a small dataset, stream it, train on it, interrupt and resume the training, and print the rates",
    "example": "make a small dataset to try things on: photos, sounds, a table or text",
    "index": "build the index of shards that other tools wrote, and store it beside them",
    "info": "summarise shards or tables: samples, bytes, fields with their sizes or types, classes",
    "pack": "pack a folder, a list or shards into shards or Parquet files, on disk or on remote storage",
    "process": "call a Python function on every file and collect its rows (for samples in shards: penstock proc)",
    "serve": "serve the batches of a dataset to consumers on this and other machines",
    "view": "look at samples, stages, balance, shards, a ledger or a live run in a browser, on this machine",
    "verify": "check shards and Parquet files for damage, or prove from a ledger that every sample was delivered once",
}


class CommandModule(Protocol):
    """The functions that the module of every subcommand has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return its exit code.

        Heavy imports belong here, not at the top of the module, so that ``--help`` answers at once.

        Raises:
            PenstockError: The command failed in a way that the user can act on.
        """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 for success, 1 for a failure.

    Raises:
        SystemExit: With 2 for a usage error, with 0 after ``--help`` or ``--version``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else None
    if name in COMMANDS | TOOLS:  # not a subparser, which reports unknown options as those of ``penstock``
        parser = parser_of(name)
        # Tools parse options and positional arguments in any order.
        parse = parser.parse_intermixed_args if name in TOOLS else parser.parse_args
        return _run(name, parse(arguments[1:]))
    description = "Pack datasets into shards, stream them into training, and process shards and files."
    parser = CommandParser(prog="penstock", description=description, epilog=_EXAMPLES, formatter_class=_HELP_FORMATTER)
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    if name is not None and not name.startswith("-"):
        near = get_close_matches(name, COMMANDS | TOOLS, 1)
        hint = f"did you mean `penstock {near[0]}`?" if near else "`penstock --help` lists the commands"
        parser.error(f"there is no command {name!r}: {hint}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, summary in sorted((COMMANDS | TOOLS).items()):
        subparsers.add_parser(command, help=summary)
    if not arguments:
        parser.exit(2, parser.format_help())
    parser.parse_args(arguments)
    parser.error("name a command first, then its options")


def old_name() -> int:
    """Run the tool whose tarproc name the script has, such as ``tarcat``, and return the exit code.

    Raises:
        SystemExit: With 2 for a usage error, with 0 after ``--help``.
    """
    script = os.path.basename(sys.argv[0])
    command = OLD_NAMES[script]
    return _run(command, parser_of(command, script).parse_intermixed_args(sys.argv[1:]))


def parser_of(name: str, prog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a command; the help, the reference page and the completion scripts are generated from it."""
    summary = (COMMANDS | TOOLS)[name]
    parser = CommandParser(prog or f"penstock {name}", description=summary, formatter_class=_HELP_FORMATTER)
    module_of(name).add_arguments(parser)
    return parser


def split_epilog(text: str) -> tuple[str, str]:
    """Return the prose and the examples of an epilog, without the heading ``examples:``."""
    prose, _, examples = text.partition("examples:\n")
    return prose.strip(), examples.rstrip()


class CommandParser(argparse.ArgumentParser):
    """A parser whose help begins with the purpose and examples, and that names the option nearest to an unknown one."""

    def format_help(self) -> str:
        """Return the help: the purpose, examples, the usage, the arguments, and what else there is to know."""
        if not self.prog.startswith("penstock"):  # tarcat and the other old names: as argparse has it
            return super().format_help()
        prose, examples = split_epilog(self.epilog or "")
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        formatter.add_text(f"examples:\n{examples}" if examples else None)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(prose or None)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Print a usage error and exit with 2."""
        unknown = re.search(r"unrecognized arguments:.*?(--?[^\s=]+)", message)
        near = get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        super().error(f"{message}; did you mean {near[0]}?" if near else message)


def module_of(name: str) -> CommandModule:
    """Import and return the module of a command."""
    module: Any = import_module(f"penstock.cli.tools.{name}" if name in TOOLS else f"penstock.cli.{name}")
    return module  # type: ignore[no-any-return]


# What a message says to a program, and what it says to someone who types a command.
_COMMAND_WORDS = (
    (r"^write_\w+: ", ""),
    (r"pass storage=S3\(\.\.\.\), ", ""),
    (r"pass storage=S3\(access_key=, secret_key=\)", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
)
_KEYWORD = re.compile(r"(?<![\w/.-])([a-z_]+)=(?:'([^']*)'|([\w.]+))(?![\w/=])")
_CALL = re.compile(r"(?<![\w/.-])([a-z_]+)\('([^']*)'\)")


def in_command_words(message: str, options: Container[str]) -> str:
    """Return a message of the library as the command says it: with options instead of Python's keywords.

    >>> in_command_words("mode='replace' starts over", ["--mode"])
    '--mode replace starts over'
    """
    for pattern, words in _COMMAND_WORDS:
        message = re.sub(pattern, words, message)

    def option(match: re.Match[str]) -> str:
        name = "--" + match[1].replace("_", "-")
        return f"{name} {match[2] or match[match.lastindex or 2]}" if name in options else match[0]

    return _CALL.sub(option, _KEYWORD.sub(option, message))


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, for a line that a command prints.

    >>> counted(1, "shard"), counted(2000, "shard")
    ('1 shard', '2,000 shards')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def _run(name: str, args: argparse.Namespace) -> int:
    """Run a command and return its exit code; an error that the user can act on is printed in one line."""
    closed = _replace_closed_streams()
    try:
        with _unwind_on_signals():
            code = module_of(name).run(args)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed the pipe, as `head` does
        _discard_output()
        return 0
    except PenstockError as exc:
        problem = in_command_words(str(exc), parser_of(name)._option_string_actions)
        sys.stderr.write(f"penstock: {_closed_problem(exc.__cause__, closed) or problem}\n")
        return 1
    except OSError as exc:
        path = f" ({exc.filename})" if exc.filename else ""
        sys.stderr.write(f"penstock: {_closed_problem(exc, closed) or f'{exc.strerror or exc}{path}'}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("penstock: interrupted\n")
        # An interrupt that leaves any exec() sets a flag for which CPython, at exit, kills itself with SIGINT
        # instead of returning our code. Another exec() clears the flag.
        exec("")
        return 130
    except _Terminated:
        sys.stderr.write("penstock: terminated\n")
        return 143
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # has been reported, and would be again at the exit
            _discard_output()
    return code


def _closed_problem(exc: BaseException | None, closed: str) -> str | None:
    """Return what is wrong if an error comes from a standard stream that was closed before the command started."""
    return f"{closed} is closed" if closed and isinstance(exc, OSError) and exc.errno == errno.EBADF else None


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace_closed_streams() -> str:
    """Open standard streams that are closed, so that no other file takes their place; return their names.

    Reading and writing them then fails, except that messages to standard error are dropped.
    """
    names = []
    for fd, (stream, flags) in enumerate((("stdin", os.O_WRONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY))):
        if getattr(sys, stream) is None:
            null = os.open(os.devnull, flags)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, stream, open(fd, "r" if stream == "stdin" else "w", closefd=False))  # noqa: SIM115
            names.append(("standard input", "standard output", "standard error")[fd])
    return " and ".join(names)


class _Terminated(BaseException):
    """Raised in the main thread by SIGTERM, so that ``finally`` blocks run."""


@contextmanager
def _unwind_on_signals() -> Iterator[None]:
    """Make SIGTERM unwind the stack as Ctrl-C does, so that no partial file is left behind.

    Both work within the import of a compiled module too, although the import then fails with a plain ImportError.

    Raises:
        KeyboardInterrupt: Ctrl-C arrived.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: type[BaseException] | None = None

    def unwind(number: int, _: object) -> None:
        nonlocal raised
        raised = _Terminated if number == signal.SIGTERM else KeyboardInterrupt
        raise raised

    previous = signal.signal(signal.SIGTERM, unwind)
    replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replaced:
        signal.signal(signal.SIGINT, unwind)
    try:
        with _periodic_wakeup():
            yield
    except ImportError:
        if raised is not None:
            raise raised from None
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        if replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _periodic_wakeup() -> Iterator[None]:
    """Interrupt the main thread's waits with a timer signal.

    Python runs signal handlers between two bytecode instructions. A signal that arrives just before the main thread
    starts to wait for another thread is therefore handled after that wait, which may never end. The next timer signal
    ends the wait, and the pending handler runs.
    """
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:  # the embedding program uses the timer itself
        yield
        return
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, _WAKEUP_INTERVAL_S, _WAKEUP_INTERVAL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
