"""Streams by URL, of files, commands and Penstock's storages; the module is callable: ``wds.gopen(url)``."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from penstock.blobs.object_file import ObjectReader, ObjectWriter
from penstock.compat.webdataset import utils
from penstock.storage import open_storage

_SCHEMES = ("__default__", "http", "https", "s3", "gs", "hf", "az", "ais", "sftp", "ftps", "scp", "htgs")
_PIPE_CLOSED = (141, -13)  # how a command whose reader stopped early ends


class Pipe(io.RawIOBase):
    def __init__(
        self, *args: Any, mode: str = "rb", timeout: float = 7200.0, ignore_status: Any = (), **options: Any
    ) -> None:
        self.args, self.timeout, self.ignore_status = (args, options), timeout, (None, 0, *ignore_status)
        end = "stdout" if mode[0] == "r" else "stdin"
        self.proc: Any = subprocess.Popen(*args, **{end: subprocess.PIPE, **options})
        self.stream: Any = getattr(self.proc, end)

    def check_status(self, wait: bool = False) -> None:
        status = self.proc.wait(self.timeout) if wait else self.proc.poll()
        if status not in self.ignore_status:
            raise OSError(f"{self.args}: exit {status}")

    def read(self, size: int = -1) -> bytes:
        found: bytes = self.stream.read(size)
        self.check_status(wait=not found)
        return found

    def write(self, data: Any) -> int:
        written: int = self.stream.write(data)
        self.check_status()
        return written

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.stream.close()
            self.check_status(wait=True)


def local_path(url: str) -> str | None:
    if url.startswith("file:"):
        return url2pathname(urlparse(url).path)
    return None if url == "-" or urlparse(url).scheme else url


def gopen_pipe(url: str, mode: str = "rb", bufsize: int = 8192) -> Pipe:
    """Start the shell command of a ``pipe:`` URL; ``ValueError`` if commands are not trusted."""
    enforced = "gopen_pipe: unsafe_gopen is False, cannot open pipe URLs"
    utils.require_trust("pipe", f"{url!r} runs a shell command, which is refused", enforced)
    return Pipe(url[5:], mode=mode, shell=True, bufsize=max(bufsize, 1 << 16), ignore_status=_PIPE_CLOSED)


def gopen_storage(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> ObjectReader | ObjectWriter:
    return ObjectReader(url) if mode[0] == "r" else ObjectWriter(open_storage(url).put(url))


gopen_schemes: dict[str, Callable[..., Any]] = {"pipe": gopen_pipe, **dict.fromkeys(_SCHEMES, gopen_storage)}
"""Which function opens which scheme, ``f(url, mode, bufsize)``; programs register their own here."""


def rewrite_url(url: str) -> str:
    """Apply the first matching rule of ``GOPEN_REWRITE="regex=replacement;..."``; ``ValueError`` if not trusted."""
    if "GOPEN_REWRITE" not in os.environ:
        return url
    enforced = "rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment variables"
    utils.require_trust("pipe", "GOPEN_REWRITE in the environment changes URLs, which is refused", enforced)
    for rule in os.environ["GOPEN_REWRITE"].split(";"):
        pattern, _, replacement = rule.partition("=")
        if (changed := re.sub("^" + pattern, replacement, url)) != url:
            return changed
    return url


def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
    if url == "-":
        return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
    url = rewrite_url(url)
    path = local_path(url)
    if path is None:
        return gopen_schemes.get(urlparse(url).scheme, gopen_schemes["__default__"])(url, mode, bufsize, **options)
    if utils.enforce_security:
        raise ValueError("gopen: unsafe_gopen is False, cannot open local files")
    return open(path, mode)


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.gopen(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
