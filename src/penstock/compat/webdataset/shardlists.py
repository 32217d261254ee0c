"""Where shards come from: lists, samples with replacement, folders that are watched; and who reads which of them."""

from __future__ import annotations

import glob
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

from penstock.compat.webdataset import utils
from penstock.compat.webdataset.filters import pipelinefilter
from penstock.compat.webdataset.pytorch import IterableDataset
from penstock.landing.lock import is_running
from penstock.storage import expand_braces

Shards = Iterator[dict[str, Any]]


def envlookup(m: re.Match[str]) -> str:
    """Return the environment variable ``WDS_`` + the name that was matched."""
    key = "WDS_" + m[1]
    assert key in os.environ, f"missing environment variable {key}"
    return os.environ[key]


def envsubst(s: str) -> str:
    """Replace ``${NAME}`` by the environment variable ``WDS_NAME``."""
    return re.sub(r"\$\{(\w+)\}", envlookup, s)


def split_by_node(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Keep every item whose number is this rank's, modulo the world size."""
    rank, world, _, _ = utils.pytorch_worker_info(group=group)
    yield from islice(src, rank, None, world)


def single_node_only(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Pass items on, in one process; ``ValueError`` where there are more."""
    if utils.pytorch_worker_info(group=group)[1] > 1:
        raise ValueError("you need to add an explicit nodesplitter to your input pipeline for multi-node training")
    yield from src


def split_by_worker(src: Iterable[Any]) -> Iterator[Any]:
    """Keep every item whose number is this worker's, modulo the number of workers."""
    _, _, worker, workers = utils.pytorch_worker_info()
    yield from islice(src, worker, None, workers)


def expand_urls(urls: Any) -> list[str]:
    """Expand ``a::b``, ``${NAME}`` and braces in text; return any other iterable as a list."""
    if not isinstance(urls, str):
        return list(urls)
    result: list[str] = []
    for url in urls.split("::"):
        for _ in range(10):  # a variable may hold others
            url = envsubst(url)
        result.extend(expand_braces(url))
    return result


def expand_source(source: Any, max_urls: int = int(1e9)) -> list[str]:
    """Return the URLs of a pattern, a list or another iterable; ``ValueError`` for anything else."""
    if isinstance(source, str | list):
        return expand_urls(source) if isinstance(source, str) else source
    if not utils.is_iterable(source):
        raise ValueError(f"cannot handle {type(source)}")
    return list(islice(source, max_urls))


class SimpleShardList(IterableDataset[Any]):
    """Yields ``dict(url=...)`` for each shard; with a seed, in one random order."""

    def __init__(self, urls: Any, seed: Any = None) -> None:
        super().__init__()
        self.urls = expand_urls(urls)
        assert isinstance(self.urls[0], str)
        self.seed = time.time() if seed is True else seed

    def __len__(self) -> int:
        return len(self.urls)

    def __iter__(self) -> Shards:
        urls = self.urls.copy()
        if self.seed is not None:
            random.Random(self.seed).shuffle(urls)
        return iter([{"url": url} for url in urls])


def resampled_(src: Iterable[Any], n: int = sys.maxsize) -> Iterator[Any]:
    """Yield ``n`` random items, with replacement."""
    items, rng = list(src), random.Random(os.urandom(20))
    return (rng.choice(items) for _ in range(n))


resampled = pipelinefilter(resampled_)


def require_items(src: Iterable[Any], problem: str) -> Iterator[Any]:
    """Pass items on; ``ValueError`` if there is none."""
    item = nothing = object()
    for item in src:
        yield item
    if item is nothing:
        raise ValueError(problem)


def non_empty(src: Iterable[Any]) -> Iterator[Any]:
    """Pass items on; ``ValueError`` if there is none."""
    return require_items(src, "pipeline stage received no data at all and this was declared as an error")


class ResampledShards(IterableDataset[Any]):
    """Yields shards at random, with replacement, ``nshards`` per epoch; each worker has a seed of its own."""

    def __init__(
        self,
        urls: Any,
        nshards: int = sys.maxsize,
        seed: int = 0,
        worker_seed: Callable[[], int] | None = None,
        deterministic: bool = False,
        max_urls: int = int(1e6),
        empty_check: bool = True,
    ) -> None:
        super().__init__()
        self.urls = expand_source(urls, max_urls)
        if empty_check and not self.urls:
            raise ValueError("empty_check=True, but no shards found in ResampledShards")
        assert isinstance(self.urls[0], str)
        self.nshards, self.seed, self.deterministic, self.epoch = nshards, seed, deterministic, -1
        self.worker_seed = utils.pytorch_worker_seed if worker_seed is None else worker_seed

    def __iter__(self) -> Shards:
        self.epoch += 1
        chance = () if self.deterministic else (os.getpid(), time.time_ns(), os.urandom(4))
        seed = utils.make_seed(self.worker_seed(), self.epoch, self.seed, *chance)
        if os.environ.get("WDS_SHOW_SEED", "0") == "1":
            print(f"# ResampledShards seed {seed}")
        self.rng = random.Random(seed)
        for _ in range(self.nshards):
            yield {"url": self.urls[self.rng.randint(0, len(self.urls) - 1)]}


ResampledShardList = ResampledShards


@dataclass(eq=False)
class DirectoryShardList(IterableDataset[Any]):
    """Yields the shards of a folder as they appear; a shard is renamed while it is being read."""

    path: str  # with a slash at its end
    pattern: str = "*.{tar,tgz,tar.tgz}"
    poll: float | None = 1  # seconds between looks into an empty folder; None: an empty folder is the end
    timeout: float = 1e12  # seconds after which it ends
    mode: str | None = "resample"  # what becomes of a shard that was read: it stays, or "unlink", or "keep" (renamed)
    select: str = "random"  # or "oldest"
    fate: Any = None  # not used

    def __post_init__(self) -> None:
        assert self.path.endswith("/"), self.path
        assert os.path.isdir(self.path), self.path
        if self.select not in ("random", "oldest"):
            raise ValueError(f"unknown selection strategy {self.select}")

    def recycle(self, activename: str) -> None:
        """Delete a shard that was read, mark it as done, or give it back its name."""
        name = activename.rpartition(".")[0]
        if self.mode == "unlink":
            os.unlink(activename)
        else:
            os.rename(activename, f"{name}._done_" if self.mode == "keep" else name)

    def cleanup_files_without_processes(self) -> None:
        """Recycle the shards of readers that have died."""
        for name in glob.glob(os.path.join(self.path, "*._*_")):
            match = re.search(r"\._(\d+)_$", name)
            if match and not is_running(int(match[1])):
                self.recycle(name)

    def __iter__(self) -> Shards:
        until = time.time() + self.timeout
        while time.time() < until:
            found = sorted(utils.glob_with_braces(self.path + self.pattern))
            if not found:
                if self.poll is None:
                    return
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


class MultiShardSample(IterableDataset[Any]):
    """Yields shards of several datasets per epoch: all, ``choose`` of them, or ``resample`` with replacement.

    A YAML file or a dict describes them: prefix, buckets, datasets of shards, name, buckets, resample or choose.
    """

    def __init__(self, fname: Any) -> None:
        if not isinstance(fname, dict):
            with open(fname) as stream:
                fname = import_module("yaml").safe_load(stream)
        self.rng = random.Random()
        self.sources: list[tuple[list[str], int, int]] = []
        for entry in fname["datasets"]:
            buckets = entry.get("buckets", fname.get("buckets", ""))
            bucket = (buckets[0] if buckets else "") if isinstance(buckets, list) else buckets
            shards = [entry["shards"]] if isinstance(entry["shards"], str) else entry["shards"]
            names = [name for shard in shards for name in expand_braces(_expanded(shard))]
            urls = [_expanded(fname.get("prefix", "")) + os.path.join(_expanded(bucket), name) for name in names]
            self.sources.append((urls, entry.get("resample", -1), entry.get("choose", -1)))

    def set_epoch(self, seed: int) -> None:
        """Choose the order of the next epoch."""
        self.rng = random.Random(seed)

    def get_shards_for_epoch(self) -> list[str]:
        """Return the shards of one epoch, in random order."""
        result: list[str] = []
        for urls, resample, choose in self.sources:
            some = self.rng.sample(urls, choose) if choose > 0 else urls
            result += self.rng.choices(urls, k=resample) if resample > 0 else some
        self.rng.shuffle(result)
        return result

    def __iter__(self) -> Shards:
        return iter([{"url": url} for url in self.get_shards_for_epoch()])


def _expanded(text: str) -> str:
    return os.path.expanduser(os.path.expandvars(text))


def shardspec(spec: str) -> IterableDataset[Any]:
    """Return the shards of a pattern, or of a ``.yaml`` file."""
    return MultiShardSample(spec) if spec.endswith(".yaml") else SimpleShardList(spec)
