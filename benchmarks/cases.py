"""What is measured: cases of rows, each row one measurement that runs in a process of its own.

``python cases.py CASE ROW`` measures one row once and prints what it found as JSON. Only the measured part counts:
imports and making ready come before it. Libraries are imported by the row that measures them, so that this module
can be read, and run, where the others are not installed.
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
from pathlib import Path
from typing import Any

import data
from data import FULL, HOME, QUICK, Made, Sizes

Result = dict[str, float]
Sample = dict[str, Any]
Stream = Callable[[], Iterable[Sample]]
Source = Callable[[Sizes], Made]


@dataclass(frozen=True, slots=True)
class Task:
    """One call of a row."""

    sizes: Sizes
    check: bool  # say what came instead of how long it took; runs once before the rounds, as a warm-up too
    scratch: Path


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; ``peer`` names the environment it needs, the project's own by default."""

    name: str
    measure: Callable[[Task], Result]
    peer: str | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that are compared, all of them with ``baseline``."""

    title: str
    rows: tuple[Row, ...]
    baseline: str | None = "webdataset"
    most_rounds: int = 1000
    peak: bool = False  # its figure is memory, not time


# Streams: how each library is asked for the samples of some shards. What stands before the inner function is not timed.


def streamed(source: Source, opened: Callable[[Made], Stream], held: int = 0) -> Callable[[Task], Result]:
    """Measure one pass over a data set by a consumer that keeps the last ``held`` samples."""

    def measure(task: Task) -> Result:
        made = source(task.sizes)
        stream = opened(made)
        if task.check:
            return _digest(stream())
        kept: deque[Sample] = deque(maxlen=held)
        count = 0
        begun = time.perf_counter()
        for sample in stream():
            kept.append(sample)
            count += 1
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "samples": count, "nbytes": made.nbytes}

    return measure


def _digest(samples: Iterable[Sample]) -> Result:
    """What came, in any order: the keys, the names of the fields and their bytes."""
    total = count = 0
    for sample in samples:
        told = zlib.crc32(sample["__key__"].encode())
        for name in sorted(name for name in sample if not name.startswith("__")):
            value = sample[name]
            content = value if isinstance(value, bytes) else getattr(value, "tobytes", str(value).encode)()
            told = zlib.crc32(content, zlib.crc32(name.encode(), told))
        total = (total + told) % 2**53  # 53 bits: as far as JSON numbers are safe everywhere
        count += 1
    return {"samples": count, "digest": total}


def _webdataset(made: Made, spec: str | None = None) -> Stream:
    import webdataset as wds

    def start() -> Iterable[Sample]:
        found: Any = wds.WebDataset(made.shards, shardshuffle=False)
        samples: Iterable[Sample] = found if spec is None else found.decode(spec)
        return samples

    return start


def _tarfile(made: Made) -> Stream:
    def members() -> Iterator[tuple[str, bytes]]:
        for shard in made.shards:
            with tarfile.open(shard, "r|") as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    assert content is not None
                    yield member.name, content.read()
                    tar.members = []  # type: ignore[attr-defined]  # else it keeps every header it saw

    return lambda: _grouped(members())


def _spdl(made: Made) -> Stream:
    from spdl.io import iter_tarfile

    def members() -> Iterator[tuple[str, bytes]]:
        for shard in made.shards:
            with open(shard, "rb") as file:
                yield from iter_tarfile(file)

    return lambda: _grouped(members())


def _grouped(members: Iterable[tuple[str, bytes]]) -> Iterator[Sample]:
    """Make samples of consecutive members, as lean as that can be done in Python."""
    key: str | None = None
    sample: Sample = {}
    for path, content in members:
        new, _, name = path.partition(".")  # no folder here has a dot
        if new != key:
            if key is not None:
                yield sample
            key, sample = new, {"__key__": new}
        sample[name] = content
    if key is not None:
        yield sample


def _penstock(made: Made, *, fresh: bool = False, shuffled: bool = False) -> Stream:
    import penstock as ps

    def start() -> Iterable[Sample]:
        ds = ps.read_tar(made.shards)
        return ds.shuffle() if shuffled else ds

    assert ps.Dataset is not None  # names are loaded on first use: the engine's import is not the measured part
    if fresh:
        shutil.rmtree(os.environ["PENSTOCK_CACHE"], ignore_errors=True)
    return start


def _penstock_first(made: Made) -> Stream:
    return _penstock(made, fresh=True)


def _penstock_shuffled(made: Made) -> Stream:
    return _penstock(made, shuffled=True)


def _cat(source: Source) -> Callable[[Task], Result]:
    """The limit: the same bytes through the kernel and away."""

    def measure(task: Task) -> Result:
        made = source(task.sizes)
        shards = made.shards
        begun = time.perf_counter()
        subprocess.run(["cat", *shards], stdout=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "samples": made.samples, "nbytes": made.nbytes}

    return measure


def _raw(source: Source) -> tuple[Row, ...]:
    return (
        Row("limit: cat > /dev/null", _cat(source)),
        Row("webdataset", streamed(source, _webdataset)),
        Row("python tarfile", streamed(source, _tarfile)),
        Row("SPDL iter_tarfile", streamed(source, _spdl), peer="spdl"),
        Row("penstock, first contact", streamed(source, _penstock_first)),
        Row("penstock", streamed(source, _penstock)),
        Row("penstock, shuffled", streamed(source, _penstock_shuffled)),
    )


# JPEG to arrays

# The consumer keeps a batch, as training does. One that drops every image at once measures the allocator: memory goes
# back to the system and is faulted in again for each image, unless the library happens to hold some of its own.
BATCH = 64


def _pillow(made: Made) -> Stream:
    """What one thread can do: nothing but Pillow on bytes in memory."""
    from io import BytesIO

    import numpy as np
    from PIL import Image

    samples = data.samples_of(made)

    def start() -> Iterator[Sample]:
        for sample in samples:
            image = np.asarray(Image.open(BytesIO(sample["jpg"])).convert("RGB"))  # type: ignore[arg-type]
            yield {**sample, "jpg": image, "cls": int(sample["cls"])}

    return start


def _penstock_decoded(workers: int) -> Callable[[Made], Stream]:
    def opened(made: Made) -> Stream:
        import penstock as ps

        assert ps.Dataset is not None
        return lambda: ps.read_tar(made.shards).decode("rgb8", workers=workers)

    return opened


# Opening: how soon the first sample comes, and which files that takes


class _Touched:
    """The files below a folder that were opened, or asked about, since this was made."""

    def __init__(self, folder: Path) -> None:
        self.opened: set[str] = set()
        self.asked: set[str] = set()
        self._prefix = f"{folder}/"
        ask = os.stat
        sys.addaudithook(self._hook)

        def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            self._note(self.asked, path)
            return ask(path, *args, **kwargs)

        os.stat = stat  # the interpreter audits open(), but not stat()

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            self._note(self.opened, args[0])

    def _note(self, names: set[str], path: Any) -> None:
        if isinstance(path, str | os.PathLike) and (name := os.fspath(path)).startswith(self._prefix):
            names.add(name.removeprefix(self._prefix))

    def shards(self) -> int:
        """How many different shards were touched, by themselves or by their index."""
        return len({found[0] for name in self.opened | self.asked if (found := re.match(r"shard-\d+", name))})


def _first(given: Callable[[Made], Any], dataset: Callable[[Any], Iterable[Any]]) -> Callable[[Task], Result]:
    """Measure from a name to its first sample."""

    def measure(task: Task) -> Result:
        made = data.many(task.sizes)
        urls = given(made)
        dataset(urls)  # a description: opens nothing, but imports what it needs
        touched = _Touched(made.folder)
        begun = time.perf_counter()
        next(iter(dataset(urls)))
        seconds = time.perf_counter() - begun
        opened = len(touched.opened)
        return {"seconds": seconds, "files opened": opened, "shards touched": touched.shards()}

    return measure


def _pattern(made: Made) -> str:
    return f"{made.folder}/shard-{{000000..{made.samples // 2 - 1:06d}}}.tar"


def _folder(made: Made) -> str:
    return str(made.folder)


def _read_tar(urls: str) -> Iterable[Sample]:
    import penstock as ps

    return ps.read_tar(urls)


def _read_tar_shuffled(urls: str) -> Iterable[Sample]:
    import penstock as ps

    return ps.read_tar(urls).shuffle()


def _read_webdataset(urls: str) -> Iterable[Sample]:
    import webdataset as wds

    found: Iterable[Sample] = wds.WebDataset(urls, shardshuffle=False)
    return found


# Starting: in a bare interpreter, since this one has loaded what others would have to


def _bare(code: str) -> Callable[[Task], Result]:
    """Measure a few lines in a fresh interpreter; ``{shards}`` is a list of ten."""

    def measure(task: Task) -> Result:
        shards = data.photos10(task.sizes).shards[:10]
        told = "print(time.perf_counter() - begun, int('numpy' in sys.modules))"
        lines = ["import sys, time", "begun = time.perf_counter()", code.format(shards=shards), told]
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
        seconds, numpy = done.stdout.split()
        return {"seconds": float(seconds), "numpy imported": int(numpy)}

    return measure


# Memory: what a process needs at most during a pass


def _peak(source: Source, opened: Callable[[Made], Stream]) -> Callable[[Task], Result]:
    def measure(task: Task) -> Result:
        made = source(task.sizes)
        stream = opened(made)
        own = 0
        for number, _ in enumerate(stream()):
            if number % 500 == 0:
                own = max(own, _resident("RssAnon"))
        peak = _resident("VmHWM")
        return {"peak MB": peak / 1e6, "own MB": max(own, _resident("RssAnon")) / 1e6}

    return measure


def _resident(what: str) -> int:
    """Bytes this process holds: ``VmHWM`` at most and with mapped files, ``RssAnon`` now and without them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(what)


