"""How fast a dataset is on this machine: each step alone, all of them together, and what the machine allows.

Every figure is a pace: samples in memory, or shards, gone through again and again for about as many seconds as are
given. Imports, and the first contact with the shards, come before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from threading import Lock
from typing import Any

from penstock.dataset.dataset import Dataset
from penstock.dataset.sources import from_items, read_tar
from penstock.dataset.table_sources import read_parquet
from penstock.errors import DataError, MissingExtra, PlanError
from penstock.formats.tar.source import SUFFIXES
from penstock.storage import Storage, expand, open_storage, redacted, spell

_IN_MEMORY = 256_000_000  # bytes of samples, and again of decoded ones
_MOST = 1024  # samples in memory
_PIECE = 8_000_000  # bytes of one read
_SHARDS = 64  # that plain reads go through
_CONNECTIONS = 8  # that read at a time from a place which is not this machine
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")

Sample = dict[str, Any]
_Piece = tuple[Storage, str, int, int]


class _Unknown(Exception):
    """Something cannot be measured here."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What one step does in a second."""

    name: str
    samples_s: float
    bytes_s: float | None = None


@dataclass(frozen=True, slots=True)
class Paces:
    """What was found: ``limits`` of the machine, ``steps`` alone, and all of them ``together``."""

    shards: int
    sample_bytes: float
    image: str | None  # the field
    side: int | None  # pixels on the long side of the images, the median
    size: int  # pixels that are kept of them
    workers: int
    remote: bool
    limits: tuple[BenchResult, ...]
    steps: tuple[BenchResult, ...]
    together: BenchResult
    notes: tuple[str, ...]  # what could not be measured, and why

    @property
    def bottleneck(self) -> BenchResult:
        """The slowest step."""
        return min(self.steps, key=lambda pace: pace.samples_s)

    def named(self, name: str) -> BenchResult | None:
        """A step or a limit."""
        return next((pace for pace in (*self.limits, *self.steps) if pace.name == name), None)


