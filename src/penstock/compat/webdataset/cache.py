"""Shards opened one after the other: as streams, or as whole files in a cache folder."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlparse

from penstock.compat.webdataset import filters, gopen, tariterators, utils
from penstock.compat.webdataset.handlers import Handler, reraise_exception

default_cache_dir = os.environ.get("WDS_CACHE", "./_cache")
default_cache_size = float(os.environ.get("WDS_CACHE_SIZE", "1e18"))
_NAMED_BY_PATH = ("", "file", "http", "https", "ftp", "ftps", "gs", "s3", "ais")
_IN_COMMANDS = ("http", "https", "hdfs", "gs", "ais", "s3")


def islocal(url: str) -> bool:
    return urlparse(url).scheme in ("", "file")


def magic_filetype(fname: str) -> str:
    """Describe a file by its first bytes: a tar archive, compressed data, or data."""
    with open(fname, "rb") as file:
        head = file.read(512)
    kind = "POSIX tar archive" if head[257:262] == b"ustar" else "data"
    return f"{fname}: {'gzip compressed data' if head[:2] == bytes((0x1F, 0x8B)) else kind}"


get_filetype = magic_filetype


def check_tar_format(fname: str) -> bool:
    """Return whether a file is a tar archive, or compressed."""
    return not magic_filetype(fname).endswith(": data")


def pipe_cleaner(spec: str) -> str:
    """Return the URL in a ``pipe:`` command, or the text itself."""
    words = spec[5:].split(" ") if spec.startswith("pipe:") else []
    return next((word for word in words if urlparse(word).scheme in _IN_COMMANDS), spec)


def url_to_cache_name(url: str, ndir: int = 0) -> str:
    """Return the name of a shard in the cache: the last part of its path, and ``ndir`` folders."""
    assert isinstance(url, str), url
    parsed = urlparse(url)
    if parsed.scheme not in _NAMED_BY_PATH:
        return quote(url, safe="_+{}*,-")[-128:]
    return "/".join(parsed.path.lstrip("/").split("/")[-1 - ndir :])


@dataclass(eq=False)
class LRUCleanup:
    """Deletes the oldest files of a folder when all together are larger than ``cache_size``."""

    cache_dir: Any = None
    cache_size: float = int(1e12)
    keyfn: Callable[[str], float] = os.path.getctime
    verbose: bool = False
    interval: float | None = 30  # seconds between two clean-ups
    last_run: float = 0.0

    def set_cache_dir(self, cache_dir: Any) -> None:
        self.cache_dir = cache_dir

    def cleanup(self) -> None:
        """Delete files, unless the last time is less than ``interval`` seconds ago."""
        if self.interval is not None and time.time() - self.last_run < self.interval:
            return
        try:
            files = [os.path.join(folder, name) for folder, _, names in os.walk(self.cache_dir) for name in names]
            files.sort(key=self.keyfn)
            total = sum(os.path.getsize(file) for file in files)
            for file in files:
                if total <= self.cache_size:
                    break
                total -= os.path.getsize(file)
                os.remove(file)
        except OSError:
            pass  # another process deletes files too
        self.last_run = time.time()


def lru_cleanup(cache_dir: str, cache_size: float, keyfn: Any = os.path.getctime, verbose: bool = False) -> None:
    """Delete the oldest files of a folder."""
    LRUCleanup(cache_dir, cache_size, keyfn, verbose, None).cleanup()


def download(url: str, dest: str, chunk_size: int = 1024**2, verbose: bool = False) -> None:
    """Copy a shard to a file, which appears when it is complete."""
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(dest) or ".", prefix=".temp", delete=False) as file:
        try:
            with gopen.gopen(url) as stream:
                while data := stream.read(chunk_size):
                    file.write(data)
            os.rename(file.name, dest)
        except BaseException:
            os.unlink(file.name)
            raise


class StreamingOpen:
    """A stage that opens shards as streams."""

    def __init__(self, verbose: bool = False, handler: Handler = reraise_exception) -> None:
        self.verbose, self.handler = verbose, handler

    def __call__(self, urls: Iterable[Any]) -> Iterator[dict[str, Any]]:
        return tariterators.open_each(urls, self._open, self.handler)

    def _open(self, url: str) -> tuple[Any, str | None]:
        if url != "-" and islocal(url):
            return gopen.gopen_file(url), urlparse(url).path
        return gopen.gopen(url), None


class FileCache(StreamingOpen):
    """A stage that copies remote shards to a folder, as whole files, and opens them there.

    ``validator`` returns whether a file is a shard; one that is not is deleted. ``cache_size`` is the most bytes the
    folder may hold, any number if it is not positive.
    """

    def __init__(
        self,
        cache_dir: Any = None,
        *,
        url_to_name: Callable[[str], str] = url_to_cache_name,
        verbose: bool = False,
        validator: Callable[[str], bool] | None = check_tar_format,
        handler: Handler = reraise_exception,
        cache_size: float = -1,
        cache_cleanup_interval: float = 30,
    ) -> None:
        super().__init__(verbose, handler)
        self.url_to_name, self.validator = url_to_name, validator
        self.cache_dir = default_cache_dir if cache_dir is None else os.fspath(cache_dir)
        max_bytes = cache_size if cache_size > 0 else float("inf")
        self.cleaner = LRUCleanup(self.cache_dir, max_bytes, interval=cache_cleanup_interval)

    def get_file(self, url: str) -> str:
        """Return the local path of a shard; copies it if it is not there."""
        if islocal(url):
            return urlparse(url).path
        dest = os.path.join(self.cache_dir, self.url_to_name(url))
        if not os.path.exists(dest):
            if self.verbose:
                print(f"# downloading {url} to {dest}", file=sys.stderr)
            os.makedirs(os.path.dirname(dest), exist_ok=True)
            self.cleaner.cleanup()
            download(url, dest)
            if self.validator and not self.validator(dest):
                with open(dest, "rb") as file:
                    start = file.read(200)
                os.remove(dest)
                raise ValueError(f"{dest} ({url}) is not a tar archive, but contains {start!r}")
        return dest

    def _open(self, url: str) -> tuple[Any, str | None]:
        path = self.get_file(url)
        return open(path, "rb"), path


def file_cache(url_to_name: Callable[[str], str], **options: Any) -> FileCache:
    """Return a cache whose files are named by ``url_to_name``; ``pipe_cleaner`` stands for WebDataset's default."""
    name = url_to_cache_name if url_to_name is pipe_cleaner else url_to_name
    return FileCache(url_to_name=name, **options)


def cached_tarfile_samples(
    src: Iterable[Any],
    handler: Handler = reraise_exception,
    cache_size: float = -1,
    cache_dir: Any = None,
    verbose: bool = False,
    url_to_name: Callable[[str], str] = pipe_cleaner,
    select_files: Any = None,
    rename_files: Any = None,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of shards, which are read from a cache folder."""
    utils.warn_deprecated("cached_tarfile_to_samples", "write WebDataset(urls, cache_dir=...)")
    opened = file_cache(url_to_name, cache_dir=cache_dir, verbose=verbose, handler=handler, cache_size=cache_size)(src)
    files = tariterators.tar_file_expander(opened, handler, select_files, rename_files)
    return tariterators.group_by_keys(files, handler=handler)


cached_tarfile_to_samples = filters.pipelinefilter(cached_tarfile_samples)
