"""Shards opened one after the other: as streams, or as whole files in a cache folder."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlparse

from penstock.blobs.compression import detect
from penstock.compat.webdataset import filters, gopen, tariterators, utils
from penstock.compat.webdataset.handlers import Handler, reraise_exception

_NAMED_BY_PATH = ("", "file", "http", "https", "ftp", "ftps", "gs", "s3", "ais")


def check_tar_format(fname: str) -> bool:
    with open(fname, "rb") as file:
        head = file.read(512)
    return head[257:262] == b"ustar" or detect(head) is not None


def url_to_cache_name(url: str, ndir: int = 0) -> str:
    """Return the name of a shard in the cache: the last part of its path, and ``ndir`` folders."""
    assert isinstance(url, str), url
    parsed = urlparse(url)
    if parsed.scheme not in _NAMED_BY_PATH:
        return quote(url, safe="_+{}*,-")[-128:]
    return "/".join(parsed.path.lstrip("/").split("/")[-1 - ndir :])


pipe_cleaner = url_to_cache_name  # the name of WebDataset's default


@dataclass(eq=False)
class LRUCleanup:  # deletes the oldest files of a folder when all together are larger than ``cache_size``
    cache_dir: Any = None
    cache_size: float = 1e12
    keyfn: Callable[[str], float] = os.path.getctime
    interval: float | None = 30  # seconds between two clean-ups
    last_run: float = 0.0

    def cleanup(self) -> None:
        if self.interval is not None and time.time() - self.last_run < self.interval:
            return
        try:
            files = [os.path.join(folder, name) for folder, _, names in os.walk(self.cache_dir) for name in names]
            total = sum(os.path.getsize(file) for file in files)
            for file in sorted(files, key=self.keyfn):
                if total <= self.cache_size:
                    break
                total -= os.path.getsize(file)
                os.remove(file)
        except OSError:
            pass  # another process deletes files too
        self.last_run = time.time()


class StreamingOpen:
    def __init__(self, verbose: bool = False, handler: Handler = reraise_exception) -> None:
        self.verbose, self.handler = verbose, handler

    def __call__(self, urls: Iterable[Any]) -> Iterator[dict[str, Any]]:
        return tariterators.open_each(urls, self._open, self.handler)

    def _open(self, url: str) -> tuple[Any, str | None]:
        path = gopen.local_path(url)
        return (gopen.gopen(url), None) if path is None else (open(path, "rb"), path)


class FileCache(StreamingOpen):  # copies remote shards to a folder, as whole files, and opens them there
    def __init__(
        self,
        cache_dir: Any = None,
        url_to_name: Callable[[str], str] = url_to_cache_name,
        verbose: bool = False,
        validator: Callable[[str], bool] | None = check_tar_format,
        handler: Handler = reraise_exception,
        cache_size: float = -1,  # bytes; -1: any number
    ) -> None:
        super().__init__(verbose, handler)
        self.cache_dir = os.environ.get("WDS_CACHE", "./_cache") if cache_dir is None else os.fspath(cache_dir)
        self.cleaner = LRUCleanup(self.cache_dir, cache_size if cache_size > 0 else float("inf"))
        self.url_to_name, self.validator = url_to_name, validator

    def get_file(self, url: str) -> str:
        path = os.path.join(self.cache_dir, self.url_to_name(url))
        if os.path.exists(path):
            return path
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.cleaner.cleanup()
        with tempfile.TemporaryDirectory(prefix=".temp", dir=self.cache_dir) as folder:
            copy = os.path.join(folder, "shard")
            with gopen.gopen(url) as stream, open(copy, "wb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
            if self.validator and not self.validator(copy):
                raise ValueError(f"{url} is not a tar archive")
            os.rename(copy, path)  # complete
        return path

    def _open(self, url: str) -> tuple[Any, str | None]:
        path = gopen.local_path(url) or self.get_file(url)
        return open(path, "rb"), path


def cached_url_opener(data: Any, handler: Handler = reraise_exception, **options: Any) -> Iterator[dict[str, Any]]:
    utils.warn_deprecated("the cached openers", "write WebDataset(urls, cache_dir=...)")
    return FileCache(handler=handler, **options)(data)


def cached_tarfile_samples(src: Any, handler: Handler = reraise_exception, **options: Any) -> Iterator[dict[str, Any]]:
    chosen = {name: options.pop(name, None) for name in ("select_files", "rename_files")}
    files = tariterators.tar_file_expander(cached_url_opener(src, handler, **options), handler, **chosen)
    return tariterators.group_by_keys(files, handler=handler)


cached_tarfile_to_samples = filters.pipelinefilter(cached_tarfile_samples)
