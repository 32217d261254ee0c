"""The cases that are measured: a case has rows, and each row is one measurement that runs in its own process.

``python cases.py CASE ROW`` measures one row once and prints the result as JSON. Imports and preparation are not
timed. The row that measures a library imports it, so this module can be imported and run where the other libraries are
not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import data
from data import FULL, HOME, QUICK, Sizes, StoredData

COMPAT = "penstock.compat.webdataset"

Result = dict[str, float]
Sample = dict[str, Any]
Stream = Callable[[], Iterable[Sample]]
Source = Callable[[Sizes], StoredData]
OpenStream = Callable[[StoredData], Stream]


@dataclass(frozen=True, slots=True)
class Task:
    """The arguments of one call of a row."""

    sizes: Sizes
    check: bool  # return a digest of the samples instead of timings; runs once before the rounds, also as a warm-up
    scratch: Path


Measure = Callable[[Task], Result]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; ``peer`` names the environment that it runs in, by default the project's own."""

    name: str
    measure: Measure
    peer: str | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that are compared with one another; ratios are to the row named ``baseline``."""

    title: str
    rows: tuple[Row, ...]
    baseline: str | None = "webdataset"
    max_rounds: int = 1000
    measures_memory: bool = False


# Streams: how each library reads the samples of some shards. Only the call of the inner function is timed.


def measure_pass(source: Source, open_stream: OpenStream, held: int = 0) -> Measure:
    """Measure one pass over a dataset by a consumer that keeps references to the last ``held`` samples."""

    def measure(task: Task) -> Result:
        stored = source(task.sizes)
        stream = open_stream(stored)
        if task.check:
            return _digest(stream())
        recent: deque[Sample] = deque(maxlen=held)
        count = 0
        started_at = time.perf_counter()
        for sample in stream():
            recent.append(sample)
            count += 1
        seconds = time.perf_counter() - started_at
        return {"seconds": seconds, "samples": count, "nbytes": stored.nbytes}

    return measure


def _digest(samples: Iterable[Sample]) -> Result:
    """Return the number of samples and a checksum of keys, field names and values that ignores the order of samples."""
    total = count = 0
    for sample in samples:
        checksum = zlib.crc32(sample["__key__"].encode())
        for name in sorted(name for name in sample if not name.startswith("__")):
            value = sample[name]
            content = value if isinstance(value, bytes) else getattr(value, "tobytes", str(value).encode)()
            checksum = zlib.crc32(content, zlib.crc32(name.encode(), checksum))
        total = (total + checksum) % 2**53  # integers of 53 bits are exact in every JSON implementation
        count += 1
    return {"samples": count, "digest": total}


def _webdataset(stored: StoredData, spec: str | None = None, library: str = "webdataset") -> Stream:
    wds: Any = import_module(library)
    assert wds.WebDataset is not None  # names are loaded on first use: load them before the clock starts

    def start() -> Iterable[Sample]:
        dataset: Any = wds.WebDataset(stored.shards, shardshuffle=False)
        samples: Iterable[Sample] = dataset if spec is None else dataset.decode(spec)
        return samples

    return start


def _compat(stored: StoredData, spec: str | None = None) -> Stream:
    """Run the same program with Penstock's names for WebDataset."""
    return _webdataset(stored, spec, COMPAT)


def _tarfile(stored: StoredData) -> Stream:
    def members() -> Iterator[tuple[str, bytes]]:
        for shard in stored.shards:
            with tarfile.open(shard, "r|") as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    assert content is not None
                    yield member.name, content.read()
                    tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps every header in memory

    return lambda: _group_members(members())


def _spdl(stored: StoredData) -> Stream:
    from spdl.io import iter_tarfile

    def members() -> Iterator[tuple[str, bytes]]:
        for shard in stored.shards:
            with open(shard, "rb") as file:
                yield from iter_tarfile(file)

    return lambda: _group_members(members())


def _group_members(members: Iterable[tuple[str, bytes]]) -> Iterator[Sample]:
    """Yield samples of consecutive members with one key, with as little Python per member as possible."""
    key: str | None = None
    sample: Sample = {}
    for path, content in members:
        next_key, _, name = path.partition(".")  # no folder here has a dot
        if next_key != key:
            if key is not None:
                yield sample
            key, sample = next_key, {"__key__": next_key}
        sample[name] = content
    if key is not None:
        yield sample


