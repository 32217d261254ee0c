"""A server of batches over Arrow Flight. It keeps nothing about its consumers: any server of the plan can continue.

The intended behaviour:
- a consumer that waits costs at most ``ready`` bytes, and after ``idle_s`` its run is ended: it asks again later;
- a consumer that is gone, silent or malformed costs a connection, and others are served meanwhile;
- close: new requests are refused, consumers are told to move on after their current batch, then the pools end.
Any deviation is a bug.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from penstock.dataset import Dataset
from penstock.engines import Pipeline, Stats, snapshot
from penstock.errors import EngineError, PenstockError, PlanError, import_extra
from penstock.plan import check_count, check_seconds, size_in_bytes
from penstock.serving.access import (
    Address,
    Token,
    check_listen,
    find_token,
    parse_address,
    read_certificate,
    read_secret_file,
)
from penstock.serving.answers import Answers
from penstock.serving.batch_codec import message_schema
from penstock.serving.health import HealthServer
from penstock.serving.requests import BatchRequest, Unavailable, error_json, parse_request
from penstock.serving.stream import BatchStream

log = logging.getLogger("penstock")

READY_BYTES = 64_000_000  # for each consumer
CONSUMER_IDLE_S = 60.0  # a consumer that takes nothing for so long asks again
MAX_CONSUMERS = 256  # streams at the same time
MOVE_S = 5.0  # how long a server that ends waits for its consumers to move
_SHUTDOWN_S = 5.0
_CHECK_S = 1.0


def flight() -> Any:
    """Return the module ``pyarrow.flight``.

    Raises:
        MissingExtra: It is not installed.
    """
    return import_extra("pyarrow.flight", "serving", "tables")


class Server:
    """A running server; ``close`` ends it. Use ``serve`` to create one.

    Attributes:
        address: The address at which it listens, for ``connect``.
        health_url: The URL at which it reports its health; None if it does not.
    """

    def __init__(
        self,
        dataset: Dataset,
        address: Address,
        token: Token | None,
        *,
        certificate: tuple[bytes, bytes] | None,
        client_ca: bytes | None,
        ready: int,
        idle_s: float,
        max_consumers: int,
        health: Address | None,
    ) -> None:
        self._pipeline = Pipeline(dataset.plan)
        self._answers = Answers(self._pipeline)
        self._ready, self._idle_s, self._max_consumers = ready, idle_s, max_consumers
        self._streams: set[BatchStream] = set()
        self._lock = threading.Lock()
        self._closing, self._closed = threading.Event(), threading.Event()
        self._flight = _flight_server(self, address, token, certificate, client_ca)
        self.address = str(Address(address.host, self._flight.port, address.tls or certificate is not None))
        try:
            self._health = None if health is None else HealthServer(health, self._health_report)
        except BaseException:
            self._flight.shutdown()
            raise
        self.health_url = None if self._health is None else self._health.url
        self._watcher = threading.Thread(target=self._watch, name="penstock server", daemon=True)
        self._watcher.start()

    def answer(self, kind: str, body: bytes) -> bytes:
        """Answer a question about the plan.

        Raises:
            PenstockError: The question is malformed, or the plan cannot answer it.
        """
        action = self._answers.actions.get(kind)
        if action is None:
            raise PlanError(f"this server does not answer {kind!r:.40}")
        return json.dumps(action(parse_request(body)), separators=(",", ":")).encode()

    def open_stream(self, ticket: bytes, peer: str) -> BatchStream:
        """Begin to run the batches of a request.

        Raises:
            Unavailable: The server is ending, or has too many consumers.
            PenstockError: The request is malformed, or does not fit the plan.
        """
        request = BatchRequest.from_json(parse_request(ticket))
        with self._lock:
            if self._closing.is_set():
                raise Unavailable("the server is ending")
            if len(self._streams) >= self._max_consumers:
                raise Unavailable(f"the server has {self._max_consumers} consumers, which is its limit")
            stream = BatchStream(self._pipeline, self._answers, request, self._ready, peer)
            self._streams.add(stream)
        return stream

    def stream_ended(self, stream: BatchStream) -> None:
        """Forget a stream."""
        stream.close()
        with self._lock:
            self._streams.discard(stream)

    def _watch(self) -> None:
        """End the runs of idle consumers."""
        while not self._closed.wait(_CHECK_S):
            for stream in self._open_streams():
                if stream.close_idle(self._idle_s):
                    log.info("ended the run of an idle consumer (%s), which asks again when it continues", stream.peer)

    def _open_streams(self) -> list[BatchStream]:
        with self._lock:
            return list(self._streams)

    def consumers(self) -> list[dict[str, Any]]:
        """Return, for each consumer, its rank and world, batches and bytes so far, and seconds since it connected."""
        rows = []
        for stream in self._open_streams():
            cut, counts = stream.request.cut, stream.counts
            rows.append(
                {
                    "peer": stream.peer,
                    "rank": cut.rank,
                    "world": cut.world,
                    "batches": counts.batches,
                    "bytes": counts.nbytes,
                    "ready_bytes": stream.ready_bytes,
                    "seconds": time.monotonic() - counts.begun,
                }
            )
        return rows

    def stats(self) -> Stats:
        """Return what the pools did so far."""
        return snapshot(self._pipeline.meters)

    def _health_report(self) -> tuple[bool, dict[str, Any]]:
        serving = not self._closing.is_set()
        return serving, {"status": "serving" if serving else "ending", "consumers": len(self._open_streams())}

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the server is closed; return whether it is."""
        return self._closed.wait(timeout_s)

    def close(self) -> None:
        """End the server: consumers move on to other servers, then the pools end. A second call does nothing."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        for stream in self._open_streams():
            stream.close()
        deadline = time.monotonic() + MOVE_S
        while self._open_streams() and time.monotonic() < deadline:
            time.sleep(0.02)
        ending = threading.Thread(target=self._flight.shutdown, name="penstock shutdown", daemon=True)
        ending.start()
        ending.join(_SHUTDOWN_S)  # a consumer that takes nothing may hold its connection
        self._closed.set()
        for stream in self._open_streams():
            stream.join(_SHUTDOWN_S)
        self._pipeline.close()
        if self._health is not None:
            self._health.close()
        self._watcher.join(_SHUTDOWN_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Server({self.address!r})"


def _flight_server(
    server: Server, address: Address, token: Token | None, certificate: Any, client_ca: bytes | None
) -> Any:
    """Start the Flight server.

    Raises:
        EngineError: It cannot listen at the address.
    """
    arrow_flight = flight()

    class Authorization(arrow_flight.ServerMiddlewareFactory):  # type: ignore[misc, name-defined]
        def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
            given = headers.get("authorization", [])
            if token is not None and not (len(given) == 1 and token.matches(str(given[0]))):
                raise arrow_flight.FlightUnauthenticatedError("the token is missing or wrong")

    class FlightServer(arrow_flight.FlightServerBase):  # type: ignore[misc, name-defined]
        def do_action(self, context: Any, action: Any) -> list[bytes]:
            with _reported(arrow_flight):
                return [server.answer(action.type, action.body.to_pybytes())]

        def do_get(self, context: Any, ticket: Any) -> Any:
            with _reported(arrow_flight):
                stream = server.open_stream(ticket.ticket, context.peer())
            return arrow_flight.GeneratorStream(message_schema(), _until_ended(server, stream))

    options: dict[str, Any] = {"middleware": {"authorization": Authorization()}}
    if certificate is not None:
        options["tls_certificates"] = [certificate]
        options |= {} if client_ca is None else {"verify_client": True, "root_certificates": client_ca}
    location = str(Address(address.host, address.port, certificate is not None))
    try:
        if address.port:  # gRPC would share the port with another server
            socket.create_server((address.host, address.port), family=_family(address.host)).close()
        return FlightServer(location, **options)
    except Exception as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise EngineError(f"the server cannot listen at {location}: {reason}") from exc


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _until_ended(server: Server, stream: BatchStream) -> Iterator[Any]:
    try:
        yield from stream.messages()
    finally:
        server.stream_ended(stream)


@contextmanager
def _reported(arrow_flight: Any) -> Iterator[None]:
    """Turn Penstock's errors into Flight's, with class and arguments; others are logged and not described."""
    try:
        yield
    except Unavailable as exc:
        raise arrow_flight.FlightUnavailableError(str(exc)) from None
    except PenstockError as exc:
        raise arrow_flight.FlightServerError(str(exc), json.dumps(error_json(exc)).encode()) from None
    except Exception:
        log.exception("a request failed")
        failed = error_json(EngineError("the server failed to answer a request; its log says why"))
        raise arrow_flight.FlightServerError(failed[1], json.dumps(failed).encode()) from None


def serve(
    dataset: Dataset,
    address: str = "grpc://127.0.0.1:7070",
    token: str | None = None,
    *,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    client_ca: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    ready: int | str = READY_BYTES,
    idle_s: float = CONSUMER_IDLE_S,
    max_consumers: int = MAX_CONSUMERS,
    health: str | None = None,
) -> Server:
    """Serve the batches of a dataset to consumers that call ``connect``; returns the running server.

    A server keeps nothing about its consumers. Several servers of the same dataset share the work, and each can
    continue for any other. All consumers of a server share its pools within the memory of one run (``on(memory=)``).

    Args:
        dataset: The dataset. It is not cut: consumers give their rank and world.
        address: Where to listen. An address that other machines can reach needs a token, and a certificate or
            ``insecure``. Port 0 lets the system choose one: see ``Server.address``.
        token: What consumers have to show; by default ``PENSTOCK_TOKEN``, or the content of the file
            ``PENSTOCK_TOKEN_FILE``, if set.
        certificate: A file with the certificate of the server, in PEM: connections are encrypted.
        key: The file with its private key.
        client_ca: A file with the certificate that signed the consumers' certificates: others are refused.
        insecure: Listen without encryption on an address that other machines can reach.
        ready: The most bytes of batches that are kept ready for one consumer.
        idle_s: Ends the run of a consumer that takes nothing for so long; the consumer asks again when it continues.
        max_consumers: The most consumers at a time.
        health: An address, such as ``"127.0.0.1:7071"``, at which ``GET /health`` answers 200 while it serves.

    Raises:
        EngineError: The server cannot listen at the address.
        MissingExtra: pyarrow is not installed.
        PlanError: An argument is invalid, the address is not protected, or the plan cannot be served.
        StorageError: The dataset or a certificate cannot be read.
    """
    if not isinstance(dataset, Dataset):
        raise PlanError(f"serve() takes a dataset, not a {type(dataset).__name__}")
    check_seconds("idle_s", idle_s)
    check_count("max_consumers", max_consumers, least=1)
    parsed, secret = parse_address(address), find_token(token)
    pair = read_certificate(certificate, key)
    if client_ca is not None and certificate is None:
        raise PlanError("client_ca= needs certificate= and key=")
    if parsed.tls and pair is None:
        raise PlanError(f"{parsed}: give certificate= and key=")
    check_listen(parsed, secret, tls=pair is not None, insecure=insecure)
    return Server(
        dataset,
        parsed,
        secret,
        certificate=pair,
        client_ca=None if client_ca is None else read_secret_file(client_ca, "the certificate of consumers"),
        ready=size_in_bytes("ready", ready),
        idle_s=idle_s,
        max_consumers=max_consumers,
        health=None if health is None else parse_address(health),
    )
