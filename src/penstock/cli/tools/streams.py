"""From arguments to streams: what the tools read, choose and write."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli.tools import wrong
from penstock.errors import DataError, PlanError, StorageError
from penstock.plan.expression_text import TextExpression
from penstock.storage import STDIN, redacted
from penstock.tarstream import gather
from penstock.tarstream.gather import find_shards, raise_error
from penstock.tarstream.raw import RawRun, RawSample
from penstock.tarstream.select import KeyTemplate, Selection
from penstock.tarstream.stream_writer import STDOUT, StreamWriter, open_stream_writer

# glibc keeps as much freed memory as the largest piece it saw freed says; else a stream is read into pages that are
# touched afresh again and again, a third of the time that copying a pipe takes. Nobody touches this one.
_SIGN = 30 << 20


def shards(args: argparse.Namespace) -> list[str]:
    """List the shards that a tool reads; standard input where none is named.

    Raises:
        StorageError: Nothing is there.
    """
    bytes(_SIGN)
    names = list(args.inputs)
    if args.filelist is not None:
        names += _listed(args.filelist)
    elif not names:
        names = [STDIN]
    if not names:
        wrong(f"{args.filelist} names no shard")
    if STDIN in names and sys.stdin.isatty():
        wrong("there is nothing to read: name shards, or pipe one in")
    return find_shards(names)


def _listed(name: str) -> list[str]:
    try:
        with open(0 if name == STDIN else name) as file:
            return [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as exc:
        raise StorageError(f"the list cannot be read: {getattr(exc, 'strerror', None) or exc}", name) from exc


def stream(args: argparse.Namespace, workers: int = 1, mapped: bool = False) -> Iterator[RawSample]:
    """Give the samples that a tool reads; ``mapped`` where it hardly looks into them.

    Raises:
        StorageError: A shard cannot be read.
        DataError: One is damaged, unless such samples are left out.
    """
    return gather.gather_samples(shards(args), on_error=_bad(args), workers=workers, mapped=mapped)


def stretches(args: argparse.Namespace, workers: int = 1, mapped: bool = True) -> Iterator[RawRun]:
    """Give the same for a tool that copies them as they lie.

    Raises:
        StorageError: A shard cannot be read.
        DataError: One is damaged, unless such samples are left out.
    """
    return gather.gather_runs(shards(args), on_error=_bad(args), workers=workers, mapped=mapped)


def _bad(args: argparse.Namespace) -> gather.OnError:
    return told if args.on_error == "skip" else raise_error


def told(error: DataError) -> None:
    """Say what is left out."""
    sys.stderr.write(f"penstock: left out: {error}\n")


def selection(args: argparse.Namespace) -> Selection:
    """Read which samples are chosen, and how they go on; a condition or template that cannot be one is a wrong call."""
    start, stop, step = getattr(args, "slice", None) or (0, None, 1)
    skip = getattr(args, "skip", 0)
    start, stop = start + skip, None if stop is None else stop + skip
    if args.count is not None:
        last = start + args.count * step
        stop = last if stop is None else min(stop, last)
    try:
        where = TextExpression(args.where) if args.where else None
        rename = KeyTemplate(args.rename) if getattr(args, "rename", None) else None
    except PlanError as exc:
        wrong(str(exc))
    return Selection(
        where=where,
        shuffle=getattr(args, "shuffle", 0),
        seed=getattr(args, "seed", 0),
        start=start,
        stop=stop,
        step=step,
        fields=frozenset(args.fields) if getattr(args, "fields", None) else None,
        drop=frozenset(getattr(args, "drop", None) or ()),
        rename=rename,
    )


@contextmanager
def outlet(args: argparse.Namespace) -> Iterator[StreamWriter]:
    """Open what a tool writes to, never a terminal; it appears if all is well.

    Raises:
        StorageError: It cannot be written.
    """
    no_terminal(args.output)
    with failures_at(args.output), open_stream_writer(args.output, args.compress) as out:
        yield out


@contextmanager
def failures_at(place: str) -> Iterator[None]:
    """Name the place of what the system says without one: a disk that is full.

    Raises:
        StorageError: It said so.
    """
    try:
        yield
    except (StorageError, BrokenPipeError):
        raise
    except OSError as exc:
        if exc.filename is not None:
            raise
        raise StorageError(f"cannot write: {exc.strerror or exc}", redacted(place)) from exc


def no_terminal(output: str) -> None:
    """Refuse to write an archive where people read."""
    if output == STDOUT and sys.stdout.isatty():
        wrong("an archive is nothing for a terminal: name a file with -o, or pipe it on")
