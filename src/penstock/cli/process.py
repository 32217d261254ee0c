"""``penstock process``: call a function on files, exactly once for each, even across interrupted runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.cli import counted
from penstock.cli.argument_types import add_engine, count, positive_count, seconds, usage_error
from penstock.dataset.programs import NOT_A_FUNCTION, load_function
from penstock.errors import PenstockError, PlanError

if TYPE_CHECKING:
    from penstock.jobs import Processed

_MAX_FAILURES = 20  # listed one by one; --json has all of them
_METADATA_EXTENSIONS = (".parquet", ".csv", ".tsv", ".jsonl", ".json", ".ndjson")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "function", metavar="MODULE:FUNCTION", help="the function, called with (path, out): jobs:split or jobs.py:split"
    )
    parser.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="+",
        help="files, globs, folders or URLs; @FILE reads inputs from FILE, one per line",
    )
    parser.add_argument("--out", default="outputs/", help="the output folder: a path or URL (outputs/)")
    parser.add_argument(
        "--metadata", metavar="FILE", type=_metadata_file, help="a .parquet, .csv, .tsv or .jsonl file for the rows"
    )
    parser.add_argument("--workers", "-w", type=positive_count, default=8, help="inputs processed at a time (8)")
    parser.add_argument(
        "--on", choices=("processes", "threads"), default="processes", help="run in processes or threads (processes)"
    )
    parser.add_argument("--retries", type=count, default=2, help="how often a failed call is repeated (2)")
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="maximum duration of one call")
    parser.add_argument(
        "--only", type=positive_count, metavar="N", help="try the first N inputs in this process and print the rows"
    )
    parser.add_argument("--fresh", action="store_true", help="remove the outputs of this job and start over")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are not outputs of this job")
    add_engine(parser, "where workers run")
    parser.add_argument("--address", help="address of the Ray cluster, with --engine ray")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.epilog = """examples:
  penstock process jobs.py:split 'audio/*.wav' --out windows/ --metadata windows.parquet
  penstock process jobs.py:split 'audio/*.wav' --only 2"""


def _metadata_file(text: str) -> str:
    if not text.endswith(_METADATA_EXTENSIONS):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in one of {', '.join(_METADATA_EXTENSIONS)}")
    return text


def run(args: argparse.Namespace) -> int:
    if not all(args.function.rpartition(":")[::2]):
        usage_error(NOT_A_FUNCTION.format(args.function))
    if args.address is not None and args.engine != "ray":
        usage_error("--address needs --engine ray")
    if args.timeout is not None and args.on == "threads" and args.engine != "ray":
        usage_error("--timeout needs --on processes: a thread cannot be stopped")
    from penstock.jobs import process

    function = load_function(args.function)
    try:
        processed = process(
            _read_inputs(args.inputs),
            function,
            args.out,
            args.metadata,
            args.workers,
            args.on,
            args.retries,
            None if args.engine == "local" else args.engine,
            timeout_s=args.timeout,
            only=args.only,
            fresh=args.fresh,
            overwrite=args.overwrite,
            address=args.address,
        )
    except PenstockError:
        raise
    except Exception:
        if args.only is None:
            raise
        traceback.print_exc()  # raised by the user's function: a trial is there to show it
        return 1
    if args.json:
        sys.stdout.write(f"{json.dumps(_result(processed), default=str)}\n")
    else:
        _print_summary(processed, trial=args.only is not None)
    return 1 if processed.failures else 0


def _read_inputs(arguments: list[str]) -> list[str]:
    inputs = []
    for argument in arguments:
        if argument.startswith("@") and not os.path.lexists(argument):
            try:
                with open(argument[1:], encoding="utf-8", errors="surrogateescape") as lines:
                    inputs += [line.rstrip("\n") for line in lines if line.strip()]
            except OSError as exc:
                raise PlanError(f"{argument}: cannot read the list of inputs: {exc.strerror}") from exc
        else:
            inputs.append(argument)
    return inputs


def _result(processed: Processed) -> dict[str, Any]:
    failed = len(processed.failures)
    return {
        "inputs": processed.inputs,
        "done": processed.inputs - failed,
        "worked": processed.worked,
        "failed": failed,
        "rows": len(processed),
        "failures": [asdict(failure) for failure in processed.failures],
    }


def _print_summary(processed: Processed, *, trial: bool) -> None:
    if trial:
        for row in processed:
            sys.stdout.write(f"{json.dumps(row, default=str, ensure_ascii=False)}\n")
    done = processed.inputs - len(processed.failures)
    done_before = processed.inputs - processed.worked
    earlier = f" ({done_before:,} in earlier runs)" if done_before else ""
    sys.stdout.write(f"{done:,} of {processed.inputs:,} inputs done{earlier}, {counted(len(processed), 'row')}\n")
    for failure in processed.failures[:_MAX_FAILURES]:
        sys.stderr.write(f"failed: {failure.input}: {failure.error}\n")
    if len(processed.failures) > _MAX_FAILURES:
        more = len(processed.failures) - _MAX_FAILURES
        sys.stderr.write(f"failed: {more:,} more inputs; --json lists all of them, with tracebacks\n")
