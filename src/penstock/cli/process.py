"""``penstock process``: a function over files, each once, whatever happens in between."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock.cli.tools import positive, seconds, whole, wrong
from penstock.errors import PenstockError, PlanError

if TYPE_CHECKING:
    from penstock.jobs import Processed

_SHOWN = 20  # failures that are listed one by one
_HOW = "{!r}: give MODULE:FUNCTION, such as jobs:split or jobs.py:split"
_TABLES = (".parquet", ".csv", ".tsv", ".jsonl", ".json", ".ndjson")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "function", metavar="MODULE:FUNCTION", help="what is called with (path, out): jobs:split, or jobs.py:split"
    )
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="files, globs, folders, URLs; @FILE: one a line")
    parser.add_argument("--out", default="outputs/", help="the folder of outputs: a path or URL (outputs/)")
    parser.add_argument("--metadata", metavar="FILE", type=_table, help="a .parquet, .csv, .tsv or .jsonl file of rows")
    parser.add_argument("--workers", type=positive, default=8, help="inputs that are worked on at a time (8)")
    parser.add_argument("--on", choices=("processes", "threads"), default="processes", help="where (processes)")
    parser.add_argument("--retries", type=whole, default=2, help="how often a call that fails is repeated (2)")
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="how long one call may take")
    parser.add_argument("--only", type=positive, metavar="N", help="try the first N in this process and show rows")
    parser.add_argument("--fresh", action="store_true", help="remove the outputs that are there and begin anew")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are no outputs of this job")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where workers are (local)")
    parser.add_argument("--address", help="the Ray cluster")
    parser.add_argument("--json", action="store_true", help="tell what became of it as JSON")
    parser.epilog = "example: penstock process jobs.py:split 'audio/*.wav' --out windows/ --metadata windows.parquet"


def _table(text: str) -> str:
    if not text.endswith(_TABLES):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {', '.join(_TABLES)}")
    return text


def run(args: argparse.Namespace) -> int:
    """Process, and say what came of it: 1 if an input failed."""
    if not all(args.function.rpartition(":")[::2]):
        wrong(_HOW.format(args.function))
    if args.address is not None and args.engine != "ray":
        wrong("--address is for --engine ray")
    if args.timeout is not None and args.on == "threads" and args.engine != "ray":
        wrong("--timeout needs --on processes: a thread cannot be ended")
    from penstock.jobs import process  # here, as in all commands: help must be quick

    fn = found(args.function)
    try:
        answer = process(
            _inputs(args.inputs),
            fn,
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
        traceback.print_exc()  # the function's: what it is tried for
        return 1
    if args.json:
        sys.stdout.write(f"{json.dumps(_facts(answer), default=str)}\n")
    else:
        _tell(answer, args.only is not None)
    return 1 if answer.failures else 0


def found(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names.

    Raises:
        PlanError: there is none.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise PlanError(_HOW.format(name))
    sys.path.insert(0, os.getcwd())
    module = _loaded(place) if place.endswith(".py") else _imported(place)
    fn = getattr(module, attribute, None)
    if not callable(fn):
        have = [own for own, value in vars(module).items() if callable(value) and own[:1] != "_"]
        some = ", ".join(have[:8]) + (", ..." if len(have) > 8 else "")
        raise PlanError(f"{place} has no function {attribute!r}; it has {some or 'none'}")
    made: Callable[..., Any] = fn
    return made


def _imported(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and not (name + ".").startswith(exc.name + "."):
            raise  # it is there, and imports what is not
        raise PlanError(f"there is no module {name!r} here or among those installed") from exc


def _loaded(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise PlanError(f"there is no file {path!r}")
    name = os.path.splitext(os.path.basename(path))[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    import_module("cloudpickle").register_pickle_by_value(module)  # workers elsewhere cannot import it
    return module


def _inputs(given: list[str]) -> list[str]:
    out = []
    for one in given:
        if one.startswith("@") and not os.path.lexists(one):
            try:
                with open(one[1:], encoding="utf-8") as lines:
                    out += [line.rstrip("\n") for line in lines if line.strip()]
            except OSError as exc:
                raise PlanError(f"{one}: {exc.strerror}") from exc
        else:
            out.append(one)
    return out


def _facts(answer: Processed) -> dict[str, Any]:
    failed = len(answer.failures)
    return {
        "inputs": answer.inputs,
        "done": answer.inputs - failed,
        "worked": answer.worked,
        "failed": failed,
        "rows": len(answer),
        "failures": [asdict(one) for one in answer.failures],
    }


def _tell(answer: Processed, trial: bool) -> None:
    if trial:
        for row in answer:
            sys.stdout.write(f"{json.dumps(row, default=str, ensure_ascii=False)}\n")
    done = answer.inputs - len(answer.failures)
    before = answer.inputs - answer.worked
    past = f" ({before:,} before)" if before else ""
    sys.stdout.write(f"{done:,} of {answer.inputs:,} inputs done{past}, {len(answer):,} rows\n")
    for one in answer.failures[:_SHOWN]:
        sys.stderr.write(f"failed: {one.input}: {one.error}\n")
    if len(answer.failures) > _SHOWN:
        more = len(answer.failures) - _SHOWN
        sys.stderr.write(f"failed: and {more:,} more; --json lists all, with tracebacks\n")
