"""The servers of a consumer: found by a list, a name or a file, left out while they fail, and used again afterwards."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import EngineError, PenstockError, PlanError
from penstock.serving.access import Address, Token, check_connect, parse_address
from penstock.serving.answers import difference
from penstock.serving.requests import PROTOCOL_VERSION, error_from_json
from penstock.serving.server import flight

log = logging.getLogger("penstock")

CALL_S = 30.0  # for one question: a server may have to open its dataset first
PROBE_S = 5.0  # for asking a server whether it is there
RETRY_S, MAX_RETRY_S = 1.0, 15.0  # a server that failed is asked again after that time
LOOKUP_S = 2.0  # how often addresses are looked up and servers that failed are asked
SAY_S = 10.0  # how often a consumer that waits says for what
_LIMITS = {"grpc.max_reconnect_backoff_ms": 1000, "grpc.initial_reconnect_backoff_ms": 100}
_CHANNEL = [*_LIMITS.items(), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]

_UNREACHABLE = re.compile(
    r"failed to connect to all addresses; last error: \w+: \S+ (Failed to connect to remote host: )?"
)


class ServerLost(Exception):
    """A server does not answer, or refuses to."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a consumer shows to servers, and how it recognises them.

    Attributes:
        token: The token.
        insecure: Connections to other machines need not be encrypted.
        ca: The certificate that signed the servers' certificates; None: any that the system trusts.
        certificate: The certificate and the private key of the consumer.
    """

    token: Token | None = None
    insecure: bool = False
    ca: bytes | None = None
    certificate: tuple[bytes, bytes] | None = None


@dataclass(slots=True, eq=False)
class RemoteServer:
    """One server, as a consumer sees it."""

    address: Address
    credentials: Credentials
    problem: str | None = "not asked yet"  # why it is not used; None: it is used
    refused: bool = False  # it answers, but with another plan or without accepting the token
    asked_at: float = 0.0
    failures: int = 0  # since the last batch that it sent
    _client: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def retry_s(self) -> float:
        """How long to leave out the server before it is asked again; longer if it has sent nothing in between."""
        delay: float = RETRY_S * 2 ** max(0, self.failures - 1)
        return min(MAX_RETRY_S, delay)

    def call(self, kind: str, body: dict[str, Any], timeout_s: float = CALL_S) -> Any:
        """Ask a question about the plan.

        Raises:
            ServerLost: The server does not answer.
            PenstockError: The answer is an error.
        """
        arrow_flight = flight()
        data = json.dumps({"v": PROTOCOL_VERSION, **body}, separators=(",", ":")).encode()
        with self.reported():
            results = self.client().do_action(arrow_flight.Action(kind, data), self.options(timeout_s))
            answer = b"".join(result.body.to_pybytes() for result in results)
        return json.loads(answer)

    def client(self) -> Any:
        """Return the connection, which is made by the first request."""
        with self._lock:
            if self._client is None:
                options: dict[str, Any] = {"generic_options": _CHANNEL}
                if self.address.tls:
                    own = self.credentials
                    options |= {} if own.ca is None else {"tls_root_certs": own.ca}
                    options |= {} if self.address.name is None else {"override_hostname": self.address.name}
                    if own.certificate is not None:
                        options |= {"cert_chain": own.certificate[0], "private_key": own.certificate[1]}
                self._client = flight().FlightClient(str(self.address), **options)
            return self._client

    def options(self, timeout_s: float | None = None) -> Any:
        """Return the options of a request: its time limit, and the token."""
        token = self.credentials.token
        headers = [] if token is None else [token.header]
        return flight().FlightCallOptions(timeout=timeout_s, headers=headers)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Turn the errors of Flight into ``ServerLost``, or into the error that the server reports.

        Raises:
            ServerLost: The server does not answer, or refuses the request.
            PenstockError: The server reports an error.
        """
        arrow_flight = flight()
        try:
            yield
        except (arrow_flight.FlightUnauthenticatedError, arrow_flight.FlightUnauthorizedError):
            self.refused = True
            raise ServerLost("it does not accept the token") from None
        except arrow_flight.FlightServerError as exc:
            if exc.extra_info:
                raise error_from_json(json.loads(exc.extra_info)) from None
            raise ServerLost(_short(exc)) from None
        except (arrow_flight.FlightError, OSError, _arrow_error()) as exc:
            raise ServerLost(_short(exc)) from None

    def disconnect(self) -> None:
        """Close the connection; the next request makes a new one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


def _arrow_error() -> type[BaseException]:
    import pyarrow

    error: type[BaseException] = pyarrow.lib.ArrowException
    return error


def _short(error: BaseException) -> str:
    """Return the text of an error of Flight without what only its developers need."""
    if isinstance(error, flight().FlightTimedOutError):
        return "it does not answer"
    text = " ".join(str(error).split())
    for end in (". Detail:", ". gRPC client debug context", ". Client context"):
        text = text.partition(end)[0]
    text = text.partition(", with message: ")[2] or text.removeprefix("Flight returned ")
    return _UNREACHABLE.sub("it cannot be reached: ", text)[:200] or type(error).__name__


def address_source(addresses: Any) -> Callable[[], list[Address]]:
    """Return a function that returns the addresses now: of a list, of a name, or in a file that may change.

    Raises:
        PlanError: There is no address, or one is malformed.
    """
    if isinstance(addresses, os.PathLike) or (isinstance(addresses, str) and _is_file(addresses)):
        path = Path(str(addresses).removeprefix("file:"))
        return lambda: _from_file(path)
    given = [addresses] if isinstance(addresses, str) else addresses
    if not isinstance(given, Sequence) or not given:
        raise PlanError(f"connect({addresses!r:.80}): give an address, a list of them, or a file that lists them")
    parsed = [parse_address(address) for address in given]
    return lambda: _resolved(parsed)


def _is_file(text: str) -> bool:
    return text.startswith("file:") or ("://" not in text and os.sep in text)


def _from_file(path: Path) -> list[Address]:
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except OSError as exc:
        log.warning("the list of servers %s cannot be read: %s", path, exc.strerror or exc)
        return []
    return _resolved([parse_address(line) for line in lines if line])


def _resolved(addresses: Sequence[Address]) -> list[Address]:
    found: dict[Address, None] = {}
    for address in addresses:
        try:
            found |= dict.fromkeys(address.resolved())
        except OSError as exc:
            log.warning("the address of %s cannot be resolved now: %s", address, exc.strerror or exc)
    return list(found)


class Servers:
    """The servers of one consumer; thread-safe.

    Attributes:
        facts: What the first server said about its plan; the others must have the same plan.
    """

    def __init__(
        self, source: Callable[[], list[Address]], credentials: Credentials, expected: dict[str, Any] | None = None
    ) -> None:
        """Ask no server yet.

        Args:
            source: Returns the addresses now.
            credentials: What is shown to the servers.
            expected: The identity that servers must have; by default, the identity of the first one.
        """
        self.facts: dict[str, Any] = {}
        self._source, self._credentials, self._expected = source, credentials, expected
        self._servers: dict[Address, RemoteServer] = {}
        self._lock = threading.RLock()
        self.version = 0  # changes with the set of usable servers

    def wait_for_first(self, timeout_s: float) -> None:
        """Wait for a first server.

        Raises:
            EngineError: No server answers in time.
            PlanError: A server has another plan, or does not accept the token.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.refresh()
            if refusing := [server for server in self._known() if server.refused]:
                raise PlanError(f"{refusing[0].address}: {refusing[0].problem}")
            if self.usable():
                return
            if time.monotonic() >= deadline:
                raise EngineError(f"no server answered within {timeout_s:g} s: {self.problems()}")
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))

    def usable(self) -> list[RemoteServer]:
        """Return the servers that can be asked, in an order that is the same for all consumers."""
        return sorted((s for s in self._known() if s.problem is None), key=lambda server: str(server.address))

    def _known(self) -> list[RemoteServer]:
        with self._lock:
            return list(self._servers.values())

    def problems(self) -> str:
        """Return why servers are not used, as text."""
        found = [f"{server.address} ({server.problem})" for server in self._known() if server.problem is not None]
        return ", ".join(found) or "there is no address"

    def call(self, kind: str, stopped: Callable[[], bool] = lambda: False, **body: Any) -> Any:
        """Ask any server a question; wait while none answers.

        Raises:
            EngineError: ``stopped`` returned True.
            PenstockError: The answer is an error.
        """
        said_at = time.monotonic()
        while not stopped():
            for server in self.usable():
                try:
                    return server.call(kind, body)
                except ServerLost as exc:
                    self.lose(server, str(exc))
            said_at = self.wait(said_at)
        raise EngineError("the loader was closed")

    def wait(self, said_at: float) -> float:
        """Look for servers, and wait a little if there are none; return when this was last logged."""
        self.refresh()
        if self.usable():
            return said_at
        if time.monotonic() - said_at > SAY_S:
            log.warning("waiting for a server: %s", self.problems())
            said_at = time.monotonic()
        time.sleep(0.1)
        return said_at

    def lose(self, server: RemoteServer, problem: str) -> None:
        """Leave out a server that failed, until it answers again."""
        with self._lock:
            if server.problem is None:
                log.warning("%s is left out: %s", server.address, problem)
                self.version += 1
            server.problem, server.asked_at = problem, time.monotonic()
            server.failures += 1
        server.disconnect()

    def refresh(self) -> None:
        """Look up the addresses, and ask the servers that are new or failed."""
        addresses = self._source()
        with self._lock:
            for address in addresses:
                if address not in self._servers:
                    check_connect(address, self._credentials.token, self._credentials.insecure)
                    self._servers[address] = RemoteServer(address, self._credentials)
            gone = [address for address in self._servers if address not in addresses] if addresses else []
            for address in gone:
                self.version += self._servers.pop(address).problem is None
            now = time.monotonic()
            ask = [
                server
                for server in self._servers.values()
                if server.problem is not None and now - server.asked_at > server.retry_s
            ]
        if len(ask) == 1:
            self._ask(ask[0])
        elif ask:
            with ThreadPoolExecutor(min(16, len(ask)), "penstock probe") as pool:
                list(pool.map(self._ask, ask))

    def _ask(self, server: RemoteServer) -> None:
        """Ask a server for its plan, and use it if that is the right one."""
        server.refused, problem = False, None
        facts: dict[str, Any] = {}
        try:
            facts = server.call("hello", {}, PROBE_S)
        except (ServerLost, PenstockError, ValueError) as exc:
            problem = str(exc)
            server.disconnect()
        with self._lock:
            server.asked_at = time.monotonic()
            if problem is None:
                reference = self._expected or self.facts.get("identity") or facts["identity"]
                if differs := difference(reference, facts["identity"]):
                    problem, server.refused = f"it serves another plan: {differs}", True
            if problem is None:
                self.facts = self.facts or facts
                self.version += 1
                if server.problem != "not asked yet":
                    log.warning("%s is used again", server.address)
            elif server.refused and server.problem != problem:
                log.warning("%s is not used: %s", server.address, problem)
            server.problem = problem

    def refresh_regularly(self, stopped: threading.Event) -> None:
        """Refresh until ``stopped`` is set, so that new servers and those that are back are used."""
        while not stopped.wait(LOOKUP_S):
            try:
                self.refresh()
            except PlanError as exc:
                log.warning("the list of servers cannot be used: %s", exc)

    def close(self) -> None:
        """Close all connections."""
        for server in self._known():
            server.disconnect()
