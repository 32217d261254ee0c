"""``connect``: a loader whose plan is run by servers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from penstock.dataset import Dataset
from penstock.engines import DeliveryCallback, Program, Restored, Start, Stats, snapshot, start_at, state_at
from penstock.errors import PlanError
from penstock.feed import BatchFormat, Loader, find_rank
from penstock.feed.ledger import SessionDataset
from penstock.order import I64, Piece, State, head, tail, total
from penstock.plan import Cut, Identity, check_count, check_seconds
from penstock.serving.access import find_token, read_certificate, read_secret_file
from penstock.serving.answers import identify
from penstock.serving.remote_run import SILENCE_S, RemoteRun, Traffic
from penstock.serving.requests import MAX_POSITIONS, BatchRequest, cut_json
from penstock.serving.servers import Credentials, Servers, address_source

_EPOCHS_KEPT = 4
_WAITING = 0.1  # the share of time from which a consumer counts as waiting


class RemoteBackend:
    """Asks servers what a loader wants to know about its plan."""

    worker_problem = "a loader from connect() receives its batches in the process that made it"

    def __init__(self, servers: Servers, cut: Cut, silence_s: float) -> None:
        """Ask nothing yet."""
        self.cut = cut
        self.servers, self._silence_s = servers, silence_s
        self._epochs: dict[int, dict[str, Any]] = {}
        self._position: tuple[dict[str, Any], dict[str, Any]] | None = None  # the last state and the answer about it
        self.traffic = Traffic()
        self.servers_used: list[str] = []
        self.last_run: RemoteRun | None = None
        self.closed = False

    @property
    def skips(self) -> bool:
        """Whether samples that fail are skipped."""
        return bool(self.servers.facts["skips"])

    @property
    def fixed_epoch(self) -> int | None:
        """The only epoch, if the plan fixes it."""
        fixed: int | None = self.servers.facts["fixed_epoch"]
        return fixed

    @property
    def unknown_count_cause(self) -> str | None:
        """What makes the number of items unknown before a run."""
        cause: str | None = self.servers.facts["unknown_count_cause"]
        return cause

    def _call(self, kind: str, **body: Any) -> Any:
        return self.servers.call(kind, lambda: self.closed, **body)

    def _epoch(self, epoch: int) -> dict[str, Any]:
        """Return what servers say about an epoch of this rank."""
        if epoch not in self._epochs:
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = self._call("epoch", cut=cut_json(self.cut), epoch=epoch)
        return self._epochs[epoch]

    def length(self) -> int | None:
        known: int | None = self._epoch(self.fixed_epoch or 0)["length"]
        return known

    def first_start(self, epoch: int) -> Start:
        return self._start_of(self._epoch(epoch)["state"], epoch)

    def _start_of(self, state: Mapping[str, Any], epoch: int) -> Start:
        return start_at(self.cut, State.from_json(state), self._epoch(epoch)["pad"])

    def whole(self, epoch: int) -> list[Piece]:
        pieces: list[Piece] = self._epoch(epoch)["whole"]
        return pieces

    def _about(self, epoch: int, start: Start) -> dict[str, Any]:
        """Return what servers say about a position."""
        state = self._wire_state(epoch, start)
        if self._position is None or self._position[0] != state:
            self._position = (state, self._call("position", cut=cut_json(self.cut), state=state))
        return self._position[1]

    def is_untouched(self, epoch: int, start: Start) -> bool:
        return bool(self._about(epoch, start)["untouched"])

    def count_items(self, epoch: int, start: Start) -> int | None:
        known: int | None = self._about(epoch, start)["items"]
        return known

    def start_run(self, epoch: int, start: Start, on_delivered: DeliveryCallback | None) -> RemoteRun:
        repeats = not start.left and start.pad is not None and not start.opens
        traced = on_delivered is not None

        def request(here: Start, part: tuple[int, int]) -> BatchRequest:
            if repeats:
                assert here.pad is not None
                return BatchRequest(self.cut, None, (epoch, here.pad), part, traced)
            return BatchRequest(self.cut, self._wire_state(epoch, here), None, part, traced)

        def parse(header: dict[str, Any]) -> Start:
            if repeats:
                return replace(start, quota=header["quota"])
            return self._start_of(header["after"], epoch)

        run = RemoteRun(
            self.servers,
            request,
            start,
            parse_start=parse,
            split=lambda here: not repeats and bool(self._about(epoch, here)["split"]),
            rank=self.cut.rank,
            on_delivered=on_delivered,
            silence_s=self._silence_s,
        )
        self.last_run = run
        return run

    def state(self, epoch: int, start: Start, counts: dict[str, Any]) -> dict[str, Any]:
        template = replace(State.from_json(self._epoch(epoch)["state"]), counted=counts or None)
        return state_at(template, start).to_json()

    def _wire_state(self, epoch: int, start: Start) -> dict[str, Any]:
        return self.state(epoch, start, {} if start.quota is None else {"quota": start.quota})

    def restore(self, given: Sequence[Mapping[str, Any]]) -> Restored:
        answer = self._call("restore", cut=cut_json(self.cut), states=[dict(state) for state in given])
        states = [State.from_json(state) for state in answer["states"]]
        own, epoch = answer["own"], int(answer["state"]["epoch"])
        start = self._start_of(answer["state"], epoch)
        return Restored(epoch, start, answer["padding_items"], states, None if own is None else states[own])

    def identities(self, epoch: int, pieces: Sequence[Piece]) -> Iterable[Identity]:
        for page in _pages(pieces):
            for leaf, shard, index in self._call("identities", epoch=epoch, pieces=page):
                yield Identity(leaf, shard, index)

    def session_dataset(self, epoch: int) -> SessionDataset:
        answer = self._call("session", epoch=epoch)
        facts = (answer["name"], answer["size"], answer["times"], answer["loose"])
        return SessionDataset(*facts, lambda: self._call("shards"))

    def dropped_rows(self, epoch: int, pieces: Sequence[Piece]) -> Iterable[I64]:
        for page in _pages(pieces):
            for rows in self._call("dropped", epoch=epoch, pieces=page):
                yield np.array(rows, np.int64)


def _pages(pieces: Sequence[Piece]) -> Iterable[list[Piece]]:
    """Yield pieces in lists that a server answers at once."""
    rest = [list(piece) for piece in pieces]
    while total(rest):
        yield head(rest, MAX_POSITIONS // 2)
        rest = tail(rest, MAX_POSITIONS // 2)


class Feed(Loader):
    """A loader whose batches come from servers; it has everything that ``Dataset.loader`` has.

    The batches are those of ``ds.loader(rank, world)`` in the same order, and states are exchangeable with those of
    such a loader. While no server answers it waits, and logs what it waits for.
    """

    def __init__(self, backend: RemoteBackend, cut: Cut, epoch: int, **options: Any) -> None:
        """Use ``connect`` to create one."""
        self._remote = backend
        Loader.__init__(self, None, cut, epoch, backend=backend, **options)

    @property
    def servers(self) -> list[str]:
        """The addresses of the servers that answer."""
        return [str(server.address) for server in self._remote.servers.usable()]

    def explain(self) -> str:
        """Describe how batches reach this loader: which servers send which."""
        facts, servers = self._remote.servers.facts, self.servers
        lines = [f"rank {self.cut.rank} of {self.cut.world}, servers: {', '.join(servers) or 'none'}"]
        if facts["split_problem"] is None:
            lines.append("batch i comes from server i mod the number of servers")
        else:
            lines.append(f"one server at a time sends all batches, because {facts['split_problem']}")
        lines += [f"stage: {stage}" for stage in facts["identity"]["stages"]]
        return "\n".join(lines)

    def stats(self) -> Stats:
        """Return what the current or last run did so far; the sentence says whether the network is the limit."""
        run = self._remote.last_run
        stats = snapshot(self._meters)
        return stats if run is None else replace(stats, bottleneck=_sentence(run, stats))

    def close(self) -> None:
        """End the live iterator and the connections; a new iterator continues where it stopped."""
        Loader.close(self)
        self._remote.servers.close()


def _sentence(run: RemoteRun, stats: Stats) -> str:
    traffic, seconds = run.traffic, max(stats.seconds, 1e-9)
    rate, peak = traffic.nbytes / seconds, max(traffic.peak, traffic.nbytes / seconds)
    unit, name = (1e9, "GB/s") if peak >= 1e8 else (1e6, "MB/s")
    amount = f"{rate / unit:.2g} of {peak / unit:.2g} {name}"
    if traffic.batches < 3:
        return "too few batches to tell what is the limit"
    if run.meters.waiting() < _WAITING * seconds:
        return f"the consumer is the limit: it waits for batches {run.meters.waiting() / seconds:.0%} of the time"
    if 2 * traffic.waiting_for_network > traffic.waited_for:
        return f"the network is the limit: {amount}"
    servers = len(run.servers_used)
    return f"the servers are the limit ({servers} in use, {amount}): add servers, or workers to their slowest stage"


def connect(
    addresses: str | os.PathLike[str] | Sequence[str],
    token: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    plan: Dataset | None = None,
    insecure: bool = False,
    timeout_s: float = 60,
    *,
    epoch: int | None = None,
    cut: Literal["range", "step"] = "range",
    uneven: Literal["keep", "drop", "pad"] | None = None,
    ledger: str | os.PathLike[str] | None = None,
    format: Literal["numpy", "torch", "jax"] | None = None,
    device: Any = None,
    dtypes: Any = None,
    pin_memory: bool | None = None,
    prefetch: int = 2,
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    silence_s: float = SILENCE_S,
) -> Feed:
    """Return a loader whose batches come from servers that ``serve`` the dataset.

    Args:
        addresses: An address such as ``grpc://host:7070``, a list of them, or the path of a file with one address per
            line. A name with several IP addresses stands for several servers. New lines and new IP addresses are used
            while the loader runs.
        token: The token of the servers; by default ``PENSTOCK_TOKEN``, or the content of ``PENSTOCK_TOKEN_FILE``.
        rank: The rank of this process; by default that of torch.distributed, Ray Train or the environment.
        world: The number of ranks; by default found like ``rank``.
        plan: The dataset that the servers must serve; it is read here only to compare it.
        insecure: Connect to other machines without encryption.
        timeout_s: How long to wait for a first server.
        epoch: The first epoch.
        cut: How the order is cut into ranks, as for ``Dataset.loader``.
        uneven: What to do about ranks of different lengths, as for ``Dataset.loader``.
        ledger: A local folder in which the loader records the samples of every step.
        format: The library whose arrays are delivered.
        device: Where they are put.
        dtypes: The type of every array, or a type by field.
        pin_memory: Whether torch copies to the device from pinned memory.
        prefetch: Items to keep ready on the device.
        ca: A file with the certificate that signed the servers' certificates; by default what the system trusts.
        certificate: A file with the certificate of this consumer, if servers ask for one.
        key: The file with its private key.
        silence_s: A server that sends nothing for so long is left out.

    Raises:
        EngineError: No server answers in time.
        MissingExtra: pyarrow, or the library of ``format``, is not installed.
        PlanError: An argument is invalid, an address is not protected, or a server has another plan.
        StorageError: A certificate cannot be read.
    """
    check_seconds("timeout_s", timeout_s)
    check_seconds("silence_s", silence_s)
    if format is None and not (device is None and dtypes is None and pin_memory is None):
        raise PlanError("device=, dtypes= and pin_memory= need a format, such as format='torch'")
    converted = None if format is None else BatchFormat(format, device, dtypes, pin_memory, prefetch)
    pair = read_certificate(certificate, key)
    root = None if ca is None else read_secret_file(ca, "the certificate of the servers")
    rank, world = find_rank(rank, world)
    own = Cut(rank, world, cut, uneven or ("drop" if world > 1 else "keep"))
    if not isinstance(plan, Dataset | None):
        raise PlanError(f"plan={plan!r:.80}: give the dataset that is served")
    expected = None if plan is None else identify(Program(plan.plan))
    servers = Servers(address_source(addresses), Credentials(find_token(token), insecure, root, pair), expected)
    try:
        servers.wait_for_first(timeout_s)
        fixed = servers.facts["fixed_epoch"]
        if fixed is not None and epoch not in (None, fixed):
            raise PlanError(f"connect(epoch={epoch}): the servers' dataset fixes epoch {fixed}")
        first = check_count("epoch", epoch or 0) if fixed is None else fixed
        backend = RemoteBackend(servers, own, silence_s)
        feed = Feed(backend, own, first, ledger=ledger, format=converted)
        backend.first_start(first)  # raises if the plan cannot be cut as the loader does
        return feed
    except BaseException:
        servers.close()
        raise
