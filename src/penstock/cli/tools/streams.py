"""Turn the arguments of a tar tool into the samples it reads, the selection it makes, and the archive it writes."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from penstock.cli.argument_types import usage_error
from penstock.errors import DataError, PlanError, StorageError
from penstock.plan.expression_text import TextExpression
from penstock.storage import STDIN, redacted
from penstock.tarstream import gather
from penstock.tarstream.gather import file_identity, find_shards, raise_error
from penstock.tarstream.raw import RawRun, RawSample
from penstock.tarstream.select import KeyTemplate, Selection
from penstock.tarstream.stream_writer import STDOUT, StreamWriter, open_stream_writer

# glibc raises its mmap threshold, and with it the free memory that it keeps, to the size of the largest mapped block
# that was freed, up to 32 MB. Otherwise every buffer of a stream is mapped and touched afresh, a third of the time that
# copying a pipe takes. Allocating and freeing this block raises the threshold; its pages are never touched.
_MALLOC_THRESHOLD_BYTES = 30 << 20


def shard_urls(args: argparse.Namespace) -> list[str]:
    """Return the shards that a tool reads; standard input if none is named.

    Raises:
        StorageError: A folder or glob holds no shard, or the file list cannot be read.
        SystemExit: With 2 if there is nothing to read.
    """
    bytes(_MALLOC_THRESHOLD_BYTES)
    names = list(args.inputs)
    if args.filelist is not None:
        names += _read_filelist(args.filelist)
    elif not names:
        names = [STDIN]
    if not names:
        usage_error(f"{args.filelist} lists no shard: write one name per line")
    if STDIN in names and sys.stdin.isatty():
        usage_error("there is nothing to read: name shards, or pipe one in")
    return find_shards(names)


def _read_filelist(name: str) -> list[str]:
    try:
        with open(0 if name == STDIN else name) as file:
            return [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as exc:
        raise StorageError(f"cannot read the list of shards: {getattr(exc, 'strerror', None) or exc}", name) from exc


def read_samples(
    args: argparse.Namespace, urls: list[str], workers: int = 1, mapped: bool = False
) -> Iterator[RawSample]:
    """Return an iterator over the samples of shards; ``mapped`` is faster if most of their bytes are not used.

    Raises:
        StorageError: A shard cannot be read.
        DataError: A shard is damaged, unless bad samples are skipped.
    """
    return gather.gather_samples(urls, on_error=bad_sample_callback(args), workers=workers, mapped=mapped)


def read_runs(
    args: argparse.Namespace,
    urls: list[str],
    workers: int = 1,
    mapped: bool = True,
    skipped: Counter[str] | None = None,
) -> Iterator[RawRun]:
    """Return an iterator over runs of adjacent samples, for a tool that copies samples unchanged.

    With one worker, ``skipped`` counts the members that belong to no sample, by kind.

    Raises:
        StorageError: A shard cannot be read.
        DataError: A shard is damaged, unless bad samples are skipped.
    """
    on_error = bad_sample_callback(args)
    return gather.gather_runs(urls, on_error=on_error, workers=workers, mapped=mapped, skipped=skipped)


def bad_sample_callback(args: argparse.Namespace) -> gather.ErrorHandler:
    """Return the function to call with the error of an unreadable sample: ``--on-error`` raises or skips it."""
    return _report_skipped if args.on_error == "skip" else raise_error


def _report_skipped(error: DataError) -> None:
    sys.stderr.write(f"penstock: skipped: {error}\n")


def selection(args: argparse.Namespace, named: Iterable[tuple[str, ...]] = ()) -> Selection:
    """Return the samples and fields that a tool selects; options that the tool does not have select everything.

    Args:
        args: The arguments of the tool.
        named: Fields, each with its alternatives, that the user named in another way than by ``--fields``.

    Raises:
        SystemExit: With 2 if a condition or template cannot be parsed.
    """
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
        usage_error(str(exc))
    return Selection(
        where=where,
        shuffle=getattr(args, "shuffle", 0),
        seed=getattr(args, "seed", 0),
        start=start,
        stop=stop,
        step=step,
        fields=frozenset(args.fields) if isinstance(getattr(args, "fields", None), list) else None,
        drop=frozenset(getattr(args, "drop", None) or ()),
        rename=rename,
        named=tuple(named),
    )


@contextmanager
def open_output(args: argparse.Namespace, inputs: Iterable[str]) -> Iterator[StreamWriter]:
    """Open the archive that a tool writes; a named one appears only if the ``with`` block succeeds.

    Args:
        args: The arguments of the tool.
        inputs: The files that the tool reads.

    Raises:
        StorageError: The archive cannot be written.
        SystemExit: With 2 if it would go to a terminal, or replace one of the inputs.
    """
    refuse_terminal(args.output)
    refuse_inputs([args.output], inputs)
    with write_errors_name(args.output), open_stream_writer(args.output, args.compress) as out:
        yield out


@contextmanager
def write_errors_name(target: str) -> Iterator[None]:
    """Turn system errors that name no file, such as a full disk, into errors that name the target.

    Raises:
        StorageError: The target cannot be written.
    """
    try:
        yield
    except (StorageError, BrokenPipeError):
        raise
    except OSError as exc:
        if exc.filename is not None:
            raise
        raise StorageError(f"cannot write: {exc.strerror or exc}", redacted(target)) from exc


def refuse_inputs(outputs: Iterable[str], inputs: Iterable[str]) -> None:
    """Exit with a usage error if an output is one of the files that are read.

    Raises:
        SystemExit: With 2 if it is.
    """
    written = {file_identity(url, 1) for url in outputs}
    if (same := next((url for url in inputs if file_identity(url, 0) in written), None)) is not None:
        name = "standard input" if same == STDIN else redacted(same)
        usage_error(f"{name} is read, and would be replaced by the output: name another output")


def refuse_terminal(output: str) -> None:
    """Exit with a usage error if binary output would go to a terminal.

    Raises:
        SystemExit: With 2 if standard output is the output and a terminal.
    """
    if output == STDOUT and sys.stdout.isatty():
        usage_error("refusing to write binary data to a terminal: name a file with -o, or pipe the output")
