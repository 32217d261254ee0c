"""The names of wids: shards read by sample number through Penstock's index, and samplers that read shard by shard.

>>> from penstock.compat.wids import ShardListDataset, ShardListSampler
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from io import BytesIO
from typing import Any
from urllib.parse import urljoin

import numpy as np
from torch.utils.data import Dataset, Sampler

from penstock.blobs.draft import read_object
from penstock.codecs import Limits, is_image
from penstock.codecs.images import open_image
from penstock.compat.webdataset.autodecode import Decoder
from penstock.compat.webdataset.utils import pytorch_worker_info
from penstock.errors import DataError, PlanError
from penstock.formats.tar import TarReader
from penstock.plan import Fields
from penstock.storage import Cache, open_storage, relative_names
from penstock.storage.cache import wrap_with_cache

_ALL_FIELDS = Fields()
_DECODED = {"txt", "text", "cls", "cls2", "jpg", "png", "ppm", "pgm", "pbm", "pnm", "json", "npy", "mp"}
_DECODED |= {"pt", "pth", "pickle", "pkl"}  # last extensions; fields with others are left to the program


class ShardListDataset(Dataset[Any]):
    """The samples of shards by number; fields have a leading dot, as in ``sample[".jpg"]``, and are files in memory.

    Args:
        shards: The URL of a wids index (JSON), or a list of ``dict(url=..., nsamples=...)``.
        cache_size: The most bytes in ``cache_dir``, where remote shards are kept; -1: any number.
        transformations: "PIL", "numpy", a function, or a list of them.
        base: What the URLs of the index are relative to; by default its folder.
        options: Replaces entries of the index. ``lru_size``, ``localname`` and ``keep`` are not used.

    Raises:
        PlanError: The index has no shards, or a transformation is unknown.
        StorageError: The index cannot be read.
    """

    def __init__(
        self,
        shards: Any,
        cache_size: float = -1,
        cache_dir: Any = None,
        lru_size: int = 10,
        dataset_name: str | None = None,
        localname: Any = None,
        transformations: Any = "PIL",
        keep: bool = False,
        base: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.spec = (_load_index(shards, base) if isinstance(shards, str) else {"shardlist": shards}) | (options or {})
        self.shards: list[dict[str, Any]] = self.spec["shardlist"]
        if not self.shards:
            raise PlanError(f"{shards!r} lists no shards")
        self.dataset_name = dataset_name or self.spec.get("name") or "wids"
        self.lengths = [int(shard["nsamples"]) for shard in self.shards]
        self.cum_lengths = np.cumsum(self.lengths)
        steps = transformations if isinstance(transformations, list) else [transformations]
        self.transformations = [_transformation(step) for step in steps]
        paths = [shard["url"] for shard in self.shards]
        cache = None if cache_dir is None else Cache(cache_dir, None if cache_size < 0 else int(cache_size))
        self._reader = TarReader(paths, relative_names(paths), paths, storage=wrap_with_cache(cache, paths, None))

    def add_transform(self, transform: Any) -> ShardListDataset:
        """Add a function of samples, in place."""
        self.transformations.append(_transformation(transform))
        return self

    def __len__(self) -> int:
        return int(self.cum_lengths[-1])

    def __getitem__(self, index: int) -> Any:
        """Return a sample; ``DataError`` if it is damaged, or if the shard and its entry differ in their counts."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = int(np.searchsorted(self.cum_lengths, index, side="right"))
        inner = int(index - self.cum_lengths[shard] + self.lengths[shard])
        if self._reader.count(shard) != self.lengths[shard]:
            problem = f"the index says {self.lengths[shard]} samples, the shard holds {self._reader.count(shard)}"
            raise DataError(problem, self.shards[shard]["url"])
        samples, errors = self._reader.locate(np.array([shard]), np.array([inner]), _ALL_FIELDS).read()
        if errors:
            raise errors[0]
        found: Any = samples[0]
        sample: Any = {n if n[:2] == "__" else f".{n}": v if n[:2] == "__" else BytesIO(v) for n, v in found.items()}
        del sample["__url__"]
        sample |= {"__dataset__": self.shards[shard].get("dataset"), "__index__": index}
        sample |= {"__shard__": self.shards[shard]["url"], "__shardindex__": inner}
        for transform in self.transformations:
            sample = transform(sample)
        return sample

    def close(self) -> None:
        self._reader.suspend()


