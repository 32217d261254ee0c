"""One run of an epoch by servers: batches arrive in the order of the stream, whichever server sends them.

The intended behaviour:
- batch i comes from server i mod k if the plan allows it, otherwise one server at a time sends them all;
- a server that fails, hangs, ends or differs is left out: the run continues after the last batch that was delivered,
  with the servers that are left, or waits until there is one and logs what it waits for; a connection that ends is
  logged at once, also while batches that arrived are still being used;
- a server that is new or back is used from the next batch on.
Any deviation is a bug.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.engines import DeliveryCallback, Meters, Start, check_limit, closed_at_exit, log_skipped
from penstock.errors import EngineError
from penstock.order import total
from penstock.plan import Place, Skipped
from penstock.serving.batch_codec import decode_message
from penstock.serving.requests import BatchRequest, error_from_json
from penstock.serving.server import flight
from penstock.serving.servers import RemoteServer, ServerLost, Servers
from penstock.serving.stream import END, MOVED

log = logging.getLogger("penstock")

SILENCE_S = 10.0  # a server that works sends something every second
AHEAD_BYTES = 64_000_000  # received ahead of the consumer, from all servers together
_JOIN_S = 5.0
_PEAK_S = 0.25  # the rate of the network is measured over at least that time


@dataclass(slots=True)
class Traffic:
    """What arrived from servers, and what limits it."""

    nbytes: int = 0
    batches: int = 0
    waiting_for_network: int = 0  # batches for which the consumer waited while the server had more of them ready
    waited_for: int = 0  # batches for which the consumer waited
    peak: float = 0.0  # bytes per second
    _since: float = field(default_factory=time.monotonic)
    _bytes_since: int = 0

    def add(self, nbytes: int) -> None:
        """Count what has arrived."""
        self.nbytes += nbytes
        self.batches += 1
        self._bytes_since += nbytes
        took = time.monotonic() - self._since
        if took >= _PEAK_S:
            self.peak = max(self.peak, self._bytes_since / took)
            self._since, self._bytes_since = time.monotonic(), 0


class _Arrived:
    """A message, decoded."""

    __slots__ = ("header", "item", "nbytes", "ready", "tables")

    def __init__(self, batch: Any, ready: int) -> None:
        self.header, self.item, self.tables = decode_message(batch)
        self.nbytes, self.ready = batch.nbytes, ready


class _BatchReader:
    """Reads the batches of one server ahead of the consumer, in a thread."""

    def __init__(self, server: RemoteServer, request: BatchRequest, max_bytes: int) -> None:
        self.server = server
        self._request, self._max_bytes = request, max_bytes
        self._changed = threading.Condition()
        self._arrived: deque[_Arrived] = deque()
        self._bytes = 0
        self._alive_at = time.monotonic()
        self._error: BaseException | None = None
        self._closed = False
        self._reader: Any = None
        self._thread = threading.Thread(target=self._read, name="penstock receive", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with self.server.reported():
                ticket = flight().Ticket(json.dumps(self._request.to_json(), separators=(",", ":")).encode())
                self._reader = self.server.client().do_get(ticket, self.server.options())
                if self._closed:
                    return
                while self._put(self._reader.read_chunk()):
                    pass
        except StopIteration:
            self._fail(ServerLost("it ended the connection"))
        except BaseException as exc:
            self._fail(exc)
        finally:
            self._cancel()

    def _put(self, chunk: Any) -> bool:
        """Add what has arrived, when there is room; return whether more is expected."""
        metadata = chunk.app_metadata.to_pybytes() if chunk.app_metadata is not None else b"-1"
        if metadata == MOVED.encode():
            self._fail(_Moved())
            return False
        ready = int(metadata)
        message = None if ready < 0 else _Arrived(chunk.data, ready)
        with self._changed:
            self._alive_at = time.monotonic()
            if message is None:
                return not self._closed
            self._changed.wait_for(lambda: self._closed or not self._arrived or self._bytes < self._max_bytes)
            if self._closed:
                return False
            self._alive_at = time.monotonic()
            self._arrived.append(message)
            self._bytes += message.nbytes
            self._changed.notify_all()
        return not (END in message.header or "error" in message.header)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, ServerLost) and not isinstance(error, _Moved) and not self._closed:
            log.warning("%s: the connection is lost: %s", self.server.address, error)  # before it is missed
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def next(self, silence_s: float) -> _Arrived:
        """Return the next message.

        Raises:
            ServerLost: The server failed, or was silent for too long.
            PenstockError: The server reports that the request is wrong.
        """
        with self._changed:
            while not self._arrived:
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise EngineError("the run was closed while it was being read")
                silent = time.monotonic() - self._alive_at
                if silent > silence_s:
                    raise ServerLost(f"it has been silent for {silent:.0f} s")
                self._changed.wait(min(1.0, silence_s - silent + 0.01))
            message = self._arrived.popleft()
            self._bytes -= message.nbytes
            self._changed.notify_all()
            return message

    def _cancel(self) -> None:
        reader = self._reader
        if reader is not None:
            try:
                reader.cancel()
            except Exception:  # the connection is gone
                log.debug("a stream could not be cancelled", exc_info=True)

    def close(self) -> None:
        """End the stream."""
        with self._changed:
            self._closed = True
            self._arrived.clear()
            self._changed.notify_all()
        self._cancel()

    def join(self) -> None:
        """Wait for the thread."""
        self._thread.join(_JOIN_S)


class _Moved(ServerLost):
    """The server has given up the stream, but may accept another request."""


class RemoteRun:
    """A run of an epoch by servers; it has the methods of ``engines.Run``.

    Attributes:
        start: Where the run began.
        meters: What the run measures about itself.
        traffic: What arrived.
        servers_used: The addresses of the servers that send batches now.
    """

    def __init__(
        self,
        servers: Servers,
        make_request: Callable[[Start, tuple[int, int]], BatchRequest],
        start: Start,
        *,
        parse_start: Callable[[dict[str, Any]], Start],
        split: Callable[[Start], bool],
        rank: int,
        on_delivered: DeliveryCallback | None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Connect to no server yet.

        Args:
            servers: The servers.
            make_request: Returns the request for the batches after a start, or for a part of them.
            start: Where to begin.
            parse_start: Returns the start in the header of a message.
            split: Returns whether the batches after a start can be split among servers.
            rank: The rank of the consumer; ranks prefer different servers.
            on_delivered: Called with the samples of each item, before it is delivered.
            silence_s: A server that sends nothing for so long is left out.
        """
        self.start, self.meters, self.traffic = start, Meters(engine="servers"), Traffic()
        self.servers_used: list[str] = []
        self._servers, self._make_request, self._parse_start, self._split = servers, make_request, parse_start, split
        self._rank, self._on_delivered, self._silence_s = rank, on_delivered, silence_s
        self._after: Start | dict[str, Any] = start  # parsed when it is needed
        self._before: Start | dict[str, Any] = start
        self._skipped: list[Skipped] = []
        self._readers: list[_BatchReader] = []
        self._stopped = threading.Event()
        self._refresher: threading.Thread | None = None

    @closed_at_exit
    def __iter__(self) -> Generator[Any, None, None]:
        """Yield the items; ``here()`` is exact after each.

        Raises:
            PenstockError: A sample failed, after the items before it.
        """
        self.meters.begun = time.perf_counter()
        self._refresher = threading.Thread(
            target=self._servers.refresh_regularly, args=(self._stopped,), name="penstock servers", daemon=True
        )
        self._refresher.start()
        said_at, ended = time.monotonic(), False
        try:
            while not ended:
                if self._stopped.is_set():
                    return
                if not self._servers.usable():
                    with self._waiting():
                        said_at = self._servers.wait(said_at)
                    continue
                try:
                    ended = yield from self._from_servers()
                except ServerLost:
                    self._close_readers()
        finally:
            self.close()
        self._after = self.start.after(None, None)
        log_skipped(self._skipped)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time as one in which the consumer waits."""
        self.meters.waiting_since = begun = time.perf_counter()
        try:
            yield
        finally:
            self.meters.waiting_since = None
            self.meters.waited += time.perf_counter() - begun

    def _from_servers(self) -> Generator[Any, None, bool]:
        """Yield items while the set of servers stays as it is; return whether the run has ended.

        Raises:
            ServerLost: A server has to be left out, or to be asked again.
        """
        version, servers, start = self._servers.version, self._servers.usable(), self.here()
        split = len(servers) > 1 and self._split(start)
        if not split:
            servers = servers[self._rank % len(servers) :][:1]
        count = len(servers)
        self.servers_used = [str(server.address) for server in servers]
        self._readers = [
            _BatchReader(server, self._make_request(start, (number, count)), AHEAD_BYTES // count)
            for number, server in enumerate(servers)
        ]
        number = 0
        while True:
            message = self._next(self._readers[number % count])
            if END in message.header:
                for other, reader in enumerate(self._readers):  # samples after the last item, which gave no output
                    self._record(message if other == number % count else self._next(reader))
                return True
            self._before, self._after = self._after, message.header
            self._record(message)
            number += 1
            self.meters.items += 1
            yield message.item
            del message
            if self._stopped.is_set():
                return True
            if split and version != self._servers.version:
                self._close_readers()
                return False

    def _next(self, reader: _BatchReader) -> _Arrived:
        waited = self.meters.waited
        try:
            with self._waiting():
                message = reader.next(self._silence_s)
        except _Moved:
            raise
        except ServerLost as exc:
            self._servers.lose(reader.server, str(exc))
            raise
        reader.server.failures = 0
        self.traffic.add(message.nbytes)
        if self.meters.waited - waited > 1e-3:
            self.traffic.waited_for += 1
            self.traffic.waiting_for_network += message.ready > 0
        if "error" in message.header:
            error = error_from_json(message.header["error"])
            for note in message.header.get("notes", ()):
                error.add_note(str(note))
            raise error
        return message

    def _record(self, message: _Arrived) -> None:
        """Record the samples of a message: those that were skipped, and those that are delivered with it."""
        for place, stage, problem in message.header.get("skips", ()):
            facts: Any = (tuple(fact) if isinstance(fact, list) else fact for fact in place)
            self._skipped.append(Skipped(0, Place(*facts), stage, problem))
        if "skips" in message.header:
            check_limit(self._skipped, self._servers.facts.get("limit"), total(self.start.left))
        if self._on_delivered is not None:
            for rows, items in zip(message.tables, message.header.get("items", ()), strict=True):
                self._on_delivered(rows, items)

    def report_delivered(self) -> None:
        """Do nothing: the samples of an item are reported before it is delivered."""

    def skips_so_far(self) -> list[Skipped]:
        """Return the skipped samples before the cursor."""
        return list(self._skipped)

    def here(self) -> Start:
        """Return the start of a run that continues after the last item that was delivered."""
        if isinstance(self._after, dict):
            self._after = self._parse_start(self._after)
        return self._after

    def hold_back(self) -> None:
        """Count the last item as not delivered; the run must not be iterated any further."""
        self._after = self._before

    def _close_readers(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.close()
        for reader in readers:
            reader.join()

    def close(self) -> None:
        """End the run; a second call does nothing."""
        self._stopped.set()
        self._close_readers()
        if self.meters.ended is None:
            self.meters.ended = time.perf_counter()
        refresher = self._refresher
        if refresher is not None and refresher is not threading.current_thread():
            refresher.join(_JOIN_S)
