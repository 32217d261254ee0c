"""A proxy that stands before a real server and breaks what it is told to break."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PIECE = 1 << 16
_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a request or its answer.

    Attributes:
        latency: Seconds before the answer begins.
        status: Answered in the server's stead, with an empty body.
        retry_after: The header that goes with it.
        refuse: The connection is reset before an answer.
        hang: No answer comes at all.
        garbage: The answer is no HTTP.
        reset_after: The connection is reset after so many bytes of the body.
        truncate_after: It ends after so many.
        stall_after: It falls silent after so many.
        trickle: Bytes a second.
        ignore_range: The server does not hear of the range: all comes, with 200.
        headers: Headers of the answer to replace; ``None`` removes one.
        before: Called before the request goes on.
        deaf: The request is done, its answer is lost.
        as_status: The answer goes on under this status.
    """

    latency: float = 0.0
    status: int | None = None
    retry_after: str | None = None
    refuse: bool = False
    hang: bool = False
    garbage: bool = False
    reset_after: int | None = None
    truncate_after: int | None = None
    stall_after: int | None = None
    trickle: float | None = None
    ignore_range: bool = False
    headers: Mapping[str, str | None] = field(default_factory=dict)
    before: Callable[[], Any] | None = None
    deaf: bool = False
    as_status: int | None = None

    @property
    def cut(self) -> int | None:
        """How much of the body comes through."""
        cuts = [cut for cut in (self.reset_after, self.truncate_after, self.stall_after) if cut is not None]
        return min(cuts, default=None)


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(slots=True)
class _Rule:
    matches: Callable[[Request], bool]
    skip: int
    times: int | None
    fault: Fault


_WELL = Fault()


class Proxy:
    """Passes HTTP/1.1 on to a server, byte for byte but for the rules given.

    Signatures stay right when clients sign for the proxy's address: the Host header is passed on as it comes.
    """

    def __init__(self, upstream_host: str, upstream_port: int) -> None:
        self.upstream = (upstream_host, upstream_port)
        self.requests: list[Request] = []
        self.accepted = 0  # connections so far
        self.closing = threading.Event()
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_TICK_S,), name="proxy")
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1."""
        return int(self._server.server_address[1])

    def rule(
        self,
        match: str | Callable[[Request], bool] = "",
        times: int | None = 1,
        skip: int = 0,
        **fault: Any,
    ) -> None:
        """Break requests; of several rules that match, the first one that is not used up.

        Args:
            match: A part of ``"METHOD /path"``, or a function.
            times: How often; ``None``: always.
            skip: How many matching requests go well before.
            fault: The fields of ``Fault``.
        """
        matches = match if callable(match) else lambda request: match in f"{request.method} {request.path}"
        with self._lock:
            self._rules.append(_Rule(matches, skip, times, Fault(**fault)))

    def clear(self) -> None:
        """Forget all rules and requests."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def close(self) -> None:
        """Stop listening, drop all connections, wait for the threads."""
        self.closing.set()
        self._server.shutdown()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            _quietly(lambda client=client: client.shutdown(socket.SHUT_RDWR))  # type: ignore[misc]
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, request: Request) -> Fault:
        """What is to happen to a request."""
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.times == 0 or not rule.matches(request):
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                rule.times = None if rule.times is None else rule.times - 1
                return rule.fault
        return _WELL

    def opened(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.add(client)
            self.accepted += 1

    def closed(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.discard(client)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # closing waits for them
    request_queue_size = 128

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing to talk about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPConnection | None = None
        self.server.proxy.opened(self.connection)

    def finish(self) -> None:
        self.server.proxy.closed(self.connection)
        if self._upstream is not None:
            self._upstream.close()
        _quietly(super().finish)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _pass_on(self) -> None:
        body = self._body()
        fault = self.server.proxy.take(Request(self.command, self.path, dict(self.headers.items())))
        if fault.before is not None:
            fault.before()
        self.server.proxy.closing.wait(fault.latency)
        if fault.hang:
            self._hold()
        elif fault.refuse:
            self._reset()
        elif fault.garbage:
            self.wfile.write(b"\x16\x03\x01 this is no HTTP at all\r\n\r\n" * 3)
            self.close_connection = True
        elif fault.status is not None:
            self._answer(fault.status, fault)
        else:
            self._forward(body, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, fault: Fault) -> None:
        self.send_response_only(status)
        told = [] if fault.retry_after is None else [("Retry-After", fault.retry_after)]
        for name, value in _replaced([*told, ("Content-Length", "0")], fault.headers):
            self.send_header(name, value)
        self.end_headers()

    def _forward(self, body: bytes, fault: Fault) -> None:
        answer = self._ask(body, fault)
        if fault.deaf:
            answer.read()
            self._reset()
            return
        chunked = answer.getheader("Transfer-Encoding", "").lower() == "chunked"
        self.send_response_only(fault.as_status or answer.status)
        for name, value in _replaced(answer.getheaders(), fault.headers):
            self.send_header(name, value)
        self.end_headers()
        left = fault.cut
        for piece in _pieces(answer, fault.trickle, self.server.proxy.closing):
            part = piece if left is None else piece[:left]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked and part else part)
            if left is not None:
                left -= len(part)
                if left == 0:
                    self._break(fault)
                    return
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _ask(self, body: bytes, fault: Fault) -> http.client.HTTPResponse:
        """Send the request to the server; a connection that it has closed meanwhile is made again."""
        for _ in range(2):
            if self._upstream is None:
                self._upstream = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=30)
            try:
                self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if not (fault.ignore_range and name.lower() == "range"):
                        self._upstream.putheader(name, value)
                self._upstream.endheaders(body or None)
                return self._upstream.getresponse()
            except (http.client.HTTPException, OSError):
                self._upstream.close()
                self._upstream = None
        raise ConnectionError("the server does not answer")

    def _break(self, fault: Fault) -> None:
        if self._upstream is not None:  # the rest of its answer is not wanted
            self._upstream.close()
            self._upstream = None
        if fault.stall_after is not None:
            self._hold()
        elif fault.reset_after is not None:
            self._reset()
        self.close_connection = True

    def _hold(self) -> None:
        """Stay silent until the client goes away."""
        self.connection.settimeout(_TICK_S)
        while not self.server.proxy.closing.is_set():
            try:
                if not self.connection.recv(_PIECE):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        self.close_connection = True

    def _reset(self) -> None:
        time.sleep(0.01)  # so that what was sent arrives before the reset
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.server.proxy.closed(self.connection)
        _quietly(self.rfile.close)
        _quietly(self.connection.close)
        self.close_connection = True


def _replaced(headers: list[tuple[str, str]], by: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    names = {name.lower() for name in by}
    yield from ((name, value) for name, value in headers if name.lower() not in names)
    yield from ((name, value) for name, value in by.items() if value is not None)


def _pieces(answer: http.client.HTTPResponse, rate: float | None, closing: threading.Event) -> Iterator[bytes]:
    most = _PIECE if rate is None else max(1, int(rate * _TICK_S))
    while piece := answer.read(most):
        yield piece
        if rate is not None and closing.wait(_TICK_S):
            return


def _quietly(action: Callable[[], Any]) -> None:
    with contextlib.suppress(OSError):
        action()
