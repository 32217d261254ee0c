"""``penstock proc`` (``tarproc``): a command for every sample."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.tools import choose, give_output, positive, seconds, take_inputs, whole, wrong

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cli.tools.shell_command import Done
    from penstock.formats.manifest import ShardEntry
    from penstock.formats.tar.archive import EncodedSamples


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    take_inputs(parser)
    give_output(parser)
    choose(parser, count=False)
    parser.add_argument("--count", type=whole, metavar="N", help="stop after N samples")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "-c",
        "--command",
        metavar="CMD",
        help="a shell command: runs in a folder with the sample's files, sample.jpg, sample.cls, ...",
    )
    what.add_argument("-s", "--script", metavar="FILE", help="a file of shell commands")
    what.add_argument(
        "--python",
        metavar="MODULE:FUNCTION",
        help="a function instead: takes a sample (a dict), gives one, several or None",
    )
    parser.add_argument(
        "--decode", metavar="SPEC", help="with --python: decode samples first, as in read_tar(...).decode(SPEC)"
    )
    parser.add_argument(
        "-p", "--parallel", type=positive, default=1, metavar="N", help="samples of a shard worked on at a time (1)"
    )
    parser.add_argument("--unordered", action="store_true", help="write samples as they are done, not in their order")
    about = "what to do about a sample that fails: stop, leave it out, or keep it as it was (abort)"
    parser.add_argument(
        "-e",
        "--on-failure",
        "--error-handling",
        choices=("abort", "skip", "keep", "ignore"),
        default="abort",
        help=about,
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help="seconds a sample may take; then it fails")
    parser.add_argument("--add-log", metavar="FIELD", help="store what the command printed in this field")
    parser.add_argument("-q", "--silent", action="store_true", help="show what commands print of failing samples only")
    parser.add_argument(
        "-w",
        "--working-dir",
        metavar="FOLDER",
        help="where the private folders are made (in memory, where there is room)",
    )
    parser.add_argument("--interpreter", metavar="SHELL", help="what runs the commands (bash, else sh)")
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="with {} in the output: shards worked on at a time (1)"
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="with {} in the output: where shards are worked on (local)",
    )
    parser.add_argument("--fresh", action="store_true", help="with {} in the output: do shards again that are there")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell at the end how many samples went through")
    parser.epilog = """The key of the sample is in $PENSTOCK_KEY, its shard in $PENSTOCK_SHARD, its number in
$PENSTOCK_NUMBER.
Afterwards all files sample.* are the sample: what was deleted is gone, what is new is a field. A file sample.__key__
gives another key.

With {} in the output every shard becomes a shard; {} is what the braces of the input stood for. Shards that are there
are not done again, so a run that was interrupted goes on.

