"""``penstock proc`` (``tarproc``): run a command or a Python function on every sample."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cli import counted
from penstock.cli.argument_types import add_engine, count, positive_count, seconds, usage_error
from penstock.cli.tools.arguments import (
    NumberOr,
    add_input_arguments,
    add_old_letter,
    add_output_arguments,
    add_selection_arguments,
    field_names,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.formats.manifest import ShardEntry
    from penstock.formats.tar.archive import EncodedSamples
    from penstock.tarstream.raw import RawSample
    from penstock.tarstream.shell_command import CommandResult, ShellCommand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # In tarproc a sample that fails is skipped, -S is --script and -s the separator of keys, and a command may leave
    # the files of several samples.
    tarproc = parser.prog == "tarproc"
    on_failure = "skip" if tarproc else "abort"
    add_input_arguments(parser)
    add_output_arguments(parser)
    if tarproc:
        add_selection_arguments(parser, count_flags=("--count",))
    else:
        add_selection_arguments(parser, action=NumberOr, number=count, other="command")
    work = parser.add_mutually_exclusive_group()
    work.add_argument(
        *["-c"] if tarproc else [],
        "--command",
        metavar="CMD",
        help="a shell command, run in a folder with the files of the sample: sample.jpg, sample.cls, ...",
    )
    work.add_argument(*["-S"] if tarproc else [], "--script", metavar="FILE", help="a file of shell commands")
    work.add_argument(
        "--python",
        metavar="MODULE:FUNCTION",
        help="a Python function that takes a sample (a dict) and returns one sample, several, or None",
    )
    parser.add_argument(
        "--decode", metavar="SPEC", help="with --python: decode samples first, as in read_tar(...).decode(SPEC)"
    )
    to_folder = {"action": NumberOr, "number": positive_count, "other": "working_dir"}
    parser.add_argument(
        "-p",
        "--parallel",
        *[] if tarproc else ["-w", "--workers"],
        default=1,
        metavar="N",
        help="samples processed at a time (1)",
        **({"type": count} if tarproc else to_folder),
    )
    parser.add_argument("--unordered", action="store_true", help="write samples as they finish instead of in order")
    parser.add_argument(
        "-e",
        "--on-failure",
        "--error-handling",
        choices=("abort", "skip", "keep", "ignore"),
        default=on_failure,
        help=f"stop at a sample that fails, skip it, keep it unchanged, or ignore its exit code ({on_failure})",
    )
    parser.add_argument(
        "-b", "--base", default="sample", metavar="NAME", help="base name of the files of the sample (sample)"
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help="a sample fails if it takes longer than S seconds")
    parser.add_argument("--add-log", metavar="FIELD", help="store the output of the command in this field")
    parser.add_argument("-q", "--silent", action="store_true", help="print only the output of commands that fail")
    parser.add_argument(
        "--working-dir",
        *["-w", "--working_dir"] if tarproc else [],
        metavar="FOLDER",
        help="where the folders of samples are created (in memory if there is room, else TMPDIR)",
    )
    parser.add_argument("--interpreter", metavar="SHELL", help="the shell that runs the commands (bash, else sh)")
    parser.add_argument(
        "--jobs",
        type=positive_count,
        default=1,
        metavar="N",
        help="with {} in the output: shards processed at a time (1)",
    )
    parser.add_argument(
        "--shards",
        type=positive_count,
        metavar="N",
        help="with --python: cut the samples into N ranges, and write each to one shard of the folder -o, in parallel",
    )
    add_engine(parser, "with {} in the output, or --shards: where samples are processed")
    parser.add_argument(
        "--mode",
        choices=("new", "replace"),
        default="new",
        help="with {} in the output: keep output shards that exist (new), or replace them",
    )
    parser.add_argument("--fresh", dest="mode", action="store_const", const="replace", help=argparse.SUPPRESS)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the number of samples at the end")
    parser.set_defaults(tarproc=tarproc)
    add_old_letter(parser, "-s", "--script")
    if tarproc:
        _add_tarproc_arguments(parser)
    parser.epilog = """The command finds the key of the sample in $PENSTOCK_KEY, its shard in $PENSTOCK_SHARD and its
number in $PENSTOCK_NUMBER. The files sample.* that exist when the command ends are the new sample: a deleted file is a
deleted field, a new file is a new field. A file sample.__key__ holds the new key.

With {} in the output, every input shard becomes an output shard; {} is replaced by what the braces in the name of the
input stand for. Output shards that exist are skipped, so that a run resumes where it was interrupted.

