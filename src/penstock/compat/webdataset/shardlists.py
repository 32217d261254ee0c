"""Where shards come from: lists, samples with replacement, folders that are watched; and who reads which of them."""

import glob
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from penstock.compat.webdataset import utils
from penstock.compat.webdataset.filters import pipelinefilter
from penstock.compat.webdataset.pytorch import IterableDataset
from penstock.landing.lock import is_running
from penstock.storage import expand_braces


def split_by_node(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    rank, world, _, _ = utils.pytorch_worker_info(group=group)
    yield from islice(src, rank, None, world)


def single_node_only(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    if utils.pytorch_worker_info(group=group)[1] > 1:
        raise ValueError("you need to add an explicit nodesplitter to your input pipeline for multi-node training")
    yield from src


def split_by_worker(src: Iterable[Any]) -> Iterator[Any]:
    _, _, worker, workers = utils.pytorch_worker_info()
    yield from islice(src, worker, None, workers)


def expand_urls(urls: str) -> list[str]:
    """Expand ``a::b``, ``${NAME}`` (the variable ``WDS_NAME``) and braces in text."""
    result: list[str] = []
    for url in urls.split("::"):
        for _ in range(10):  # a variable may hold others
            url = re.sub(r"\$\{(\w+)\}", lambda name: os.environ[f"WDS_{name[1]}"], url)
        result.extend(expand_braces(url))
    return result


def expand_source(source: Any, max_urls: int = 1_000_000_000) -> list[str]:
    """List the URLs of a pattern or an iterable; ``ValueError`` for anything else."""
    if isinstance(source, str):
        return expand_urls(source)
    iterable = isinstance(source, Iterable) and not isinstance(source, bytes | dict)
    urls = list(source if isinstance(source, list) else islice(source, max_urls)) if iterable else [source]
    for url in urls[:1]:
        if not isinstance(url, str):
            raise ValueError(f"cannot handle urls of type {type(url)}: give a pattern, or URLs as text")
    return urls


class SimpleShardList(IterableDataset[Any]):
    def __init__(self, urls: Any, seed: Any = None) -> None:
        self.urls = expand_source(urls)
        if not self.urls:
            raise ValueError("the list of shards is empty")
        self.seed = time.time() if seed is True else seed

    def __len__(self) -> int:
        return len(self.urls)

    def __iter__(self) -> Iterator[Any]:
        urls = self.urls.copy()
        if self.seed is not None:
            random.Random(self.seed).shuffle(urls)
        return iter([{"url": url} for url in urls])


shardspec = SimpleShardList


def resampled_(src: Iterable[Any], n: int = sys.maxsize) -> Iterator[Any]:
    items, rng = list(src), random.Random(os.urandom(20))
    return (rng.choice(items) for _ in range(n))


resampled = pipelinefilter(resampled_)


def non_empty(src: Iterable[Any]) -> Iterator[Any]:
    item = nothing = object()
    for item in src:
        yield item
    if item is nothing:
        problem = "No samples found in dataset; perhaps you have fewer shards than workers"
        raise ValueError(f"{problem}: WebDataset(..., empty_check=False) allows that")


@dataclass(eq=False)
class ResampledShards(IterableDataset[Any]):
    """Yields shards at random, with replacement, ``nshards`` per epoch; each worker has a seed of its own."""

    urls: Any
    nshards: int = sys.maxsize
    seed: int = 0
    worker_seed: Any = None
    deterministic: bool = False
    max_urls: int = 1_000_000
    empty_check: bool = True
    epoch: int = -1

    def __post_init__(self) -> None:
        self.urls = expand_source(self.urls, self.max_urls)
        self.worker_seed = self.worker_seed or utils.pytorch_worker_seed
        if self.empty_check and not self.urls:
            raise ValueError("empty_check=True, but no shards found in ResampledShards")

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        chance = () if self.deterministic else (os.getpid(), time.time_ns(), os.urandom(4))
        rng = random.Random(utils.make_seed(self.worker_seed(), self.epoch, self.seed, *chance))
        for _ in range(self.nshards):
            yield {"url": self.urls[rng.randint(0, len(self.urls) - 1)]}


ResampledShardList = ResampledShards


@dataclass(eq=False)
class DirectoryShardList(IterableDataset[Any]):
    """Yields the shards of a folder as they appear; a shard is renamed while it is being read."""

    path: str  # with a slash at its end
    pattern: str = "*.{tar,tgz,tar.tgz}"
    poll: float | None = 1  # seconds between looks into an empty folder; None: an empty folder is the end
    timeout: float = 1e12  # seconds after which it ends
    mode: str = "resample"  # what becomes of a shard that was read: it stays, or "unlink", or "keep" (renamed)
    select: str = "random"  # or "oldest"

    def __post_init__(self) -> None:
        if not os.path.isdir(self.path):
            raise FileNotFoundError(f"{self.path}: no such folder, and a slash at the end means one: name the shards")

    def recycle(self, activename: str) -> None:
        name = activename.rpartition(".")[0]
        if self.mode == "unlink":
            os.unlink(activename)
        else:
            os.rename(activename, f"{name}._done_" if self.mode == "keep" else name)

    def cleanup_files_without_processes(self) -> None:
        for name in glob.glob(f"{self.path}*._*_"):
            match = re.search(r"\._(\d+)_$", name)
            if match and not is_running(int(match[1])):
                self.recycle(name)

    def __iter__(self) -> Iterator[Any]:
        stop = time.monotonic() + self.timeout
        while time.monotonic() < stop:
            found = sorted(name for each in expand_braces(self.path + self.pattern) for name in glob.glob(each))
            if not found:
                if self.poll is None:
                    return
                warnings.warn(f"{self.path}: waiting for shards, none matches {self.pattern}", stacklevel=2)
                time.sleep(self.poll)
                continue
            chosen = random.choice(found) if self.select == "random" else min(found, key=os.path.getmtime)
            active = f"{chosen}._{os.getpid()}_"
            try:
                os.rename(chosen, active)
            except FileNotFoundError:  # another reader was faster
                continue
            yield {"url": active}
            self.recycle(active)
            self.cleanup_files_without_processes()
