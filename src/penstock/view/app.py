"""The web application of ``penstock view``: access checks, routes and time limits.

A request needs the token, from the printed address or from the cookie that it is exchanged for, and the host of this
page. No path, URL or code comes from the browser: only positions, keys, conditions and seeds.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.codecs.markup import joined_markup, tag
from penstock.codecs.previews import picture, sound
from penstock.dataset import Dataset
from penstock.errors import PenstockError, PlanError, message_of
from penstock.lazy import cached_property
from penstock.view.balance_pages import balance_page, measure_balance
from penstock.view.browser import Browser, parse_position
from penstock.view.layout import note, page
from penstock.view.ledger_pages import LedgerView
from penstock.view.run_pages import RunView
from penstock.view.sample_pages import Query, sample_page, samples_page
from penstock.view.shard_pages import VerifyTask, shards_page, verify_panel
from penstock.view.stage_pages import StageViewer, stages_page

ANSWER_S = 20.0  # of one page; a sample that takes longer does not hold it
_WORKERS = 16  # requests that are worked on at a time
_MAX_QUERY = 4000  # characters of an address
_STATIC = {"view.css": "text/css", "view.js": "text/javascript", "icon.svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Section = tuple[str, str]


@dataclass(frozen=True)
class View:
    """What the page shows.

    Attributes:
        ds: The dataset; None if there is only a ledger or a run.
        urls: The files, for their verification.
        program: Whether the dataset comes from a program, so that its stages are shown.
        ledger: The folder of a ledger.
        run: The folder of a monitor.
    """

    ds: Dataset | None = None
    urls: tuple[str, ...] = ()
    program: bool = False
    ledger: str | None = None
    run: str | None = None

    @cached_property
    def browser(self) -> Browser | None:
        """The samples of the dataset, if one is shown."""
        return None if self.ds is None else Browser(self.ds)

    @cached_property
    def stages(self) -> StageViewer | None:
        """The stages of a program's dataset."""
        return StageViewer(self.ds) if self.program and self.ds is not None else None

    @cached_property
    def verification(self) -> VerifyTask:
        """The background task that verifies the shards."""
        return VerifyTask(self.urls)

    @cached_property
    def ledger_view(self) -> LedgerView | None:
        """The pages of the ledger, if one is shown."""
        return None if self.ledger is None else LedgerView(self.ledger, self.browser)

    @cached_property
    def run_view(self) -> RunView | None:
        """The page of the run, if one is shown."""
        return None if self.run is None else RunView(self.run)

    @property
    def sections(self) -> list[Section]:
        """The path and name of each section."""
        data: list[Section] = [("/samples", "Samples"), ("/balance", "Balance"), ("/shards", "Shards")]
        stages: list[Section] = [("/stages", "Stages")]
        found = (data if self.ds is not None else []) + (stages if self.program else [])
        ledger: list[Section] = [("/ledger", "Ledger")] if self.ledger is not None else []
        return found + ledger + ([("/run", "Run")] if self.run is not None else [])

    def close(self) -> None:
        """Stop background work."""
        self.verification.stop()
        if "browser" in self.__dict__ and self.browser is not None:
            self.browser.close()


def view_app(view: View, token: str, port: int) -> ASGIApp:
    """Return the application.

    Args:
        view: What it shows.
        token: What a browser needs to know.
        port: The port that it is reached by; requests with another host are refused.
    """
    return _Guard(Starlette(routes=list(_routes(view))), token, port)


class _Guard:
    """Refuses requests from others: without the token, under another host, or from another site."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._cookie = f"penstock_view_{port}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in given)]
            await send(message)

        request = Request(scope)
        response = self._refusal(request)
        await (response or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the response to a request that is not answered by the application."""
        if request.headers.get("host") not in self._hosts:
            return PlainTextResponse("This page is not served under this host name.\n", 400)
        if len(request.url.path) + len(request.url.query) > _MAX_QUERY:
            return PlainTextResponse("The address is too long.\n", 414)
        origin = request.headers.get("origin")
        if origin not in (None, "null") and origin.removeprefix("http://") not in self._hosts:
            return PlainTextResponse("Requests from other sites are refused.\n", 403)
        if request.headers.get("sec-fetch-site") == "cross-site" and request.method != "GET":
            return PlainTextResponse("Requests from other sites are refused.\n", 403)
        given = request.query_params.get("token")
        if given is not None and self._is_token(given) and request.url.path == "/":
            return self._welcome()
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        known = (request.cookies.get(self._cookie, ""), bearer, given if request.url.path == "/metrics" else None)
        if not any(value and self._is_token(value) for value in known):
            return PlainTextResponse("Open the address that `penstock view` printed; it holds the token.\n", 403)
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _welcome(self) -> Response:
        """Exchange the token for a cookie, and leave the address that holds it.

        By a page and not by a redirect: after a redirect from elsewhere, browsers would hold the cookie back.
        """
        head = tag("meta", http_equiv="refresh", content="0;url=/") + tag("title", "penstock view")
        response = HTMLResponse(f"<!doctype html>{head}<p>{tag('a', 'penstock view', href='/')}")
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return response


