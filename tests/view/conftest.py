"""A real browser for the page: Debian's chromium, driven by chromedriver over the WebDriver protocol."""

from __future__ import annotations

import base64
import fcntl
import gzip
import io
import json
import os
import pickle
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import uvicorn

import penstock as ps
from penstock.view import View, view_app

DEADLINE_S = 120.0
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's number in the protocol
SETTLED = """return document.readyState === "complete" && (location.pathname !== "/samples"
    || /[?&]n=/.test(location.search) || document.querySelectorAll("#grid .card").length !== 40)"""
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",  # with the others below: no work and no requests of its own
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
)


class Chromium:
    """A browser window; a method that finds nothing waits for it."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._session = ""
        options = {"args": OPTIONS, "binary": shutil.which("chromium") or ""}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        created = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{created['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + self._session + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as exc:
            raise AssertionError(f"{method} {path}: {exc.read().decode()[:1000]}") from None

    def open(self, address: str) -> None:
        """Open an address; samples without ``n=`` in it are opened twice by the page, once it knows how many fit."""
        self._call("POST", "/url", {"url": address})
        self.wait(lambda: self.run(SETTLED))

    def enter(self, address: str, token: str) -> None:
        """Have the cookie of a page, without its first page, which is opened twice; see ``open``."""
        self._cdp("Network.setCookie", url=address, name=f"penstock_view_{address.rpartition(':')[2]}", value=token)

    @property
    def address(self) -> str:
        return str(self._call("GET", "/url"))

    def run(self, script: str, *arguments: Any) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    @property
    def text(self) -> str:
        return str(self.run("return document.body ? document.body.innerText : ''"))

    def wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited in vain at {self.address}:\n{self.text[:2000]}"
            time.sleep(0.05)
        return found

    def wait_for(self, text: str) -> None:
        self.wait(lambda: text in self.text)

    def click(self, selector: str) -> None:
        self.wait(lambda: self.run("return !!document.querySelector(arguments[0])", selector))
        self.run("document.querySelector(arguments[0]).click()", selector)

    def type(self, selector: str, text: str) -> None:
        found = self.wait(lambda: self._call("POST", "/elements", {"using": "css selector", "value": selector}))
        self._call("POST", f"/element/{found[0][ELEMENT]}/clear", {})
        self._call("POST", f"/element/{found[0][ELEMENT]}/value", {"text": text})

    def send_key(self, key: str) -> None:
        """Press a key; "\\ue014" is the right arrow, as the protocol writes it."""
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page, not of the window, which has a minimum of its own."""
        self._cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Prefer a "dark" or a "light" page."""
        self._cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _cdp(self, command: str, **parameters: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def wait_for_pictures(self) -> None:
        """Wait until every picture in the window is loaded."""
        script = """return [...document.images].filter(image => {
            const box = image.getBoundingClientRect();
            return box.top < innerHeight && box.bottom > 0 && !(image.complete && image.naturalWidth);
        }).length === 0"""
        self.wait(lambda: self.run(script))

    def screenshot(self) -> bytes:
        return base64.b64decode(self._call("GET", "/screenshot"))

    def console(self) -> list[str]:
        """Return what the browser has complained about since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def quit(self) -> None:
        self._call("DELETE", "")


@pytest.fixture(scope="session")
def chromium_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests of a process; several processes take turns, since a browser takes much memory."""
    log = tmp_path_factory.mktemp("chromium") / "log"
    profile = tempfile.TemporaryDirectory(prefix="penstock-chromium-", ignore_cleanup_errors=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "HOME": profile.name, "XDG_CONFIG_HOME": profile.name, "XDG_CACHE_HOME": profile.name}
    with open(Path(tempfile.gettempdir()) / "penstock-chromium.lock", "w") as lock, log.open("wb") as out:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=out, stderr=out, env=env)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while b"started successfully" not in log.read_bytes():
                assert time.monotonic() < deadline, log.read_text()
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            window = Chromium(port)
            yield window
            window.quit()
        finally:
            process.terminate()
            process.wait()
            profile.cleanup()


@pytest.fixture
def chromium(chromium_process: Chromium) -> Iterator[Chromium]:
    """A browser window; a test fails if the console has an error at its end."""
    chromium_process.resize(1280, 800)
    chromium_process.console()
    yield chromium_process
    # A picture that was still to come when the test stopped its server is not a complaint.
    ended = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
    complaints = [text for text in chromium_process.console() if not any(error in text for error in ended)]
    chromium_process.open("about:blank")
    assert not complaints


@contextmanager
def served(view: View) -> Iterator[tuple[str, str]]:
    """Serve a view in a thread; yield its address and its token."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.listen(64)
        config = uvicorn.Config(view_app(view, "secret-token", port), lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="view server")
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}", "secret-token"
        finally:
            server.should_exit = True
            thread.join()
            view.close()


@pytest.fixture(scope="session")
def serve() -> Callable[[View], Any]:
    """Serves a view while a ``with`` block runs; yields its address and its token."""
    return served


@contextmanager
def command(python: str, *arguments: str) -> Iterator[str]:
    """Run ``penstock view`` and yield the address that it prints."""
    call = [python, "-m", "penstock", "view", *arguments, "--no-browser"]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}\n", line), process.communicate()
        yield line.strip()
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="session")
def view_command(warm_python: str) -> Callable[..., Any]:
    """Runs ``penstock view`` while a ``with`` block runs; yields the address that it prints."""
    return partial(command, warm_python)


def _bomb(kind: str) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("a.npy", bytes(110_000_000))
        return out.getvalue()
    if kind == "gzip":
        return gzip.compress(bytes(110_000_000), 1)
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0)  # a bit for each pixel
    rows = zlib.compress(bytes(20_000 * (1 + 20_000 // 8)), 1)
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


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


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> View:
    """A view of a shard with 25 samples that are made to break a page."""
    path = tmp_path_factory.mktemp("hostile") / "hostile.tar"
    with ps.TarWriter(path) as writer:
        for sample in hostile_samples():
            writer.write(sample)
    return View(ps.read_tar(path), (str(path),))