examples:
  penstock proc -w 5 --command 'ls; gm mogrify -size 256x256 *.jpg -resize 256x256' small.tar > out.tar
  penstock proc --python words:count --decode rgb8 -w 8 small.tar -o counted.tar
  penstock proc -w 16 --command 'run-ocr *.png' 's3://b/scanned-{0000..0999}.tar' -o 's3://b/ocr-{}.tar' --jobs 16"""


def _add_tarproc_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that only tarproc has."""
    parser.add_argument(
        "-f", "--fields", dest="only", type=field_names, metavar="FIELDS", help="write only these fields as files"
    )
    parser.add_argument(
        "-F",
        "--fieldmode",
        choices=("ignore", "error"),
        default="ignore",
        help="ignore a field of -f that a sample does not have, or stop there (ignore)",
    )
    parser.add_argument(
        "-s", "--separator", default="", metavar="TEXT", help="text between the key and the base name of other files"
    )
    parser.add_argument("-I", "--include", type=_regex, metavar="REGEX", help="read only files whose names match")
    parser.add_argument("-E", "--exclude", type=_regex, metavar="REGEX", help="do not read files whose names match")


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {exc}") from exc
    return text


def run(args: argparse.Namespace) -> int:
    args.parallel = max(args.parallel, 1)  # tarproc's 0 stands for one at a time
    if sum(work is not None for work in (args.command, args.script, args.python)) != 1:
        usage_error("give one of --command CMD, --script FILE and --python MODULE:FUNCTION")
    if args.script is not None and not os.path.isfile(args.script):
        if not args.tarproc or shutil.which(args.script.partition(" ")[0]) is None:
            usage_error(f"there is no script {args.script!r}")
        args.command, args.script = args.script, None
    if not args.base or "/" in args.base or "." in args.base:
        usage_error(f"--base {args.base!r} cannot be the base name of files: give a name without a dot or a slash")
    if args.decode is not None and args.python is None:
        usage_error("--decode needs --python: a command gets the files undecoded")
    if args.python is not None and (args.where or args.count is not None):
        usage_error("--where and --count do not work with --python: select samples with penstock cat, and pipe them in")
    if args.shards is not None:
        return _process_ranges(args)
    if "{}" in args.output:
        return _process_shards(args)
    if args.engine != "local":
        usage_error("--engine ray needs {} in the output, so that every input shard becomes an output shard")
    return _process_stream(args)


def _process_ranges(args: argparse.Namespace) -> int:
    """Write the samples that a function returns to ``--shards`` shards of a folder."""
    if args.python is None or "{}" in args.output or args.output == "-":
        usage_error("--shards needs --python, and a folder for the shards as output")
    from penstock.cli.tools import streams
    from penstock.tarstream.python_function import samples_of

    on_error = "keep" if args.on_failure == "ignore" else args.on_failure
    options = {"decode": args.decode, "on_error": on_error, "timeout_s": args.timeout}
    samples = samples_of(streams.shard_urls(args), args.python, parallel=args.parallel, **options)
    packed = samples.on(args.engine).write_tar(
        args.output, shards=args.shards, compress=args.compress, mode=args.mode, progress=sys.stderr.isatty()
    )
    skipped = f", {packed.skipped:,} failed" if packed.skipped else ""
    shards = counted(len(packed.shards), "shard")
    sys.stderr.write(f"penstock: {counted(packed.samples, 'sample')} in {shards}{skipped}\n")
    return 0


@dataclass(slots=True)
class _Counts:
    """How many samples were read, failed, or were dropped because the command left no files."""

    samples: int = 0
    failed: int = 0
    emptied: int = 0

    def __str__(self) -> str:
        counts = [counted(self.samples, "sample")]
        if self.failed:
            counts.append(f"{self.failed:,} failed")
        if self.emptied:
            counts.append(f"{self.emptied:,} dropped because no file was left")
        return ", ".join(counts)


def _process_stream(args: argparse.Namespace) -> int:
    from penstock.cli.tools import streams

    counts = _Counts()
    urls = streams.shard_urls(args)
    with streams.open_output(args, urls) as out:
        for samples in _show_progress(_process_samples(args, urls, counts)):
            out.write_encoded(samples)
    if args.verbose or counts.failed or counts.emptied:
        sys.stderr.write(f"penstock: {counts}\n")
    return 0


