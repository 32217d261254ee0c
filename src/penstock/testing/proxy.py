"""An HTTP proxy that injects faults between a client and a real server."""

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

_CHUNK = 1 << 16  # bytes forwarded at once
_TICK_S = 0.05  # interval at which waits check whether the proxy is closing


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a request or its response.

    Attributes:
        latency: Wait this many seconds before responding.
        status: Respond with this status and an empty body instead of forwarding the request.
        retry_after: The Retry-After header of that response.
        refuse: Reset the connection before responding.
        hang: Never respond.
        garbage: Respond with bytes that are not HTTP.
        reset_after: Reset the connection after this many bytes of the body.
        truncate_after: Close the connection after this many bytes of the body.
        stall_after: Send nothing more after this many bytes of the body.
        trickle: Send the body at this many bytes per second.
        ignore_range: Remove the Range header from the request, so that the whole object is sent, with status 200.
        headers: Headers of the response to replace; None removes one.
        before: Called before the request is forwarded.
        deaf: Forward the request, but drop the response and reset the connection.
        as_status: Replace the status of the response.
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
        """The number of bytes of the body that are sent; None: all."""
        cuts = [cut for cut in (self.reset_after, self.truncate_after, self.stall_after) if cut is not None]
        return min(cuts, default=None)


@dataclass(frozen=True, slots=True)
class Request:
    """A request that a client sent."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(slots=True)
class _Rule:
    matches: Callable[[Request], bool]
    skip: int
    times: int | None
    fault: Fault


_NO_FAULT = Fault()


class Proxy:
    """Forwards HTTP/1.1 to a server unchanged, except for the faults that rules inject.

    The Host header is forwarded as it is, so signatures are valid if clients sign for the proxy's address. Runs in
    threads of this process, and can be used as a context manager.

    Args:
        upstream_host: The host of the server.
        upstream_port: Its port.

    Attributes:
        upstream: The address of the server.
        requests: The requests received so far.
        accepted: The number of connections accepted so far.
        closing: Set when the proxy is being closed.
    """

    def __init__(self, upstream_host: str, upstream_port: int) -> None:
        self.upstream = (upstream_host, upstream_port)
        self.requests: list[Request] = []
        self.accepted = 0
        self.closing = threading.Event()
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._server = _ProxyServer(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_TICK_S,), name="proxy")
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on 127.0.0.1 that the proxy listens on."""
        return int(self._server.server_address[1])

    def rule(
        self,
        match: str | Callable[[Request], bool] = "",
        times: int | None = 1,
        skip: int = 0,
        **fault: Any,
    ) -> None:
        """Inject a fault into matching requests; of several rules, the first that matches and is not used up applies.

        Args:
            match: A part of ``"METHOD /path"``, or a function that returns whether a request matches.
            times: How many requests get the fault; None: all.
            skip: How many matching requests are forwarded unchanged first.
            fault: The attributes of the :class:`Fault`.

        Raises:
            TypeError: A fault has no such attribute.
        """
        matches = match if callable(match) else lambda request: match in f"{request.method} {request.path}"
        with self._lock:
            self._rules.append(_Rule(matches, skip, times, Fault(**fault)))

    def clear(self) -> None:
        """Remove all rules and recorded requests."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def close(self) -> None:
        """Stop listening, drop all connections and wait for the threads."""
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

    def fault_for(self, request: Request) -> Fault:
        """Record a request and return the fault that applies to it."""
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
        return _NO_FAULT

    def opened(self, client: socket.socket) -> None:
        """Register a connection, so that closing the proxy drops it."""
        with self._lock:
            self._clients.add(client)
            self.accepted += 1

    def closed(self, client: socket.socket) -> None:
        """Unregister a connection."""
        with self._lock:
            self._clients.discard(client)


class _ProxyServer(ThreadingHTTPServer):
    daemon_threads = False  # closing waits for them
    request_queue_size = 128

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent: clients that disconnect are expected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _ProxyServer

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
        """Log nothing."""

    def _respond(self) -> None:
        body = self._body()
        fault = self.server.proxy.fault_for(Request(self.command, self.path, dict(self.headers.items())))
        if fault.before is not None:
            fault.before()
        self.server.proxy.closing.wait(fault.latency)
        if fault.hang:
            self._hold()
        elif fault.refuse:
            self._reset()
        elif fault.garbage:
            self.wfile.write(b"\x16\x03\x01 this is not HTTP at all\r\n\r\n" * 3)
            self.close_connection = True
        elif fault.status is not None:
            self._send_status(fault.status, fault)
        else:
            self._forward(body, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _respond
    do_OPTIONS = do_PROPFIND = do_MKCOL = do_MOVE = _respond

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send_status(self, status: int, fault: Fault) -> None:
        self.send_response_only(status)
        headers = [] if fault.retry_after is None else [("Retry-After", fault.retry_after)]
        for name, value in _with_replaced([*headers, ("Content-Length", "0")], fault.headers):
            self.send_header(name, value)
        self.end_headers()

    def _forward(self, body: bytes, fault: Fault) -> None:
        response = self._request_upstream(body, fault)
        if fault.deaf:
            response.read()
            self._reset()
            return
        chunked = response.getheader("Transfer-Encoding", "").lower() == "chunked"
        self.send_response_only(fault.as_status or response.status)
        for name, value in _with_replaced(response.getheaders(), fault.headers):
            self.send_header(name, value)
        self.end_headers()
        remaining = fault.cut
        for chunk in _chunks(response, fault.trickle, self.server.proxy.closing):
            part = chunk if remaining is None else chunk[:remaining]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked and part else part)
            if remaining is not None:
                remaining -= len(part)
                if remaining == 0:
                    self._cut_off(fault)
                    return
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _request_upstream(self, body: bytes, fault: Fault) -> http.client.HTTPResponse:
        """Send the request to the server; reconnect if the server has closed the connection in the meantime."""
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
        raise ConnectionError("the server does not respond")

    def _cut_off(self, fault: Fault) -> None:
        if self._upstream is not None:  # the rest of the response is not read
            self._upstream.close()
            self._upstream = None
        if fault.stall_after is not None:
            self._hold()
        elif fault.reset_after is not None:
            self._reset()
        self.close_connection = True

    def _hold(self) -> None:
        """Send nothing until the client disconnects or the proxy closes."""
        self.connection.settimeout(_TICK_S)
        while not self.server.proxy.closing.is_set():
            try:
                if not self.connection.recv(_CHUNK):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        self.close_connection = True

    def _reset(self) -> None:
        time.sleep(0.01)  # so that the bytes sent before arrive before the reset
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.server.proxy.closed(self.connection)
        _quietly(self.rfile.close)
        _quietly(self.connection.close)
        self.close_connection = True


def _with_replaced(headers: list[tuple[str, str]], replacements: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    names = {name.lower() for name in replacements}
    yield from ((name, value) for name, value in headers if name.lower() not in names)
    yield from ((name, value) for name, value in replacements.items() if value is not None)


def _chunks(response: http.client.HTTPResponse, bytes_per_s: float | None, closing: threading.Event) -> Iterator[bytes]:
    size = _CHUNK if bytes_per_s is None else max(1, int(bytes_per_s * _TICK_S))
    while chunk := response.read(size):
        yield chunk
        if bytes_per_s is not None and closing.wait(_TICK_S):
            return


def _quietly(action: Callable[[], Any]) -> None:
    with contextlib.suppress(OSError):
        action()