def _load_index(url: str, base: str | None) -> dict[str, Any]:
    data = read_object(open_storage(url), url)
    if data is None:
        raise PlanError(f"{url}: no such index")
    spec: dict[str, Any] = json.loads(data)
    if spec.get("wids_version") != 1:
        raise PlanError(f"{url}: not a wids index of version 1")
    where = f"{(base or spec.get('base') or url.rpartition('/')[0] or '.').rstrip('/')}/"
    listed = [*spec.get("shardlist", [])]
    for part in spec.get("datasets", []):
        listed += [{**shard, "dataset": part.get("name")} for shard in part["shardlist"]]
    return {**spec, "shardlist": [{**shard, "url": _joined(where, shard["url"])} for shard in listed]}


def _joined(base: str, url: str) -> str:
    if "://" in url or url.startswith("/"):
        return url
    return urljoin(base, url) if base.startswith(("http://", "https://")) else base + url


def _transformation(step: Any) -> Any:
    if callable(step):
        return step
    if step not in ("PIL", "numpy"):
        raise PlanError(f"transformations={step!r}: give 'PIL', 'numpy', a function, or a list of them")
    return _DecodeFields(step)


class _DecodeFields:
    """Decodes the fields that wids decodes, images as they are stored."""

    def __init__(self, kind: str) -> None:
        self.decoder = Decoder([partial(_image, as_array=kind == "numpy")])

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        chosen = [name for name in sample if name.removesuffix(".gz").rpartition(".")[2] in _DECODED]
        place = {"__key__": sample["__key__"], "__url__": sample["__shard__"]}  # for errors
        found = self.decoder({name[1:]: sample[name].getvalue() for name in chosen} | place)
        return sample | {name: found[name[1:]] for name in chosen}


def _image(key: str, data: bytes, as_array: bool) -> Any:
    if not is_image(key.lstrip(".")):
        return None
    image = open_image(data, Limits())
    return np.asarray(image) if as_array else image


class ChunkedSampler(Sampler[int]):
    """The numbers of samples chunk by chunk.

    Args:
        dataset: What is sampled.
        dslength_per_replica: What ``len()`` says; by default how many numbers there are.
        num_samples: How many samples, or (first, last + 1); by default all.
        chunksize: The samples of a chunk.
        seed: Sets the order, together with the epoch.
        shuffle: Put the samples of each chunk in random order, and the chunks, too, from the second epoch on.
        shufflefirst: Put the chunks in random order in the first epoch, too.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        dslength_per_replica: int = -1,
        num_samples: Any = None,
        chunksize: float = 2000,
        seed: int = 0,
        shuffle: bool = False,
        shufflefirst: bool = False,
    ) -> None:
        first, last = num_samples if isinstance(num_samples, tuple) else (0, num_samples or len(dataset))
        starts = range(first, last, int(chunksize))
        self.ranges: Sequence[tuple[int, int]] = [(start, min(start + int(chunksize), last)) for start in starts]
        self.seed, self.shuffle, self.shufflefirst, self.epoch = seed, shuffle, shufflefirst, 0
        self.dslength_per_replica = dslength_per_replica

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        given = self.dslength_per_replica
        return given if given > 0 else sum(stop - start for start, stop in self.ranges)

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(self.seed + 1_289_738_273 * self.epoch)  # the numbers that wids draws
        chunks = [*self.ranges]
        if self.shuffle and (self.shufflefirst or self.epoch > 0):
            rng.shuffle(chunks)
        for start, stop in chunks:
            numbers = [*range(start, stop)]
            if self.shuffle:
                rng.shuffle(numbers)
            yield from numbers
        self.epoch += 1


class ShardedSampler(ChunkedSampler):
    """The numbers of samples shard by shard, each in random order; from the second epoch on, shards in random order."""

    def __init__(
        self,
        dataset: Any,
        lengths: Any = None,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        shufflefirst: bool = False,
    ) -> None:
        super().__init__(dataset, seed=seed, shuffle=shuffle, shufflefirst=shufflefirst)
        ends = np.cumsum(dataset.lengths if lengths is None else lengths).tolist()
        self.ranges = list(zip([0, *ends[:-1]], ends, strict=True))


ShardListSampler = ShardedSampler


def DistributedChunkedSampler(
    dataset: Any,
    *,
    num_replicas: int | None = None,
    rank: int | None = None,
    num_samples: int | None = None,
    shuffle: bool = True,
    drop_last: bool | None = None,
    chunksize: float = 1_000_000,
    **options: Any,
) -> ChunkedSampler:
    """Return the sampler of one rank: of a contiguous part of the dataset, as large on every rank but the last ones.

    ``drop_last`` is not used, as in wids.
    """
    own_rank, world, _, _ = pytorch_worker_info()
    rank, world = own_rank if rank is None else rank, num_replicas or world
    total = num_samples or len(dataset)
    share = -(-total // world)
    part = (min(rank * share, total), min((rank + 1) * share, total))
    return ChunkedSampler(dataset, num_samples=part, chunksize=chunksize, shuffle=shuffle, **options)
