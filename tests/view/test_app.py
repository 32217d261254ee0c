"""Who may ask the page, and what hostile data can do to it: nothing."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.view import View, app, serve_view

Serve = Callable[[View], Any]
COOKIE = re.compile(r"penstock_view_\d+=secret-token; HttpOnly; Path=/; SameSite=strict", re.IGNORECASE)


def ask(
    address: str, path: str, *, method: str = "GET", token: str | None = "secret-token", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send a request and return status, headers and body; the path is sent as it is."""
    host = address.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.putrequest(method, path, skip_host="host" in headers, skip_accept_encoding=True)
        if token is not None:
            connection.putheader("Cookie", f"penstock_view_{host.rpartition(':')[2]}={token}")
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def photos(tiny_shards: list[Path]) -> View:
    """A view of the shards in ``tiny_shards``."""
    urls = tuple(map(str, tiny_shards))
    return View(ps.read_tar(urls), urls)


def test_the_token_is_exchanged_for_a_cookie(photos: View, serve: Serve) -> None:
    with serve(photos) as (address, token):
        status, headers, body = ask(address, f"/?token={token}", token=None)
        assert status == 200
        assert COOKIE.fullmatch(headers["set-cookie"])
        assert b'content="0;url=/"' in body
        assert ask(address, "/")[0] == 303
        assert ask(address, "/samples")[0] == 200


@pytest.mark.parametrize("path", ["/", "/samples", "/static/view.js", "/media/0/0", "/metrics", "/verify", "/nothing"])
@pytest.mark.parametrize("token", [None, "", "wrong", "secret-tokem"])
def test_nothing_is_shown_without_the_token(photos: View, serve: Serve, path: str, token: str | None) -> None:
    with serve(photos) as (address, _):
        status, _, body = ask(address, path, token=token)
        assert status == 403
        assert b"000000" not in body
        assert ask(address, f"{path}?token=wrong", token=None)[0] == 403


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1", "localhost:1", "127.0.0.1.example.com:80", ""])
def test_another_host_is_refused(photos: View, serve: Serve, host: str) -> None:
    with serve(photos) as (address, _):
        assert ask(address, "/samples", host=host)[0] == 400


def test_another_site_is_refused(photos: View, serve: Serve) -> None:
    with serve(photos) as (address, _):
        assert ask(address, "/verify", method="POST", Origin="https://example.com")[0] == 403
        assert ask(address, "/verify", method="POST", Sec_Fetch_Site="cross-site")[0] == 403
        assert not photos.verification.begun


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/../../etc/passwd",
        "/media/../0",
        "/media/-1/0",
        "/media/0/99",
        "/sample/999999999",
        "/sample/99999999999999999999999999",
        "/samples?at=-1",
        "/samples?at=http://example.com/",
        "/samples?n=9e9",
        "/samples?find=/etc/passwd",
        "/samples?find=s3://bucket/key",
        "/samples?where=__import__('os').system('true')",
        "/samples?where=open('/etc/passwd')",
        "/samples?seed=../..",
        "/shards?at=x",
        "/ledger",
        "/run",
        "/stages",
    ],
)
def test_paths_urls_and_code_from_a_browser_are_refused(photos: View, serve: Serve, path: str) -> None:
    with serve(photos) as (address, _):
        status, headers, body = ask(address, path)
        assert status in (400, 404)
        assert b"root:" not in body
        assert "default-src 'none'" in headers["content-security-policy"]


def test_a_long_address_is_refused(photos: View, serve: Serve) -> None:
    with serve(photos) as (address, _):
        assert ask(address, f"/samples?where={'1' * 5000}")[0] == 414


def test_every_answer_has_the_headers_that_contain_it(photos: View, serve: Serve) -> None:
    with serve(photos) as (address, _):
        for path in ("/samples", "/media/0/0?side=320", "/static/view.css", "/nothing"):
            _, headers, _ = ask(address, path)
            assert "script-src 'self'" in headers["content-security-policy"]
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


