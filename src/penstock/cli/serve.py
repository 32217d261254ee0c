"""``penstock serve``: serve the batches of a dataset to consumers on this and other machines."""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from penstock.cli import counted
from penstock.cli.argument_types import positive_count, seconds, size_argument
from penstock.dataset.programs import load_attribute
from penstock.errors import PlanError

if TYPE_CHECKING:
    from rich.console import Group

    from penstock.serving import Server

_REFRESH_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dataset", metavar="MODULE:DATASET", help="the dataset, or a function that returns it: train.py:ds"
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:7070",
        help="where to listen (127.0.0.1:7070); other hosts than this one need a token, and TLS or --insecure",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the file with the token that consumers show (PENSTOCK_TOKEN_FILE, or PENSTOCK_TOKEN)",
    )
    parser.add_argument("--certificate", metavar="FILE", help="the certificate of this server, in PEM, for TLS")
    parser.add_argument("--key", metavar="FILE", help="the private key of the certificate")
    parser.add_argument(
        "--client-ca", metavar="FILE", help="accept only consumers with a certificate signed by this one"
    )
    parser.add_argument("--insecure", action="store_true", help="serve other hosts without TLS")
    parser.add_argument(
        "--health", metavar="HOST:PORT", help="answer GET /health there: 200 while serving, 503 while ending"
    )
    parser.add_argument(
        "--ready", type=size_argument, metavar="SIZE", default=64e6, help="bytes kept ready for each consumer (64MB)"
    )
    parser.add_argument(
        "--idle",
        type=seconds,
        metavar="SECONDS",
        default=60.0,
        help="end the run of a consumer that takes nothing (60)",
    )
    parser.add_argument("--max-consumers", type=positive_count, default=256, help="consumers at a time (256)")
    parser.add_argument("--quiet", action="store_true", help="show no table")
    parser.epilog = """examples:
  penstock serve train.py:ds --health 127.0.0.1:7071
  penstock serve train.py:ds --listen 0.0.0.0:7070 --token-file token --certificate server.pem --key server.key"""


def run(args: argparse.Namespace) -> int:
    from penstock.dataset import Dataset
    from penstock.serving import serve
    from penstock.serving.access import read_token

    token = None if args.token_file is None else read_token(args.token_file)
    dataset = load_attribute(args.dataset)
    if not isinstance(dataset, Dataset) and callable(dataset):
        try:
            inspect.signature(dataset).bind()
        except TypeError as exc:
            raise PlanError(f"{args.dataset} cannot be called without arguments to get a dataset: {exc}") from None
        dataset = dataset()
    if not isinstance(dataset, Dataset):
        raise PlanError(f"{args.dataset} is a {type(dataset).__name__}, not a dataset or a function that returns one")
    ended: SimpleQueue[None] = SimpleQueue()  # unlike an event, it may be set while this thread waits for it
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, lambda *_: ended.put(None)) if in_main_thread else None
    try:
        with serve(
            dataset,
            args.listen,
            token,
            certificate=args.certificate,
            key=args.key,
            client_ca=args.client_ca,
            insecure=args.insecure,
            ready=int(args.ready),
            idle_s=args.idle,
            max_consumers=args.max_consumers,
            health=args.health,
        ) as server:
            _announce(server)
            _show_until(ended, server, quiet=args.quiet)
            sys.stderr.write("penstock: ending; consumers move to other servers\n")
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous)
    return 0


def _announce(server: Server) -> None:
    health = "" if server.health_url is None else f", health at {server.health_url}"
    sys.stdout.write(f"serving at {server.address}{health}, process {os.getpid()}\n")
    sys.stdout.flush()


def _show_until(ended: SimpleQueue[None], server: Server, *, quiet: bool) -> None:
    """Wait for the end; meanwhile, in a terminal, show the rates of the consumers and of the stages."""
    if quiet or not sys.stderr.isatty():
        ended.get()
        return
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        ended.get()
        return
    rates = ConsumerRates()
    with Live(console=Console(stderr=True), auto_refresh=False) as live:
        while True:
            with suppress(Empty):
                ended.get(timeout=_REFRESH_S)
                return
            live.update(serving_table(server, rates), refresh=True)


class ConsumerRates:
    """Computes rates from the totals of two calls."""

    def __init__(self) -> None:
        self._last: dict[tuple[Any, ...], tuple[float, int, int]] = {}

    def update(self, consumers: list[dict[str, Any]], now: float) -> list[tuple[str, str, float, float, float]]:
        """Return, for each consumer, its rank, its address, batches and megabytes per second, and megabytes ready."""
        rows, seen = [], {}
        for consumer in consumers:
            name = (consumer["peer"], consumer["rank"], consumer["world"])
            then, batches, nbytes = self._last.get(name, (now - max(consumer["seconds"], 1e-3), 0, 0))
            took = max(now - then, 1e-3)
            seen[name] = (now, consumer["batches"], consumer["bytes"])
            rates = ((consumer["batches"] - batches) / took, (consumer["bytes"] - nbytes) / took / 1e6)
            rank = f"{consumer['rank']} of {consumer['world']}"
            rows.append((rank, consumer["peer"], *rates, consumer["ready_bytes"] / 1e6))
        self._last = seen
        return rows


def serving_table(server: Server, rates: ConsumerRates) -> Group:
    """Return the table that is shown: a line for each consumer, then the stages and the bottleneck."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from penstock.engines.report import table

    rows = rates.update(server.consumers(), time.monotonic())
    title = Text(f"{server.address}: {counted(len(rows), 'consumer')}")
    grid = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("rank", "from", "batches/s", "MB/s", "MB ready"):
        grid.add_column(heading, justify="left" if heading in ("rank", "from") else "right", no_wrap=True)
    for rank, peer, batches, megabytes, ready in sorted(rows):
        grid.add_row(rank, peer, f"{batches:,.1f}", f"{megabytes:,.1f}", f"{ready:,.1f}")
    return Group(title, grid, table(server.stats()))
