"""Measure how fast a dataset is on this machine: each step alone, all steps together, and the limits of the machine.

Every rate is measured by reading shards, or samples in memory, repeatedly for a given time. Imports and the first
access to the shards are not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from threading import Lock
from typing import Any

from penstock.dataset.dataset import Dataset
from penstock.dataset.sources import from_items, read_tar
from penstock.dataset.table_sources import read_parquet
from penstock.errors import DataError, MissingExtra, PlanError
from penstock.formats.tar.shard_names import TAR_SUFFIXES, expand_shards
from penstock.plan.values import available_cores
from penstock.storage import Storage, open_storage, redacted, url_patterns

_MAX_MEMORY_BYTES = 256_000_000  # for raw samples, and as much again for decoded ones
_MAX_SAMPLES = 1024  # held in memory
_MAX_STORED = 300  # images that are stored in other ways, which takes some 10 ms for each
_READ_BYTES = 8_000_000  # of one plain read
_MAX_SHARDS = 64  # for plain reads
_CONNECTIONS = 8  # for plain reads from remote storage
_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"

_Sample = dict[str, Any]
_Range = tuple[Storage, str, int, int]


class _CannotMeasure(Exception):
    """A limit cannot be measured; the text becomes a note."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The rate of one step, per second; part of ``penstock bench --json``."""

    name: str
    samples_s: float
    bytes_s: float | None = None


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All rates of a dataset; ``penstock bench --json`` prints these fields.

    Attributes:
        shards: The number of shards.
        sample_bytes: The mean size of a sample.
        image: The field with the images, if there is one.
        side: The median length in pixels of the longer side of the images.
        size: The pixels that images are cropped and scaled to.
        workers: The number of decoder threads.
        remote: Whether the shards are on remote storage.
        limits: What the machine allows.
        steps: Each step alone.
        together: All steps in one pipeline.
        notes: What could not be measured, and why.
        stored: How fast crops of some of the images would be, if the images were stored in other ways.
    """

    shards: int
    sample_bytes: float
    image: str | None
    side: int | None
    size: int
    workers: int
    remote: bool
    limits: tuple[BenchResult, ...]
    steps: tuple[BenchResult, ...]
    together: BenchResult
    notes: tuple[str, ...]
    stored: tuple[BenchResult, ...] = ()

    @property
    def bottleneck(self) -> BenchResult:
        """The slowest step."""
        return min(self.steps, key=lambda step: step.samples_s)

    def result(self, name: str) -> BenchResult | None:
        """Return the step or limit of this name, if it was measured."""
        return next((result for result in (*self.limits, *self.steps) if result.name == name), None)


def bench(
    urls: str | Sequence[str],
    spec: str | None = None,
    *,
    batch: int = 64,
    size: int = 224,
    antialias: bool = True,
    workers: int | None = None,
    seconds: float = 2.0,
) -> BenchReport:
    """Measure how fast shards (tar or Parquet) are read, decoded, augmented and batched, alone and together.

    Args:
        urls: The shards.
        spec: How fields are decoded; ``None``: images to RGB, everything else by its extension.
        batch: Samples per batch.
        size: The pixels that images are cropped and scaled to.
        antialias: Whether scaling is antialiased.
        workers: Decoder threads; one per core by default.
        seconds: How long each step is measured.

    Raises:
        DataError: There is no sample, or one cannot be decoded.
        PlanError: A number is not above 0.
        StorageError: The shards cannot be read.
    """
    if batch < 1 or size < 1 or not seconds > 0 or (workers is not None and workers < 1):
        raise PlanError(f"batch={batch}, size={size}, seconds={seconds} and workers={workers} must be above 0")
    shards = expand_shards(url_patterns(urls), None, (*TAR_SUFFIXES, ".parquet"))
    ds = read_parquet(shards) if shards[0].endswith(".parquet") else read_tar(shards)
    return _Bench(ds, shards, spec, batch, size, antialias, workers or available_cores(), seconds).report()


@dataclass(frozen=True, slots=True)
class _Bench:
    ds: Dataset
    urls: list[str]
    spec: str | None
    batch: int
    size: int
    antialias: bool
    workers: int
    seconds: float

    def report(self) -> BenchReport:
        samples = _take(self.ds)
        if not samples:
            raise DataError("the dataset has no sample to measure", self.urls[0])
        image = next((name for name, value in samples[0].items() if _is_image(value)), None)
        in_memory = from_items(samples)
        sample_bytes = sum(map(_nbytes, samples)) / len(samples)
        remote = open_storage(self.urls[0]).local_path(self.urls[0]) is None
        notes: list[str] = []
        limits = self._try(notes, lambda: self._measure_read_limit(sample_bytes, remote))
        steps = [self._measure_reading(sample_bytes)]
        ready = samples
        if any(isinstance(value, bytes | dict) for value in samples[0].values()):  # else there is nothing to decode
            decoded = self._decode(in_memory, image, self.spec or "rgb8")
            steps.append(self._measure("decode", decoded.repeat(), sample_bytes=sample_bytes))
            ready = _take(self._decode(in_memory, image, "rgb8"))
        pipeline, side = self._decode(self.ds, image, self.spec or "rgb8"), None
        decode_limit: list[BenchResult] = []
        if image is not None:
            decode_limit = self._try(notes, lambda: self._measure_decode_limit([sample[image] for sample in samples]))
            limits += decode_limit
            side = sorted(max(sample[image].shape[:2]) for sample in ready)[len(ready) // 2]
            if decode_limit and (augmenting := self._try(notes, lambda: self._measure_augmenting(ready, image))):
                steps += augmenting
                ready = from_items(ready).map(self._crop(image)).take(self.batch)
                pipeline = self._decode(self.ds, image, self._transform())
        steps.append(self._measure("batch", from_items(ready).repeat().batched(self.batch), _rows))
        together = self._measure("all together", pipeline.repeat().batched(self.batch), _rows, sample_bytes)
        return BenchReport(
            shards=len(self.urls),
            sample_bytes=sample_bytes,
            image=image,
            side=side,
            size=self.size,
            workers=self.workers,
            remote=remote,
            limits=tuple(limits),
            steps=tuple(steps),
            together=together,
            notes=tuple(notes),
            stored=() if image is None or not decode_limit else self._measure_stored(samples, image, notes),
        )

    def _measure_reading(self, sample_bytes: float) -> BenchResult:
        """Measure reading samples of tar shards, or batches of tables, whose reader yields columns."""
        if self.urls[0].endswith(".parquet"):
            return self._measure("read", self.ds.repeat().batched(self.batch), _rows, sample_bytes)
        return self._measure("read", self.ds.repeat(), sample_bytes=sample_bytes)

    def _decode(self, ds: Dataset, image: str | None, image_spec: Any) -> Dataset:
        return ds.decode(self.spec, fields={} if image is None else {image: image_spec}, workers=self.workers)

    def _transform(self) -> Any:
        from penstock import vision

        return vision.RandomResizedCrop(self.size, flip=True, antialias=self.antialias)

    def _crop(self, image: str) -> Callable[..., _Sample]:
        transform = self._transform()

        def crop(sample: _Sample, rng: Any) -> _Sample:
            return {**sample, image: transform(sample[image], rng)}

        return crop

    def _measure_augmenting(self, decoded: list[_Sample], image: str) -> BenchResult:
        crop = self._crop(image)
        return self._measure("augment", from_items(decoded).map(crop, workers=self.workers).repeat())

    def _measure_stored(self, samples: list[_Sample], image: str, notes: list[str]) -> tuple[BenchResult, ...]:
        """Measure crops of the first images, which are stored in each way in memory, by one thread per core."""
        from penstock.vision import Store, tile_jpeg

        short = max(256, -(-self.size * 8 // 7))  # the customary margin for random crops: 256 for 224
        images = [sample[image] for sample in samples[:_MAX_STORED]]
        ways: dict[str, Callable[[bytes], bytes]] = {
            "as they are": bytes,
            "in tiles": tile_jpeg,
            f"{short} px, in tiles": Store(short=short),
            f"{short} px, planes": Store(short=short, kind="yuv"),
        }
        results: list[BenchResult] = []
        for name, store in ways.items():
            results += self._try(notes, partial(self._measure_crops, name, images, store))
        return tuple(results)

    def _measure_crops(self, name: str, images: list[bytes], store: Callable[[bytes], bytes]) -> BenchResult:
        import numpy as np

        transform, seeds = self._transform(), iter(range(available_cores()))
        try:
            with ThreadPoolExecutor(available_cores()) as pool:
                stored = list(pool.map(store, images))
        except PlanError as exc:  # jpegtran is not installed
            raise _CannotMeasure(str(exc)) from exc

        def make_cropper() -> Callable[[bytes], int]:
            rng = np.random.default_rng(next(seeds))

            def crop(data: bytes) -> int:
                transform(data, rng)
                return 1

            return crop

        rate = _parallel_rate(available_cores(), self.seconds, stored, make_cropper)
        return BenchResult(name, rate, rate * sum(map(len, stored)) / len(stored))

    def _try(self, notes: list[str], measure: Callable[[], BenchResult]) -> list[BenchResult]:
        """Return one result, or none and add a note if the measurement is not possible."""
        try:
            return [measure()]
        except (MissingExtra, _CannotMeasure) as exc:
            notes.append(str(exc))
            return []

    def _measure(
        self, name: str, ds: Dataset, count: Callable[[Any], int] | None = None, sample_bytes: float | None = None
    ) -> BenchResult:
        ds.first()  # so that imports are not measured
        with _iterate(ds) as items:
            rate = _rate(map(count or _count_one, items), self.seconds)
        return BenchResult(name, rate, None if sample_bytes is None else rate * sample_bytes)

    def _measure_read_limit(self, sample_bytes: float, remote: bool) -> BenchResult:
        """Measure large plain reads of the same bytes."""
        ranges = list(_ranges(self.urls))
        if not ranges:
            raise _CannotMeasure(f"the size of {redacted(self.urls[0])} is unknown, so plain reads cannot be measured")

        def make_reader() -> Callable[[_Range], int]:
            buffer = memoryview(bytearray(_READ_BYTES))

            def read(part: _Range) -> int:
                storage, url, start, stop = part
                return len(storage.read(url, start, stop, into=buffer[: stop - start]))

            return read

        rate = _parallel_rate(_CONNECTIONS if remote else 1, self.seconds, ranges, make_reader)
        return BenchResult("limit: read", rate / sample_bytes, rate)

    def _measure_decode_limit(self, images: list[bytes]) -> BenchResult:
        """Measure the decoder alone, on bytes in memory and on all cores: libjpeg-turbo if all images are JPEG."""
        from penstock.vision.decoding import read_image, simplejpeg

        decode = simplejpeg().decode_jpeg if all(image.startswith(_JPEG) for image in images) else read_image
        try:
            decode(images[0])
        except ValueError:  # a rare kind of JPEG, which only the full reader supports
            decode = read_image

        def make_decoder() -> Callable[[bytes], int]:
            def decode_one(image: bytes) -> int:
                decode(image)
                return 1

            return decode_one

        rate = _parallel_rate(available_cores(), self.seconds, images, make_decoder)
        return BenchResult("limit: decode", rate, rate * sum(map(len, images)) / len(images))


@contextmanager
def _iterate(ds: Dataset) -> Iterator[Iterator[Any]]:
    """Provide an iterator over a dataset, and close it on exit, which ends its workers."""
    samples: Any = iter(ds)
    try:
        yield samples
    finally:
        samples.close()


def _take(ds: Dataset) -> list[_Sample]:
    """Return the first samples, as many as may be held in memory."""
    out: list[_Sample] = []
    nbytes = 0
    with _iterate(ds) as samples:
        for sample in samples:
            out.append(sample)
            nbytes += _nbytes(sample)
            if len(out) == _MAX_SAMPLES or nbytes > _MAX_MEMORY_BYTES:
                break
    return out


def _nbytes(sample: _Sample) -> int:
    return sum(_value_nbytes(value) for name, value in sample.items() if not name.startswith("__"))


def _value_nbytes(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    nbytes: int = getattr(value, "nbytes", 8)  # 8: a number
    return nbytes


def _is_image(value: Any) -> bool:
    return isinstance(value, bytes) and (
        value.startswith((_JPEG, _PNG)) or (value[:4] == b"RIFF" and value[8:12] == b"WEBP")
    )


def _count_one(_: Any) -> int:
    return 1


def _rows(batch: dict[str, Any]) -> int:
    return len(next(iter(batch.values())))


def _rate(counts: Iterable[int], seconds: float) -> float:
    """Sum counts until ``seconds`` have passed; return the sum per second."""
    begun = now = time.perf_counter()
    total = 0
    for count in counts:
        now = time.perf_counter()
        total += count
        if now >= begun + seconds:
            break
    return total / (now - begun)


def _parallel_rate(
    threads: int, seconds: float, items: Sequence[Any], make_worker: Callable[[], Callable[[Any], int]]
) -> float:
    """Return the joint rate of threads that process shared items repeatedly, each with its own worker."""
    endless, lock = cycle(items), Lock()

    def counts() -> Iterator[int]:
        work = make_worker()
        while True:
            with lock:
                item = next(endless)
            yield work(item)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda _: _rate(counts(), seconds), range(threads)))


def _ranges(urls: list[str]) -> Iterator[_Range]:
    """Yield the ranges of the first shards for plain reads, front to back; none if sizes are unknown."""
    for url in urls[:_MAX_SHARDS]:
        storage = open_storage(url)
        size = storage.info(url).size or 0
        for start in range(0, size, _READ_BYTES):
            yield storage, url, start, min(start + _READ_BYTES, size)