def _penstock(stored: StoredData, *, fresh: bool = False, shuffled: bool = False) -> Stream:
    import penstock as ps

    read_tar = ps.read_tar  # names are loaded on first use: load the engine before the clock starts

    def start() -> Iterable[Sample]:
        ds = read_tar(stored.shards)
        return ds.shuffle() if shuffled else ds

    if fresh:
        shutil.rmtree(os.environ["PENSTOCK_CACHE"], ignore_errors=True)
    return start


def _penstock_first(stored: StoredData) -> Stream:
    return _penstock(stored, fresh=True)


def _penstock_shuffled(stored: StoredData) -> Stream:
    return _penstock(stored, shuffled=True)


def _cat(source: Source) -> Measure:
    """Measure the limit: ``cat`` of the same bytes to /dev/null."""

    def measure(task: Task) -> Result:
        stored = source(task.sizes)
        shards = stored.shards
        started_at = time.perf_counter()
        subprocess.run(["cat", *shards], stdout=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - started_at
        return {"seconds": seconds, "samples": stored.samples, "nbytes": stored.nbytes}

    return measure


def _raw(source: Source) -> tuple[Row, ...]:
    return (
        Row("limit: cat > /dev/null", _cat(source)),
        Row("webdataset", measure_pass(source, _webdataset)),
        Row(COMPAT, measure_pass(source, _compat)),
        Row("python tarfile", measure_pass(source, _tarfile)),
        Row("SPDL iter_tarfile", measure_pass(source, _spdl), peer="spdl"),
        Row("penstock, first contact", measure_pass(source, _penstock_first)),
        Row("penstock", measure_pass(source, _penstock)),
        Row("penstock, shuffled", measure_pass(source, _penstock_shuffled)),
    )


# JPEG to arrays

# The consumer keeps a batch, as training does. A consumer that drops every image at once measures the allocator: memory
# goes back to the system and is faulted in again for each image, unless the library happens to hold a pool of memory.
BATCH = 64


def _pillow(stored: StoredData) -> Stream:
    """Decode bytes that are in memory with Pillow alone: what one thread can do."""
    from io import BytesIO

    import numpy as np
    from PIL import Image

    samples = data.read_samples(stored)

    def start() -> Iterator[Sample]:
        for sample in samples:
            image = np.asarray(Image.open(BytesIO(sample["jpg"])).convert("RGB"))  # type: ignore[arg-type]
            yield {**sample, "jpg": image, "cls": int(sample["cls"])}

    return start


def _penstock_decoded(workers: int) -> OpenStream:
    def open_stream(stored: StoredData) -> Stream:
        import penstock as ps

        assert ps.Dataset is not None
        return lambda: ps.read_tar(stored.shards).decode("rgb8", workers=workers)

    return open_stream


# Opening: how soon the first sample is delivered, and which files that takes


class _FileAccess:
    """Records which files below a folder are opened, or passed to ``os.stat``, from now on."""

    def __init__(self, folder: Path) -> None:
        self.opened: set[str] = set()
        self.queried: set[str] = set()
        self._prefix = f"{folder}/"
        original_stat = os.stat
        sys.addaudithook(self._hook)

        def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            self._record(self.queried, path)
            return original_stat(path, *args, **kwargs)

        os.stat = stat  # the interpreter audits open(), but not stat()

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            self._record(self.opened, args[0])

    def _record(self, names: set[str], path: Any) -> None:
        if isinstance(path, str | os.PathLike) and (name := os.fspath(path)).startswith(self._prefix):
            names.add(name.removeprefix(self._prefix))

    def shard_count(self) -> int:
        """Return the number of different shards that were accessed, themselves or through their index."""
        return len({match[0] for name in self.opened | self.queried if (match := re.match(r"shard-\d+", name))})


def _first(url_of: Callable[[StoredData], str], read: Callable[[str], Iterable[Any]]) -> Measure:
    """Measure the time from a URL to its first sample."""

    def measure(task: Task) -> Result:
        stored = data.many_shards(task.sizes)
        urls = url_of(stored)
        read(urls)  # opens nothing, but imports what it needs
        access = _FileAccess(stored.folder)
        started_at = time.perf_counter()
        next(iter(read(urls)))
        seconds = time.perf_counter() - started_at
        opened = len(access.opened)
        return {"seconds": seconds, "files opened": opened, "shards touched": access.shard_count()}

    return measure


def _pattern(stored: StoredData) -> str:
    return f"{stored.folder}/shard-{{000000..{stored.samples // 2 - 1:06d}}}.tar"


def _folder(stored: StoredData) -> str:
    return str(stored.folder)


def _read_tar(urls: str) -> Iterable[Sample]:
    import penstock as ps

    return ps.read_tar(urls)


def _read_tar_shuffled(urls: str) -> Iterable[Sample]:
    import penstock as ps

    return ps.read_tar(urls).shuffle()


def _read_webdataset(urls: str) -> Iterable[Sample]:
    import webdataset as wds

    samples: Iterable[Sample] = wds.WebDataset(urls, shardshuffle=False)
    return samples


# Starting: in a fresh interpreter, since this one has already imported modules that a library would have to import


def _fresh_interpreter(code: str) -> Measure:
    """Measure a few lines in a fresh interpreter; ``{shards}`` in them becomes a list of ten shards."""

    def measure(task: Task) -> Result:
        shards = data.photos10(task.sizes).shards[:10]
        report = "print(time.perf_counter() - started_at, int('numpy' in sys.modules))"
        lines = ["import sys, time", "started_at = time.perf_counter()", code.format(shards=shards), report]
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
        seconds, numpy = done.stdout.split()
        return {"seconds": float(seconds), "numpy imported": int(numpy)}

    return measure


# Memory: the peak of a process during a pass


def _peak(source: Source, open_stream: OpenStream) -> Measure:
    def measure(task: Task) -> Result:
        stored = source(task.sizes)
        stream = open_stream(stored)
        own = 0
        for number, _ in enumerate(stream()):
            if number % 500 == 0:
                own = max(own, _resident_bytes("RssAnon"))
        peak = _resident_bytes("VmHWM")
        return {"peak MB": peak / 1e6, "own MB": max(own, _resident_bytes("RssAnon")) / 1e6}

    return measure


def _resident_bytes(name: str) -> int:
    """Return the resident memory of this process: ``VmHWM`` is the peak with mapped files, ``RssAnon`` is now, without.

    Raises:
        LookupError: The kernel does not report this value.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


# Writing

WRITTEN_PHOTOS = 2_000  # 65 MB


def _written(write: Callable[[list[Sample], Path], None]) -> Measure:
    def measure(task: Task) -> Result:
        samples = data.read_samples(data.photos(task.sizes))[:WRITTEN_PHOTOS]
        nbytes = sum(len(value) for sample in samples for name, value in sample.items() if name != "__key__")
        write(samples[:1], task.scratch / "warm")
        started_at = time.perf_counter()
        write(samples, task.scratch / "out")
        seconds = time.perf_counter() - started_at
        return {"seconds": seconds, "samples": len(samples), "nbytes": nbytes}

    return measure


def _write_plain(samples: list[Sample], folder: Path) -> None:
    """Write the bytes alone, one after the other, and flush them to disk: the limit."""
    folder.mkdir(parents=True)
    with open(folder / "bytes", "wb") as file:
        for sample in samples:
            file.writelines([sample["cls"], sample["jpg"], sample["json"]])
        file.flush()
        os.fsync(file.fileno())


def _write_penstock(samples: list[Sample], folder: Path) -> None:
    import penstock as ps

    ps.from_items(samples).write_tar(str(folder), max_samples=1000)


def _write_webdataset(samples: list[Sample], folder: Path) -> None:
    import webdataset as wds

    folder.mkdir(parents=True)
    with wds.ShardWriter(str(folder / "out-%06d.tar"), maxcount=1000, encoder=False, verbose=0) as writer:
        for sample in samples:
            writer.write(sample)


def _write_tarfile(samples: list[Sample], folder: Path) -> None:
    folder.mkdir(parents=True)
    keyed = [(s["__key__"], {name: value for name, value in s.items() if name != "__key__"}) for s in samples]
    data.write_with_tarfile(folder, keyed, 2)


DATA: tuple[Source, ...] = (data.photos, data.photos10, data.tiny, data.tiny10, data.jpegs, data.many_shards)

CASES = {
    "raw-photos": Case(
        "Raw samples of photo shards (about 30 KB: jpg, cls, json), one process",
        _raw(data.photos),
    ),
    "raw-tiny": Case("Raw samples of 200 bytes and a class, one process", _raw(data.tiny)),
    "open": Case(
        "Opening 10,000 shards that have a manifest: from the URL to the first sample",
        (
            Row("webdataset", _first(_pattern, _read_webdataset)),
            Row("penstock, pattern", _first(_pattern, _read_tar)),
            Row("penstock, folder", _first(_folder, _read_tar)),
            Row("penstock, pattern, shuffled", _first(_pattern, _read_tar_shuffled)),
        ),
        baseline=None,
        max_rounds=5,
    ),
    "start": Case(
        "Starting: in a fresh interpreter, imports included, files in the page cache",
        (
            Row("import numpy", _fresh_interpreter("import numpy")),
            Row("import penstock", _fresh_interpreter("import penstock")),
            Row("import webdataset", _fresh_interpreter("import webdataset")),
            Row(
                "first sample of 10 shards, penstock",
                _fresh_interpreter("import penstock as ps\nnext(iter(ps.read_tar({shards!r})))"),
            ),
            Row(
                "first sample of 10 shards, webdataset",
                _fresh_interpreter("import webdataset as w\nnext(iter(w.WebDataset({shards!r}, shardshuffle=False)))"),
            ),
        ),
        baseline=None,
        max_rounds=5,
    ),
    "memory": Case(
        "Memory of a pass: peak (mapped shards included) and own (without mapped shards)",
        (
            Row("webdataset, photos", _peak(data.photos, _webdataset)),
            Row("webdataset, 10x photos", _peak(data.photos10, _webdataset)),
            Row("penstock, photos", _peak(data.photos, _penstock)),
            Row("penstock, 10x photos", _peak(data.photos10, _penstock)),
            Row("penstock, shuffled, photos", _peak(data.photos, _penstock_shuffled)),
            Row("penstock, shuffled, 10x photos", _peak(data.photos10, _penstock_shuffled)),
            Row("penstock, tiny", _peak(data.tiny, _penstock)),
            Row("penstock, 10x tiny", _peak(data.tiny10, _penstock)),
        ),
        baseline=None,
        max_rounds=3,
        measures_memory=True,
    ),
    "decode": Case(
        "JPEG of 500 x 375 (about 110 KB) to arrays",
        (
            Row("Pillow alone, 1 thread", measure_pass(data.jpegs, _pillow, BATCH)),
            Row("webdataset", measure_pass(data.jpegs, lambda stored: _webdataset(stored, "rgb8"), BATCH)),
            Row(COMPAT, measure_pass(data.jpegs, lambda stored: _compat(stored, "rgb8"), BATCH)),
            Row(
                "webdataset, torchrgb", measure_pass(data.jpegs, lambda stored: _webdataset(stored, "torchrgb"), BATCH)
            ),
            Row(f"{COMPAT}, torchrgb", measure_pass(data.jpegs, partial(_compat, spec="torchrgb"), BATCH)),
            Row("penstock, workers=1", measure_pass(data.jpegs, _penstock_decoded(1), BATCH)),
            Row("penstock, workers=2", measure_pass(data.jpegs, _penstock_decoded(2), BATCH)),
        ),
        max_rounds=5,
    ),
    "write": Case(
        "Writing photo samples from memory (penstock also flushes to disk, checks, hashes and indexes)",
        (
            Row("limit: the bytes in one file, flushed to disk", _written(_write_plain)),
            Row("webdataset", _written(_write_webdataset)),
            Row("python tarfile", _written(_write_tarfile)),
            Row("penstock", _written(_write_penstock)),
        ),
        max_rounds=5,
    ),
}


def main(cases: dict[str, Case]) -> None:
    """Measure one row once and print the result as JSON."""
    parser = argparse.ArgumentParser(description="Measure one row of a case and print the result as JSON.")
    parser.add_argument("case", choices=cases)
    parser.add_argument("row")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    row = next(row for row in cases[args.case].rows if row.name == args.row)
    scratch = HOME / f"scratch-{os.getpid()}"
    try:
        result = row.measure(Task(QUICK if args.quick else FULL, args.check, scratch))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(CASES)
