"""``penstock mix`` (``tarmix``): mix the samples of several sources at random, by weight."""

from __future__ import annotations

import argparse
import json
import random
from importlib import import_module
from itertools import chain
from typing import Any

from penstock.cli import counted
from penstock.cli.argument_types import usage_error
from penstock.cli.tools.arguments import (
    add_old_letter,
    add_on_error_argument,
    add_output_arguments,
    add_selection_arguments,
    is_old_name,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="sources, each a shard, a pattern or a folder; or one .json or .yaml file that lists sources",
    )
    parser.add_argument(
        *["-w"] if is_old_name(parser) else [],
        "--weights",
        metavar="W,W,...",
        help="how often each source is chosen, relative to the others (1 each)",
    )
    parser.add_argument(
        "--stop",
        choices=("first", "all"),
        default="first",
        help="stop when the first source is exhausted, or when all are (first)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (0)")
    parser.add_argument("--rename", metavar="TEMPLATE", help="rename keys by a template, as in penstock cat")
    add_output_arguments(parser)
    add_selection_arguments(parser)
    add_on_error_argument(parser)
    add_old_letter(parser, "-w", "--weights")
    parser.epilog = """A JSON file lists sources like this; weights are 1 by default:
{"sources": [{"shards": "a-{00..09}.tar", "weight": 2}, {"shards": "b.tar"}]}

examples:
  penstock mix --weights 0.7,0.3 'photos-{00..09}.tar' drawings.tar -o mixed.tar
  penstock mix mixture.yaml --stop all | penstock split -n 10000 -o mixed"""


def run(args: argparse.Namespace) -> int:
    from penstock.cli.tools import streams
    from penstock.tarstream.gather import find_shards, gather_samples, mix_streams

    sources, weights = _sources_and_weights(args)
    on_error = streams.bad_sample_callback(args)
    shards = [find_shards(source) for source in sources]
    samples = [gather_samples(urls, on_error=on_error) for urls in shards]
    mixture = mix_streams(samples, weights, random.Random(args.seed), all=args.stop == "all")
    with streams.open_output(args, chain.from_iterable(shards)) as out:
        for encoded in streams.selection(args).encode(mixture):
            out.write_encoded(encoded)
    return 0


def _sources_and_weights(args: argparse.Namespace) -> tuple[list[list[str]], list[float]]:
    if len(args.sources) == 1 and args.sources[0].endswith((".json", ".yaml", ".yml")):
        if args.weights is not None:
            usage_error(f"-w does not work with {args.sources[0]}: write the weights into the file")
        return _read_mixture(args.sources[0])
    weights = [1.0] * len(args.sources)
    if args.weights is not None:
        try:
            weights = [float(weight) for weight in args.weights.split(",")]
        except ValueError:
            usage_error(f"{args.weights!r} is not a list of weights: write it like 0.7,0.3")
    if len(weights) != len(args.sources):
        usage_error(
            f"--weights has {counted(len(weights), 'weight')} for {counted(len(args.sources), 'source')}: "
            "give one for each"
        )
    _check_weights(weights)
    return [[source] for source in args.sources], weights


def _check_weights(weights: list[float]) -> None:
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        usage_error("weights must be 0 or more, and at least one must be above 0")


def _read_mixture(name: str) -> tuple[list[list[str]], list[float]]:
    """Read sources and weights from a JSON or YAML file."""
    from penstock.errors import DataError, PlanError, StorageError

    try:
        with open(name, encoding="utf-8") as file:
            text = file.read()
        if name.endswith(".json"):
            mixture: Any = json.loads(text)
        else:
            mixture = import_module("yaml").safe_load(text)
    except ImportError as exc:
        raise PlanError(f"{name}: a mixture in YAML needs `pip install pyyaml`; one in JSON does not") from exc
    except OSError as exc:
        raise StorageError(f"cannot read the mixture: {exc.strerror or exc}", name) from exc
    except Exception as exc:  # each of the two parsers has errors of its own
        raise DataError(f"the mixture cannot be parsed: {exc}", name) from exc
    try:
        sources = mixture["sources"] if isinstance(mixture, dict) else mixture
        shards = [
            [source["shards"]] if isinstance(source["shards"], str) else list(source["shards"]) for source in sources
        ]
        weights = [float(source.get("weight", source.get("probability", 1.0))) for source in sources]
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        expected = '{"sources": [{"shards": "a.tar", "weight": 2}, ...]}'
        raise DataError(f"the mixture is not of the form {expected}: {exc!r}", name) from exc
    if not shards:
        raise DataError("the mixture lists no sources", name)
    _check_weights(weights)
    return shards, weights