def _show_progress(samples: Iterator[EncodedSamples]) -> Iterator[EncodedSamples]:
    """Yield the samples, with a progress bar if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield from samples
        return
    from penstock.engines.progress import Progress

    with Progress("proc") as bar:
        for sample in samples:
            yield sample
            bar.add()


def _process_samples(args: argparse.Namespace, urls: list[str], counts: _Counts) -> Iterator[EncodedSamples]:
    """Run the command or function on the samples of shards; yield the results and update ``counts``."""
    if args.python is not None:
        from penstock.tarstream.python_function import call_on_each

        results = call_on_each(
            urls,
            args.python,
            parallel=args.parallel,
            ordered=not args.unordered,
            decode=args.decode,
            on_error="keep" if args.on_failure == "ignore" else args.on_failure,  # a function has no exit code
            timeout_s=args.timeout,
        )
        for encoded in results:
            counts.samples += 1
            yield encoded
        return
    from penstock.cli.tools import streams
    from penstock.tarstream.gather import gather_samples
    from penstock.tarstream.shell_command import CommandRunner, run_on_each

    samples = streams.selection(args).samples(gather_samples(urls, on_error=streams.bad_sample_callback(args)))
    if args.tarproc and args.fieldmode == "error":
        samples = _with_fields(samples, args.only or [])
    with CommandRunner(_shell_command(args), args.working_dir) as runner:
        for result in run_on_each(samples, runner, args.parallel, not args.unordered):
            yield from _samples_to_write(result, args, counts)


def _with_fields(samples: Iterator[RawSample], fields: list[str]) -> Iterator[RawSample]:
    """Yield the samples, up to one that lacks a field.

    Raises:
        DataError: A sample lacks a field.
    """
    from penstock.errors import DataError

    for raw in samples:
        for field in fields:
            if field not in raw.field_names:
                raise DataError(f"the sample has no field {field!r}", raw.shard, raw.key)
        yield raw


def _samples_to_write(result: CommandResult, args: argparse.Namespace, counts: _Counts) -> list[EncodedSamples]:
    """Return what is written for a sample; a failure is reported and then treated as ``--on-failure`` says.

    Raises:
        StageError: The command failed, and failures abort the run.
    """
    from penstock.errors import StageError, printable
    from penstock.tarstream.shell_command import echo

    counts.samples += 1
    if result.problem is None:
        if not args.silent:
            echo(result.printed)
        counts.emptied += not result.encoded
        return result.encoded
    counts.failed += 1
    if args.on_failure == "abort":
        printed = result.printed.decode("utf-8", "replace").strip()
        output = f"\n{printed}\n" if printed else ""
        raise StageError(result.problem + output, "proc", result.raw.key, result.raw.shard)
    echo(result.printed)
    action = "kept unchanged" if args.on_failure == "keep" else "skipped"
    where = f"(shard: {result.raw.shard}, key: {result.raw.key})"
    sys.stderr.write(f"penstock: {action}: {printable(f'{result.problem} {where}')}\n")
    return [result.raw.encode()] if args.on_failure == "keep" else []


def _shell_command(args: argparse.Namespace) -> ShellCommand:
    from penstock.tarstream.shell_command import ShellCommand, TarprocFiles

    shell = args.interpreter or shutil.which("bash") or "/bin/sh"
    argv = (shell, "-c", args.command) if args.script is None else (shell, os.path.abspath(args.script))
    files = None
    if args.tarproc:
        fields = None if args.only is None else frozenset(args.only)
        files = TarprocFiles(fields, args.separator, args.include, args.exclude)
    return ShellCommand(argv, args.timeout, args.add_log, args.base, args.on_failure == "ignore", files)


@dataclass(frozen=True, slots=True)
class ShardProcessor:
    """Processes one input shard into an output shard; picklable, so that it can run on other machines."""

    args: argparse.Namespace

    def __call__(self, source: str, target: str) -> ShardEntry:
        """Write the output shard and return its entry for a manifest."""
        from penstock.formats.tar.shard_names import on_disk
        from penstock.formats.tar.writer import TarWriter
        from penstock.landing import storage_errors
        from penstock.storage import local_path

        counts = _Counts()
        with storage_errors(target):
            if on_disk(target):
                os.makedirs(os.path.dirname(local_path(target)) or ".", exist_ok=True)
            with TarWriter(target, compress=self.args.compress) as writer:
                for samples in _process_samples(self.args, [source], counts):
                    writer.write_encoded(samples)
        if counts.failed or counts.emptied or self.args.verbose:
            sys.stderr.write(f"penstock: {source}: {counts}\n")
        assert writer.entry is not None
        return writer.entry


def _process_shards(args: argparse.Namespace) -> int:
    from penstock.tarstream import shard_jobs
    from penstock.tarstream.shell_command import stop_all

    if args.filelist is not None or not args.inputs or "-" in args.inputs:
        usage_error("with {} in the output, standard input and -T do not work: name the shards as arguments")
    jobs = shard_jobs.plan_jobs(args.inputs, args.output)
    processor, fresh = ShardProcessor(args), args.mode == "replace"
    if args.engine == "ray":
        counts = shard_jobs.run_jobs(jobs, shard_jobs.on_ray(processor, args.parallel), args.jobs, fresh=fresh)
    else:
        pool, start = shard_jobs.on_threads(processor, args.jobs)
        try:
            counts = shard_jobs.run_jobs(jobs, start, args.jobs, fresh=fresh)
        finally:
            stop_all()
            pool.shutdown(cancel_futures=True)
    existing = f", {counts.existing:,} already existed" if counts.existing else ""
    failed = f", {counts.failed:,} failed" if counts.failed else ""
    sys.stderr.write(f"penstock: {counted(counts.done, 'shard')} done{existing}{failed}\n")
    return 1 if counts.failed else 0
