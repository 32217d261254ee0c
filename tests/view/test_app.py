"""Who may ask the page, and what hostile data can do to it: nothing."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import pickle
import re
import threading
import time
import zipfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
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


def _bomb(kind: str) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.npy", bytes(110_000_000))
        return out.getvalue()
    if kind == "gzip":
        return gzip.compress(bytes(110_000_000))
    PIL.Image.new("1", (20_000, 20_000)).save(out, "PNG")
    return out.getvalue()


SCRIPT = "<script>document.title='owned'</script>"
SVG = f"<svg xmlns='http://www.w3.org/2000/svg' onload=\"document.title='owned'\">{SCRIPT}</svg>"


def hostile_samples() -> list[dict[str, Any]]:
    """Return 25 samples that are made to break a page; keys are unique and fit a shard."""
    tall = io.BytesIO()
    PIL.Image.new("L", (1, 60_000)).save(tall, "PNG")
    deep = b'{"a":' * 5000 + b"1" + b"}" * 5000
    fields: list[dict[str, Any]] = [
        {"txt": SCRIPT.encode()},
        {"html": f"<html><body onload=alert(1)>{SCRIPT}".encode()},
        {"svg": SVG.encode()},
        {"jpg": SVG.encode()},
        {"png": f"\x89PNG\r\n\x1a\n{SCRIPT}".encode("latin-1")},
        {"gif": b"GIF89a" + SCRIPT.encode()},
        {"json": json.dumps({SCRIPT: [SCRIPT, {"</pre>": "'\"><img src=x onerror=alert(1)>"}]}).encode()},
        {"json": deep},
        {"json": b"[" * 100_000},
        {"json": b'{"a": 1e999999, "b": NaN}'},
        {"cls": b"9" * 100_000},
        {"cls": SCRIPT.encode()},
        {"txt": b"x" * 100_000_000},
        {"txt": b"\xff\xfe\x00\x1b[2J\x07" + "\u202egnp.exe\u2066".encode()},
        {"txt": "\0".join("abc").encode()},
        {"npz": _bomb("zip")},
        {"txt.gz": _bomb("gzip")},
        {"png": _bomb("png")},
        {"png": tall.getvalue()},
        {"npy": b"\x93NUMPY\x01\x00\x76\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(128)},
        {"pkl": pickle.dumps({"a": 1}), "pyd": b"cos\nsystem\n(S'true'\ntR."},
        {"wav": b"RIFF\xff\xff\xff\xffWAVEfmt " + bytes(100)},
        {"mp3": b"ID3" + bytes(range(256)) * 10},
        {"npy": _npy_nan()},
        {"jpg": b"", "txt": b"", "json": b"", "wav": b""},
    ]
    keys = [f"{number}\"><script>alert({number})<{chr(0x202E)}script>\x1b\x07'&amp;" for number in range(len(fields))]
    keys = [key.replace(".", "").replace("/", "") for key in keys]
    return [{"__key__": key, **found} for key, found in zip(keys, fields, strict=True)]


def _npy_nan() -> bytes:
    out = io.BytesIO()
    np.save(out, np.full((50, 50), np.nan))
    return out.getvalue()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> View:
    """A view of a shard with 25 samples that are made to break a page."""
    path = tmp_path_factory.mktemp("hostile") / "hostile.tar"
    with ps.TarWriter(path) as writer:
        for sample in hostile_samples():
            writer.write(sample)
    return View(ps.read_tar(path), (str(path),))


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


def test_a_port_that_is_not_free_is_an_error(photos: View, serve: Serve) -> None:
    with serve(photos) as (address, _), pytest.raises(PlanError, match="is not free"):
        serve_view(photos, int(address.rpartition(":")[2]), opened=lambda address: None)