# Writing

WRITTEN = 2_000  # photos: 65 MB


def _written(write: Callable[[list[Sample], Path], None]) -> Callable[[Task], Result]:
    def measure(task: Task) -> Result:
        samples = data.samples_of(data.photos(task.sizes))[:WRITTEN]
        nbytes = sum(len(value) for sample in samples for name, value in sample.items() if name != "__key__")
        write(samples[:1], task.scratch / "warm")
        begun = time.perf_counter()
        write(samples, task.scratch / "out")
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "samples": len(samples), "nbytes": nbytes}

    return measure


def _write_plain(samples: list[Sample], folder: Path) -> None:
    """The limit: the bytes alone, one after the other, kept on disk."""
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
    listed = [(s["__key__"], {name: value for name, value in s.items() if name != "__key__"}) for s in samples]
    data.write_foreign(folder, listed, 2)


DATA: tuple[Source, ...] = (data.photos, data.photos10, data.tiny, data.tiny10, data.jpegs, data.many)

CASES = {
    "raw-photos": Case(
        "Raw samples of photo shards (about 30 KB: jpg, cls, json), one process",
        _raw(data.photos),
    ),
    "raw-tiny": Case("Raw samples of 200 bytes and a class, one process", _raw(data.tiny)),
    "open": Case(
        "Opening 10,000 shards that have a manifest: from the name to the first sample",
        (
            Row("webdataset", _first(_pattern, _read_webdataset)),
            Row("penstock, pattern", _first(_pattern, _read_tar)),
            Row("penstock, folder", _first(_folder, _read_tar)),
            Row("penstock, pattern, shuffled", _first(_pattern, _read_tar_shuffled)),
        ),
        baseline=None,
        most_rounds=5,
    ),
    "start": Case(
        "Starting: in a bare interpreter, imports included, files in the page cache",
        (
            Row("import numpy", _bare("import numpy")),
            Row("import penstock", _bare("import penstock")),
            Row("import webdataset", _bare("import webdataset")),
            Row(
                "first sample of 10 shards, penstock",
                _bare("import penstock as ps\nnext(iter(ps.read_tar({shards!r})))"),
            ),
            Row(
                "first sample of 10 shards, webdataset",
                _bare("import webdataset as w\nnext(iter(w.WebDataset({shards!r}, shardshuffle=False)))"),
            ),
        ),
        baseline=None,
        most_rounds=5,
    ),
    "memory": Case(
        "Memory of a pass: peak (mapped shards included) and own (without them)",
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
        most_rounds=3,
        peak=True,
    ),
    "decode": Case(
        "JPEG of 500 x 375 (about 110 KB) to arrays",
        (
            Row("Pillow alone, 1 thread", streamed(data.jpegs, _pillow, BATCH)),
            Row("webdataset", streamed(data.jpegs, lambda made: _webdataset(made, "rgb8"), BATCH)),
            Row("penstock, workers=1", streamed(data.jpegs, _penstock_decoded(1), BATCH)),
            Row("penstock, workers=2", streamed(data.jpegs, _penstock_decoded(2), BATCH)),
        ),
        most_rounds=5,
    ),
    "write": Case(
        "Writing photo samples from memory (penstock also flushes to disk, checks, hashes and indexes)",
        (
            Row("limit: the bytes in one file, flushed to disk", _written(_write_plain)),
            Row("webdataset", _written(_write_webdataset)),
            Row("python tarfile", _written(_write_tarfile)),
            Row("penstock", _written(_write_penstock)),
        ),
        most_rounds=5,
    ),
}


def main(cases: dict[str, Case]) -> None:
    """Measure one row once."""
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