class _Busy(Exception):
    """Too many requests are being worked on."""


class _TooSlow(Exception):
    """An answer takes too long."""


_slots = threading.BoundedSemaphore(_WORKERS)


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Run a function in a thread of its own, and stop waiting for it after ``ANSWER_S``.

    The thread is a daemon: one that a broken sample holds does not keep the process from ending.
    """
    if not _slots.acquire(timeout=0.0):
        await asyncio.sleep(0.2)
        if not _slots.acquire(timeout=0.0):
            raise _Busy
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as exc:
            error = exc
        finally:
            _slots.release()
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="penstock view", daemon=True).start()
    try:
        return await asyncio.wait_for(future, ANSWER_S)
    except TimeoutError:
        raise _TooSlow from None


def _routes(view: View) -> Iterator[Route]:
    handlers = _Handlers(view)
    yield Route("/", handlers.home)
    yield Route("/static/{name}", handlers.static)
    yield Route("/favicon.ico", handlers.static)
    if view.ds is not None:
        yield Route("/samples", handlers.page(handlers.samples, "Samples", "/samples"))
        yield Route("/sample/{position:int}", handlers.page(handlers.sample, "Sample", "/samples"))
        yield Route("/media/{position:int}/{field:int}", handlers.media)
        yield Route("/balance", handlers.page(handlers.balance, "Balance", "/balance"))
        yield Route("/shards", handlers.page(handlers.shards, "Shards", "/shards"))
        yield Route("/verify", handlers.verify, methods=["GET", "POST"])
    if view.program:
        yield Route("/stages", handlers.page(handlers.stages, "Stages", "/stages"))
        path = "/stage-media/{epoch:int}/{stored:int}/{position:int}/{stage:int}/{output:int}/{field:int}"
        yield Route(path, handlers.stage_media)
    if view.ledger is not None:
        yield Route("/ledger", handlers.page(handlers.ledger, "Ledger", "/ledger"))
        yield Route("/ledger/step", handlers.page(handlers.ledger_step, "Step", "/ledger"))
    if view.run is not None:
        yield Route("/run", handlers.page(handlers.run, "Run", "/run", live="/run/content"))
        yield Route("/run/content", handlers.run_content)
        yield Route("/metrics", handlers.metrics)


class _Handlers:
    """Answers requests; the work is done in threads."""

    def __init__(self, view: View) -> None:
        self._view = view

    def page(
        self, content: Callable[[Request], list[Any]], title: str, here: str, live: str | None = None
    ) -> Callable[[Request], Any]:
        """Return a handler that puts content into the frame; a problem is shown there too."""

        async def handle(request: Request) -> Response:
            status = 200
            try:
                shown = await _in_thread(lambda: content(request))
            except (PenstockError, _Busy, _TooSlow, Exception) as exc:
                status, text = _problem(exc)
                shown = [tag("h1", title), note(text, kind="error")]
            if isinstance(shown, Response):
                return shown
            return HTMLResponse(page(title, shown, here=here, sections=self._view.sections, live=live), status)

        return handle

    async def home(self, request: Request) -> Response:
        return RedirectResponse(self._view.sections[0][0] if self._view.sections else "/samples", 303)

    async def static(self, request: Request) -> Response:
        name = request.path_params.get("name", "icon.svg")
        if name not in _STATIC:
            return PlainTextResponse("There is no such file.\n", 404)
        data = files("penstock.view").joinpath("static", name).read_bytes()
        return Response(data, media_type=_STATIC[name], headers={"Cache-Control": "max-age=3600"})

    @property
    def _browser(self) -> Browser:
        assert self._view.browser is not None
        return self._view.browser

    def samples(self, request: Request) -> Any:
        query = Query.of(request.query_params)
        if query.find:
            return RedirectResponse(f"/sample/{self._found(query.find)}", 303)
        return samples_page(self._browser, query)

    def _found(self, text: str) -> int:
        """Return the position of a sample by its position or key; ``key:7`` and ``007`` are keys, ``7`` a position."""
        key = text.removeprefix("key:")
        number = text.isascii() and text.isdigit() and len(text) < 15 and (text == "0" or not text.startswith("0"))
        if number and (self._browser.total is None or int(text) < self._browser.total):
            return int(text)
        position = self._browser.find_key(key)
        if position is None:
            raise PlanError(f"there is no sample with the key {key[:200]!r}")
        return position

    def sample(self, request: Request) -> list[Any]:
        return sample_page(self._browser, request.path_params["position"], stages=self._view.program)

    def balance(self, request: Request) -> list[Any]:
        return balance_page(self._browser, measure_balance(self._browser))

    def shards(self, request: Request) -> list[Any]:
        start = parse_position(request.query_params.get("at") or "0", None)
        return shards_page(self._browser, self._view.verification, start)

    def stages(self, request: Request) -> list[Any]:
        assert self._view.stages is not None
        asked = request.query_params
        epoch = parse_position(asked.get("epoch") or "0", None)
        position = parse_position(asked.get("at") or "0", None)
        return stages_page(self._view.stages, position, epoch, asked.get("order") == "stored")

    def ledger(self, request: Request) -> list[Any]:
        assert self._view.ledger_view is not None
        return self._view.ledger_view.overview()

    def ledger_step(self, request: Request) -> list[Any]:
        assert self._view.ledger_view is not None
        epoch = request.query_params.get("epoch")
        step = parse_position(request.query_params.get("step") or "0", None)
        return self._view.ledger_view.step(step, parse_position(epoch, None) if epoch else None)

    def run(self, request: Request) -> list[Any]:
        assert self._view.run_view is not None
        return self._view.run_view.content()

    async def run_content(self, request: Request) -> Response:
        return await self._fragment(lambda: self.run(request))

    async def metrics(self, request: Request) -> Response:
        assert self._view.run_view is not None
        text = await _in_thread(self._view.run_view.metrics)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def verify(self, request: Request) -> Response:
        task = self._view.verification
        if request.method == "POST":
            task.start()
            return RedirectResponse("/shards", 303)
        return await self._fragment(lambda: [verify_panel(task)])

    async def _fragment(self, content: Callable[[], list[Any]]) -> Response:
        try:
            return HTMLResponse(joined_markup(await _in_thread(content)))
        except Exception as exc:
            status, text = _problem(exc)
            return HTMLResponse(note(text, kind="error"), status)

    async def media(self, request: Request) -> Response:
        position, number = request.path_params["position"], request.path_params["field"]

        def find() -> tuple[str, Any]:
            fields = self._browser.page([position])[0].fields
            fields = fields or self._browser.sample(position).fields
            name = list(fields)[number]
            return name, fields[name]

        return await self._media(request, find)

    async def stage_media(self, request: Request) -> Response:
        asked = request.path_params
        viewer = self._view.stages
        assert viewer is not None

        def find() -> tuple[str, Any]:
            outputs = viewer.outputs(asked["position"], asked["epoch"], bool(asked["stored"]))
            fields = outputs[asked["stage"]].outputs[asked["output"]]
            name = list(fields)[asked["field"]]
            return name, fields[name]

        return await self._media(request, find)

    async def _media(self, request: Request, find: Callable[[], tuple[str, Any]]) -> Response:
        side = {"1024": 1024}.get(request.query_params.get("side", ""), 320)
        is_picture = "side" in request.query_params

        def render() -> Response:
            name, value = find()
            if not is_picture:
                return _ranged(request, sound(name, value))
            kind, data = picture(name, value, side)
            return Response(data, media_type=kind, headers={"Cache-Control": "private, max-age=600"})

        try:
            response: Response = await _in_thread(render)
        except Exception as exc:
            status, text = _problem(exc)
            return PlainTextResponse(f"{text}\n", status)
        return response


def _ranged(request: Request, data: bytes) -> Response:
    """Return a sound, or the part of it that a player asks for."""
    start, _, stop = request.headers.get("range", "").removeprefix("bytes=").partition("-")
    headers = {"Accept-Ranges": "bytes"}
    if not start.isdigit() or int(start) >= len(data):
        return Response(data, media_type="audio/wav", headers=headers)
    last = min(int(stop), len(data) - 1) if stop.isdigit() else len(data) - 1
    headers["Content-Range"] = f"bytes {int(start)}-{last}/{len(data)}"
    return Response(data[int(start) : last + 1], 206, media_type="audio/wav", headers=headers)


def _problem(exc: BaseException) -> tuple[int, str]:
    """Return the status and text for a request that failed."""
    if isinstance(exc, _Busy):
        return 503, "Too many samples are being read; try again in a moment."
    if isinstance(exc, _TooSlow):
        return 503, f"This took longer than {ANSWER_S:.0f} s."
    if isinstance(exc, PlanError | IndexError):
        return 404, str(exc) or "There is no such sample."
    return 500, str(exc) if isinstance(exc, PenstockError | ValueError) else message_of(exc)


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as exc:
            raise PlanError(f"port {port} is not free: {exc.strerror}") from exc
        yield listener


def serve_view(view: View, port: int = 0, *, opened: Callable[[str], object]) -> None:
    """Serve the page on this machine until the process is interrupted.

    Args:
        view: What it shows.
        port: The port on 127.0.0.1; 0 for any that is free.
        opened: Called with the address, token included, once the page can be reached.

    Raises:
        PlanError: The port is not free.
    """
    import uvicorn

    token = secrets.token_urlsafe(24)
    with _listening(port) as listener:
        port = int(listener.getsockname()[1])
        app = view_app(view, token, port)
        config = uvicorn.Config(app, lifespan="off", log_level="error", access_log=False, server_header=False)
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        listener.listen(128)
        opened(f"http://127.0.0.1:{port}/?token={token}")
        try:
            server.run(sockets=[listener])
        finally:
            view.close()