def pace(
    urls: str | Sequence[str],
    spec: str | None = None,
    *,
    batch: int = 64,
    size: int = 224,
    antialias: bool = True,
    workers: int | None = None,
    seconds: float = 2.0,
    storage: Storage | None = None,
) -> Paces:
    """Measure shards (tar or Parquet): reading, decoding, augmenting, batching, each alone and all together.

    Args:
        urls: The shards.
        spec: How fields are decoded; ``None``: images to RGB, everything else by its extension.
        batch: Samples in a batch.
        size: What images are cropped and scaled to.
        antialias: How they are scaled.
        workers: Threads that decode; one a core by default.
        seconds: How long each step is looked at.
        storage: Where the shards are, if their URLs do not say so.

    Raises:
        DataError: there is no sample, or one cannot be decoded.
        PlanError: an argument makes no sense.
        StorageError: the shards cannot be read.
    """
    if batch < 1 or size < 1 or not seconds > 0 or (workers is not None and workers < 1):
        raise PlanError(f"batch={batch}, size={size}, seconds={seconds} and workers={workers} must be above 0")
    listed = expand(spell(urls), (*SUFFIXES, ".parquet"), storage)
    ds = read_parquet(listed, storage=storage) if listed[0].endswith(".parquet") else read_tar(listed, storage=storage)
    return _Bench(ds, listed, spec, batch, size, antialias, workers or _cores(), seconds, storage).paces()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    storage: Storage | None

    def paces(self) -> Paces:
        samples = _taken(self.ds)
        if not samples:
            raise DataError("there is no sample to measure", self.urls[0])
        image = next((name for name, value in samples[0].items() if _is_image(value)), None)
        held = from_items(samples)
        weight = sum(map(_nbytes, samples)) / len(samples)
        remote = open_storage(self.urls[0], self.storage).local_path(self.urls[0]) is None
        notes: list[str] = []
        limits = self._tried(notes, lambda: self._read_limit(weight, remote))
        steps = [self._read(weight)]
        ready = samples
        if any(isinstance(value, bytes | dict) for value in samples[0].values()):  # else there is nothing to decode
            decoded = self._decoded(held, image, self.spec or "rgb8")
            steps.append(self._pace("decode", decoded.repeat(), weight=weight))
            ready = _taken(self._decoded(held, image, "rgb8"))
        whole, side = self._decoded(self.ds, image, self.spec or "rgb8"), None
        if image is not None:
            alone = self._tried(notes, lambda: self._decode_limit([sample[image] for sample in samples]))
            limits += alone
            side = sorted(max(sample[image].shape[:2]) for sample in ready)[len(ready) // 2]
            if alone and (augmented := self._tried(notes, lambda: self._augmented(ready, image))):
                steps += augmented
                ready = from_items(ready).map(self._crop(image)).take(self.batch)
                whole = self._decoded(self.ds, image, self._transform())
        steps.append(self._pace("batch", from_items(ready).repeat().batched(self.batch), _rows))
        together = self._pace("all together", whole.repeat().batched(self.batch), _rows, weight)
        return Paces(
            shards=len(self.urls),
            sample_bytes=weight,
            image=image,
            side=side,
            size=self.size,
            workers=self.workers,
            remote=remote,
            limits=tuple(limits),
            steps=tuple(steps),
            together=together,
            notes=tuple(notes),
        )

    def _read(self, weight: float) -> BenchResult:
        """Samples of tar shards; of tables batches, which is what their readers make."""
        if self.urls[0].endswith(".parquet"):
            return self._pace("read", self.ds.repeat().batched(self.batch), _rows, weight)
        return self._pace("read", self.ds.repeat(), weight=weight)

    def _decoded(self, ds: Dataset, image: str | None, how: Any) -> Dataset:
        """Decoded samples; the image as it is said."""
        return ds.decode(self.spec, fields={} if image is None else {image: how}, workers=self.workers)

    def _transform(self) -> Any:
        from penstock import vision

        return vision.RandomResizedCrop(self.size, flip=True, antialias=self.antialias)

    def _crop(self, image: str) -> Callable[..., Sample]:
        transform = self._transform()

        def crop(sample: Sample, rng: Any) -> Sample:
            return {**sample, image: transform(sample[image], rng)}

        return crop

    def _augmented(self, decoded: list[Sample], image: str) -> BenchResult:
        """A random part of images that are decoded, scaled and flipped."""
        crop = self._crop(image)
        return self._pace("augment", from_items(decoded).map(crop, workers=self.workers).repeat())

    def _tried(self, notes: list[str], measure: Callable[[], BenchResult]) -> list[BenchResult]:
        """One pace; none, and a note, where what it takes is not installed."""
        try:
            return [measure()]
        except (MissingExtra, _Unknown) as exc:
            notes.append(str(exc))
            return []

    def _pace(
        self, name: str, ds: Dataset, count: Callable[[Any], int] | None = None, weight: float | None = None
    ) -> BenchResult:
        ds.first()  # imports are no part of it
        with _going_through(ds) as items:
            rate = _rate(map(count or _one, items), self.seconds)
        return BenchResult(name, rate, None if weight is None else rate * weight)

    def _read_limit(self, weight: float, remote: bool) -> BenchResult:
        """The same bytes, read in large pieces and dropped."""
        pieces = list(_pieces(self.urls, self.storage))
        if not pieces:
            raise _Unknown(
                f"{redacted(self.urls[0])} does not say how large it is: what plain reads reach is not known"
            )

        def reader() -> Callable[[_Piece], int]:
            buffer = memoryview(bytearray(_PIECE))

            def read(piece: _Piece) -> int:
                place, url, start, stop = piece
                return len(place.read(url, start, stop, into=buffer[: stop - start]))

            return read

        rate = _side_by_side(_CONNECTIONS if remote else 1, self.seconds, pieces, reader)
        return BenchResult("limit: read", rate / weight, rate)

    def _decode_limit(self, images: list[bytes]) -> BenchResult:
        """The decoder alone on bytes in memory, on all cores: libjpeg-turbo where they are JPEG."""
        from penstock.vision.decoding import read_image, simplejpeg

        decode = simplejpeg().decode_jpeg if all(image.startswith(_MAGIC[0]) for image in images) else read_image
        try:
            decode(images[0])
        except ValueError:  # a rare kind: only all of the reader can tell
            decode = read_image

        def decoder() -> Callable[[bytes], int]:
            def one(image: bytes) -> int:
                decode(image)
                return 1

            return one

        rate = _side_by_side(_cores(), self.seconds, images, decoder)
        return BenchResult("limit: decode", rate, rate * sum(map(len, images)) / len(images))


@contextmanager
def _going_through(ds: Dataset) -> Iterator[Iterator[Any]]:
    """The samples, as long as somebody wants them."""
    samples: Any = iter(ds)
    try:
        yield samples
    finally:
        samples.close()


def _taken(ds: Dataset) -> list[Sample]:
    """The first samples, as many as may be held."""
    found: list[Sample] = []
    held = 0
    with _going_through(ds) as samples:
        for sample in samples:
            found.append(sample)
            held += _nbytes(sample)
            if len(found) == _MOST or held > _IN_MEMORY:
                break
    return found


def _nbytes(sample: Sample) -> int:
    return sum(_size(value) for name, value in sample.items() if not name.startswith("__"))


def _size(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    nbytes: int = getattr(value, "nbytes", 8)  # 8: a number
    return nbytes


def _is_image(value: Any) -> bool:
    return isinstance(value, bytes) and (value.startswith(_MAGIC) or (value[:4] == b"RIFF" and value[8:12] == b"WEBP"))


def _one(_: Any) -> int:
    return 1


def _rows(batch: dict[str, Any]) -> int:
    return len(next(iter(batch.values())))


def _rate(counts: Iterable[int], seconds: float) -> float:
    """How much was counted in a second."""
    begun = now = time.perf_counter()
    seen = 0
    for many in counts:
        now = time.perf_counter()
        seen += many
        if now >= begun + seconds:
            break
    return seen / (now - begun)


def _side_by_side(
    threads: int, seconds: float, things: Sequence[Any], worker: Callable[[], Callable[[Any], int]]
) -> float:
    """What threads get done in a second that take things in turn, again and again."""
    turn, lock = cycle(things), Lock()

    def counts() -> Iterator[int]:
        work = worker()
        while True:
            with lock:
                thing = next(turn)
            yield work(thing)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda _: _rate(counts(), seconds), range(threads)))


def _pieces(urls: list[str], storage: Storage | None) -> Iterator[_Piece]:
    """What there is to read, front to back, of as many shards as are worth asking for."""
    for url in urls[:_SHARDS]:
        place = open_storage(url, storage)
        size = place.info(url).size or 0
        for start in range(0, size, _PIECE):
            yield place, url, start, min(start + _PIECE, size)
