"""The health of a server at a URL, for orchestrators: 200 while it serves, 503 while it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.errors import EngineError
from penstock.serving.access import Address

REQUEST_S = 5.0  # a client that has not sent its request after so long is disconnected
MAX_HEALTH_CLIENTS = 16

HealthReport = Callable[[], tuple[bool, dict[str, Any]]]


class HealthServer:
    """Answers ``GET /health``.

    Attributes:
        url: The URL.
    """

    def __init__(self, address: Address, report: HealthReport) -> None:
        """Start to answer.

        Raises:
            EngineError: The address cannot be used.
        """
        places = threading.BoundedSemaphore(MAX_HEALTH_CLIENTS)

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_S
            server_version = "penstock"
            sys_version = ""

            def do_GET(self) -> None:
                healthy, facts = report() if self.path == "/health" else (False, {})
                code = 404 if not facts else 200 if healthy else 503
                body = json.dumps(facts).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: orchestrators ask every few seconds."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def process_request(self, request: Any, client_address: Any) -> None:
                if places.acquire(blocking=False):
                    ThreadingHTTPServer.process_request(self, request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    ThreadingHTTPServer.process_request_thread(self, request, client_address)
                finally:
                    places.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Do nothing: the client is gone, or sent no request."""

        try:
            self._server = Server((address.host, address.port), Handler)
        except OSError as exc:
            raise EngineError(
                f"the health of the server cannot be reported at {address.host}:{address.port}: {exc}"
            ) from exc
        self.url = f"http://{address.host}:{self._server.server_address[1]}/health"
        self._thread = threading.Thread(target=self._server.serve_forever, name="penstock health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(REQUEST_S)