examples:
  penstock proc -p 5 -c 'ls; gm mogrify -size 256x256 *.jpg -resize 256x256' small.tar > out.tar
  penstock proc --python words:count --decode rgb8 -p 8 small.tar -o counted.tar
  penstock proc -p 16 -c 'run-ocr *.png' 's3://b/scanned-{0000..0999}.tar' -o 's3://b/ocr-{}.tar' --jobs 16"""


def run(args: argparse.Namespace) -> int:
    """Run it on one stream, or on every shard."""
    if args.on_failure == "ignore":
        args.on_failure = "keep"
    if args.script is not None and not os.path.isfile(args.script):
        wrong(f"there is no script {args.script!r}")
    if args.decode is not None and args.python is None:
        wrong("--decode goes with --python: a command gets files as they are")
    if args.python is not None and (args.where or args.count is not None):
        wrong("--where and --count do not go with --python: pipe from penstock cat")
    if "{}" in args.output:
        return _over_shards(args)
    if args.engine != "local":
        wrong("--engine ray needs {} in the output: one shard for each shard")
    return _over_stream(args)


@dataclass(slots=True)
class _Counts:
    samples: int = 0
    failed: int = 0
    gone: int = 0

    def __str__(self) -> str:
        more = [f"{self.failed:,} failed"] * bool(self.failed) + [f"{self.gone:,} left without files"] * bool(self.gone)
        return ", ".join([f"{self.samples:,} samples", *more])


def _over_stream(args: argparse.Namespace) -> int:
    from penstock.cli.tools import streams as flow

    counts = _Counts()
    with flow.outlet(args) as out:
        for parts in _progress(_parts(args, flow.shards(args), counts)):
            out.write_encoded(parts)
    if args.verbose or counts.failed or counts.gone:
        sys.stderr.write(f"penstock: {counts}\n")
    return 0


def _progress(parts: Iterator[EncodedSamples]) -> Iterator[EncodedSamples]:
    """Show how far it is, on a terminal."""
    if not sys.stderr.isatty():
        yield from parts
        return
    from penstock.engines.progress import Progress

    with Progress("proc") as bar:
        for one in parts:
            yield one
            bar.add()


def _parts(args: argparse.Namespace, urls: list[str], counts: _Counts) -> Iterator[EncodedSamples]:
    """What comes of the samples of shards."""
    if args.python is not None:
        from penstock.cli.tools.python_function import call_on_each

        made = call_on_each(
            urls,
            args.python,
            parallel=args.parallel,
            ordered=not args.unordered,
            decode=args.decode,
            on_error=args.on_failure,
            timeout_s=args.timeout,
        )
        for parts in made:
            counts.samples += 1
            yield parts
        return
    from penstock.cli.tools import streams as flow
    from penstock.cli.tools.shell_command import Workplace, each
    from penstock.tarstream.gather import gather_samples, raise_error

    stream = flow.selection(args).samples(
        gather_samples(urls, on_error=flow.told if args.on_error == "skip" else raise_error)
    )
    with Workplace(_command(args), args.working_dir) as place:
        for done in each(stream, place, args.parallel, not args.unordered):
            if (now := _outcome(done, args, counts)) is not None:
                yield now


def _outcome(done: Done, args: argparse.Namespace, counts: _Counts) -> EncodedSamples | None:
    from penstock.cli.tools.shell_command import echo
    from penstock.errors import StageError

    counts.samples += 1
    if done.problem is None:
        if not args.silent:
            echo(done.printed)
        counts.gone += done.encoded is None
        return done.encoded
    counts.failed += 1
    if args.on_failure == "abort":
        printed = done.printed.decode("utf-8", "replace").strip()
        raise StageError(done.problem + (f"\n{printed}\n" if printed else ""), "proc", done.raw.key, done.raw.shard)
    echo(done.printed)
    what = "kept as it was" if args.on_failure == "keep" else "left out"
    sys.stderr.write(f"penstock: {what}: {done.problem} (shard: {done.raw.shard}, key: {done.raw.key})\n")
    return done.raw.encode() if args.on_failure == "keep" else None


def _command(args: argparse.Namespace) -> Any:
    from penstock.cli.tools.shell_command import Command

    shell = args.interpreter or shutil.which("bash") or "/bin/sh"
    script = os.path.abspath(args.script) if args.script is not None else None
    words = (shell, script) if script is not None else (shell, "-c", args.command)
    return Command(words, args.timeout, args.add_log)


@dataclass(frozen=True, slots=True)
class Convert:
    """Makes one shard of one shard; travels to other machines."""

    args: argparse.Namespace

    def __call__(self, source: str, target: str) -> ShardEntry:
        """Convert, and give what a manifest should say."""
        from penstock.formats.tar.shard_names import on_disk
        from penstock.formats.tar.writer import TarWriter
        from penstock.storage import local_path

        counts = _Counts()
        if on_disk(target):
            os.makedirs(os.path.dirname(local_path(target)) or ".", exist_ok=True)
        with TarWriter(target, compress=self.args.compress) as writer:
            for parts in _parts(self.args, [source], counts):
                writer.write_encoded(parts)
        if counts.failed or counts.gone or self.args.verbose:
            sys.stderr.write(f"penstock: {source}: {counts}\n")
        assert writer.entry is not None
        return writer.entry


def _over_shards(args: argparse.Namespace) -> int:
    from penstock.cli.tools import shard_jobs as shards
    from penstock.cli.tools.shell_command import stop_all

    if args.filelist is not None or not args.inputs or "-" in args.inputs:
        wrong("with {} in the output name the shards: standard input is none of many")
    planned = shards.pairs(args.inputs, args.output)
    convert = Convert(args)
    if args.engine == "ray":
        tally = shards.convert_all(planned, shards.on_ray(convert, args.parallel), args.jobs, fresh=args.fresh)
    else:
        pool, start = shards.on_threads(convert, args.jobs)
        try:
            tally = shards.convert_all(planned, start, args.jobs, fresh=args.fresh)
        finally:
            stop_all()
            pool.shutdown(cancel_futures=True)
    left = f", {tally.there:,} were there" * bool(tally.there) + f", {tally.failed:,} failed" * bool(tally.failed)
    sys.stderr.write(f"penstock: {tally.done:,} shards done{left}\n")
    return 1 if tally.failed else 0
