"""``penstock mix`` (``tarmix``): samples of several sources at random, by weights."""

from __future__ import annotations

import argparse
import json
import random
from importlib import import_module
from typing import Any

from penstock.cli.tools import choose, give_output, wrong


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    about = "sources, each one shard, pattern or folder; or one .json or .yaml file that lists them"
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=about)
    parser.add_argument(
        "-w", "--weights", metavar="W,W,...", help="how often each source is chosen, relative to the others (1 each)"
    )
    parser.add_argument(
        "--stop",
        choices=("first", "all"),
        default="first",
        help="end when one source is at its end, or when all are (first)",
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the order (0)")
    parser.add_argument("--rename", metavar="TEMPLATE", help="make keys of a template, as in penstock cat")
    give_output(parser)
    choose(parser)
    parser.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="what to do about samples that cannot be read (raise)",
    )
    parser.epilog = """A file lists sources so:
{"sources": [{"shards": "a-{00..09}.tar", "weight": 2}, {"shards": "b.tar"}]}

examples:
  penstock mix -w 0.7,0.3 'photos-{00..09}.tar' drawings.tar -o mixed.tar
  penstock mix mixture.yaml --stop all | penstock split -n 10000 -o mixed"""


def run(args: argparse.Namespace) -> int:
    """Mix until a source is at its end."""
    from penstock.cli.tools import streams as flow
    from penstock.tarstream.gather import find_shards, gather_samples, mix_streams, raise_error

    sources, weights = _described(args)
    bad = flow.told if args.on_error == "skip" else raise_error
    streams = [gather_samples(find_shards(source), on_error=bad) for source in sources]
    stream = mix_streams(streams, weights, random.Random(args.seed), all=args.stop == "all")
    with flow.outlet(args) as out:
        for parts in flow.selection(args).encode(stream):
            out.write_encoded(parts)
    return 0


def _described(args: argparse.Namespace) -> tuple[list[list[str]], list[float]]:
    """Read sources and weights, from the arguments or from a file."""
    if len(args.sources) == 1 and args.sources[0].endswith((".json", ".yaml", ".yml")):
        if args.weights is not None:
            wrong("the file says the weights: leave out -w")
        return _from_file(args.sources[0])
    weights = [1.0] * len(args.sources)
    if args.weights is not None:
        try:
            weights = [float(word) for word in args.weights.split(",")]
        except ValueError:
            wrong(f"{args.weights!r} are no weights: write them like 0.7,0.3")
    if len(weights) != len(args.sources):
        wrong(f"there are {len(args.sources)} sources and {len(weights)} weights")
    _check(weights)
    return [[source] for source in args.sources], weights


def _check(weights: list[float]) -> None:
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        wrong("weights are numbers from 0 on, and one of them is above")


def _from_file(name: str) -> tuple[list[list[str]], list[float]]:
    from penstock.errors import DataError, MissingExtra, StorageError

    try:
        with open(name, encoding="utf-8") as file:
            text = file.read()
        if name.endswith(".json"):
            found: Any = json.loads(text)
        else:
            found = import_module("yaml").safe_load(text)
    except ImportError as exc:
        raise MissingExtra("a mixture described in YAML (JSON needs nothing)", "all") from exc
    except OSError as exc:
        raise StorageError(f"cannot be read: {exc.strerror or exc}", name) from exc
    except Exception as exc:  # of one of two parsers, with errors of their own
        raise DataError(f"the description cannot be read: {exc}", name) from exc
    try:
        listed = found["sources"] if isinstance(found, dict) else found
        shards = [[one["shards"]] if isinstance(one["shards"], str) else list(one["shards"]) for one in listed]
        weights = [float(one.get("weight", one.get("probability", 1.0))) for one in listed]
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise DataError(f"sources must be a list, each with shards and a weight: {exc!r}", name) from exc
    if not shards:
        raise DataError("the description lists no source", name)
    _check(weights)
    return shards, weights