class _Elements(HTMLParser):
    """Collects what would run: scripts, and attributes that hold code or addresses of other places."""

    def __init__(self) -> None:
        super().__init__()
        self.suspicious: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            local = (value or "").startswith(("/", "#"))
            if (
                name.startswith("on")
                or name == "style"
                or (name in ("src", "href", "action", "data-live") and not local)
            ):
                self.suspicious.append(f"{tag} {name}={value}")
        if tag in ("iframe", "object", "embed", "base", "style") or (tag == "script" and dict(attrs) != _OWN_SCRIPT):
            self.suspicious.append(tag)


_OWN_SCRIPT = {"src": "/static/view.js", "defer": None}


def test_hostile_samples_do_nothing_but_show(hostile: View, serve: Serve) -> None:
    begun = time.monotonic()
    with serve(hostile) as (address, _):
        for path in ("/samples?n=25", "/balance", "/shards", *(f"/sample/{number}" for number in range(25))):
            status, _, body = ask(address, path)
            assert status == 200, path
            seen = _Elements()
            seen.feed(body.decode())
            assert not seen.suspicious, path
            assert len(body) < 1_000_000, path
            for source in re.findall(rb'src="(/media/[^"]+)"', body):
                status, headers, _ = ask(address, source.decode())
                assert status in (200, 404, 500)
                assert headers["content-type"].partition(";")[0] in (
                    "image/png",
                    "image/jpeg",
                    "audio/wav",
                    "text/plain",
                )
    assert time.monotonic() - begun < 300


def test_a_sample_that_takes_too_long_does_not_hold_the_page(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, photos: View
) -> None:
    held = threading.Event()
    monkeypatch.setattr(app, "ANSWER_S", 0.2)
    monkeypatch.setattr(app, "samples_page", lambda browser, query: held.wait(60))
    with serve(photos) as (address, _):
        status, _, body = ask(address, "/samples")
        assert status == 503
        assert b"took longer than" in body
        held.set()


def test_a_player_gets_the_part_of_a_sound_that_it_asks_for(tmp_path: Path, serve: Serve) -> None:
    sound = {"array": np.zeros(8000, np.float32), "sampling_rate": 8000}
    ps.from_items([{"__key__": "a", "wav": sound}]).write_tar(tmp_path / "a.tar")
    with serve(View(ps.read_tar(tmp_path / "a.tar"))) as (address, _):
        status, headers, whole = ask(address, "/media/0/0")
        assert (status, headers["content-type"], len(whole)) == (200, "audio/wav", 16044)
        status, headers, part = ask(address, "/media/0/0", Range="bytes=100-199")
        assert (status, part) == (206, whole[100:200])
        assert headers["content-range"] == "bytes 100-199/16044"


def test_a_run_or_a_ledger_alone_has_a_page(tmp_path: Path, serve: Serve) -> None:
    with serve(View(run=str(tmp_path))) as (address, _):
        assert ask(address, "/")[1]["location"] == "/run"
        assert b"No run has written here yet" in ask(address, "/run")[2]
        assert ask(address, "/metrics?token=secret-token", token=None)[0] == 200
        assert ask(address, "/metrics", token=None, Authorization="Bearer secret-token")[0] == 200
        assert ask(address, "/samples")[0] == 404
    with serve(View(ledger=str(tmp_path / "nothing"))) as (address, _):
        assert ask(address, "/")[1]["location"] == "/ledger"
        status, _, body = ask(address, "/ledger")
        assert status == 500
        assert b"Traceback" not in body


def test_a_port_that_is_not_free_is_an_error(photos: View, serve: Serve) -> None:
    with serve(photos) as (address, _), pytest.raises(PlanError, match="is not free"):
        serve_view(photos, int(address.rpartition(":")[2]), opened=lambda address: None)
