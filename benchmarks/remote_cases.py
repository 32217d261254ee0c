"""Cases of remote shards and of packing: shards behind a slow server, a cache, files into shards.

``python remote_cases.py CASE ROW`` measures one row once, see ``cases.py``.
"""

from __future__ import annotations

import atexit
import mmap
import os
import random
import resource
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import data
from cases import COMPAT, Case, Measure, OpenStream, Result, Row, Sample, Source, Stream, Task, main, measure_pass
from data import Sizes, StoredData
from server import serving

RANGE_BYTES = 8 << 20
SHARDS = 8
CLASSES = 100
SHARD_BYTES = 1e8  # of packing
LIST = "list.csv"  # the files to be packed, without their classes
OBJECTS = 5  # one of this many files is read as a single object
LARGE_BYTES = 1 << 30

Dataset = Any  # the library is imported by the rows that measure it


# The data: 20,000 photos (656 MB) as shards written by Penstock, as the same shards without indexes, and as files


def _photos(sizes: Sizes) -> StoredData:
    return data.photos(Sizes(photos=sizes.photos * 10 // 3))


def shards(sizes: Sizes) -> StoredData:
    """Return shards of 82 MB with indexes and a manifest."""
    return _create_from("remote", _photos(sizes), _write_shards)


def bare(sizes: Sizes) -> StoredData:
    """Return the same shards without indexes and manifest."""
    return _create_from("remote-bare", shards(sizes), _link_shards)


def files(sizes: Sizes) -> StoredData:
    """Return the photos as single files of about 30 KB, in class folders."""
    return _create_from("files", _photos(sizes), _unpack)


def large(sizes: Sizes) -> StoredData:
    """Return one shard of 1 GB (quick: a tenth) without an index: samples of 300 KB."""
    count = LARGE_BYTES * sizes.photos // data.FULL.photos // 300_000
    return data.create_once(f"large-{count}", count, lambda folder: _write_large(folder, count))


def _write_large(folder: Path, count: int) -> None:
    rng = random.Random(5)
    samples = ((f"{number:08d}", {"jpg": rng.randbytes(300_000)}) for number in range(count))
    data.write_with_tarfile(folder, samples, 1)


def _create_from(name: str, source: StoredData, write: Callable[[Path, StoredData], None]) -> StoredData:
    """Return the dataset of this name; if it does not exist, ``write`` fills its folder from another dataset."""
    return data.create_once(f"{name}-{source.samples}", source.samples, lambda folder: write(folder, source))


def _write_shards(folder: Path, source: StoredData) -> None:
    import penstock as ps

    ps.read_tar(source.shards).write_tar(str(folder), max_samples=source.samples // SHARDS)


def _link_shards(folder: Path, source: StoredData) -> None:
    for shard in source.shards:
        os.link(shard, folder / os.path.basename(shard))


def _unpack(folder: Path, source: StoredData) -> None:
    for number in range(CLASSES):
        (folder / f"class{number:03d}").mkdir()
    for sample in data.read_samples(source):
        name, content = sample["__key__"], sample["jpg"]
        assert isinstance(name, str)
        assert isinstance(content, bytes)
        (folder / f"class{int(sample['cls']) % CLASSES:03d}" / f"{name}.jpg").write_bytes(content)


# Remote: a pass over shards behind a server with a latency of 50 ms and 200 MB/s per connection

OpenRemote = Callable[[StoredData, str], Stream]  # takes the dataset and the URL of its folder


def _remote_pass(source: Source, open_stream: OpenRemote) -> Measure:
    """Measure one pass, without the start and the CPU time of the server."""

    def measure(task: Task) -> Result:
        with serving(source(task.sizes).folder) as url:
            return _measure_with_cpu(task, source, lambda stored: open_stream(stored, url))

    return measure


def _measure_with_cpu(task: Task, source: Source, open_stream: OpenStream) -> Result:
    """Measure one pass, and the CPU time of this process and of the children it waited for."""
    at_start: list[float] = []

    def open_and_record(stored: StoredData) -> Stream:
        stream = open_stream(stored)

        def start() -> Iterable[Sample]:
            at_start.append(_cpu_s())
            return stream()

        return start

    result = measure_pass(source, open_and_record)(task)
    return {**result, "CPU s": _cpu_s() - at_start[0]}


def _cpu_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _urls(stored: StoredData, url: str) -> list[str]:
    return [f"{url}/{os.path.basename(shard)}" for shard in stored.shards]


def _ranges(connections: int, into_samples: bool = False) -> Measure:
    """Measure the limit: ranges of 8 MiB, each connection with one buffer, nothing done with the bytes.

    With ``into_samples``, each range is cut into dicts of bytes at places that are known beforehand: the least that a
    reader of samples does. Uses the client of the standard library, since urllib3 on top of it copies the bytes again.
    """

    def cut(size: int) -> list[tuple[int, int]]:
        return [(start, min(start + RANGE_BYTES, size)) for start in range(0, size, RANGE_BYTES)]

    return _fetch_ranges(cut, connections, into_samples)


def _whole_shards(task: Task) -> Result:
    """Measure one request per shard, one after the other."""
    return _fetch_ranges(lambda size: [(0, size)], 1)(task)


def _fetch_ranges(cut: Callable[[int], list[tuple[int, int]]], connections: int, into_samples: bool = False) -> Measure:
    def measure(task: Task) -> Result:
        stored = shards(task.sizes)
        jobs: SimpleQueue[Range] = SimpleQueue()
        for shard in stored.shards:
            fields = _fields(shard) if into_samples else None
            for start, stop in cut(os.path.getsize(shard)):
                jobs.put((f"/{os.path.basename(shard)}", start, stop, fields and fields(start, stop)))
        with serving(stored.folder) as url:
            host = urlsplit(url).netloc
            started_at, cpu_at_start = time.perf_counter(), _cpu_s()
            _in_threads(connections, lambda: _fetch(host, jobs))
            seconds = time.perf_counter() - started_at
            cpu_s = _cpu_s() - cpu_at_start
        return {"seconds": seconds, "samples": stored.samples, "nbytes": stored.nbytes, "CPU s": cpu_s}

    return measure


def _in_threads(count: int, work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(work) for _ in range(count)]:
            done.result()


Range = tuple[str, int, int, list[tuple[str, list[slice]]] | None]  # path, start, stop, and the samples inside of it


def _fields(shard: str) -> Callable[[int, int], list[tuple[str, list[slice]]]]:
    """Return a function that lists the samples inside of a range of a shard, with the places of their fields."""
    from penstock.formats.tar.scan import load_index

    index = load_index(shard)
    samples = [
        (key, index.start[first : first + 3].tolist(), index.size[first : first + 3].tolist())
        for key, first in zip(index.keys(), index.first.tolist(), strict=True)
    ]

    def inside(low: int, high: int) -> list[tuple[str, list[slice]]]:
        return [
            (key, [slice(start - low, start - low + size) for start, size in zip(starts, sizes, strict=True)])
            for key, starts, sizes in samples
            if low <= starts[0] and starts[-1] + sizes[-1] <= high
        ]

    return inside


def _fetch(host: str, jobs: SimpleQueue[Range]) -> None:
    connection, buffer = HTTPConnection(host), mmap.mmap(-1, RANGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(buffer)
    while True:
        try:
            path, start, stop, fields = jobs.get_nowait()
        except Empty:
            connection.close()
            return
        connection.request("GET", path, headers={"Range": f"bytes={start}-{stop - 1}"})
        with connection.getresponse() as response:
            at = 0
            while at < stop - start:  # a whole shard fills the buffer again and again
                place = at % RANGE_BYTES
                received = response.readinto(view[place : place + stop - start - at])
                if not received:
                    raise OSError(f"the response for {path} ended early")
                at += received
        for key, places in fields or ():
            a, b, c = map(buffer.__getitem__, places)
            {"__key__": key, "__url__": path, "jpg": a, "cls": b, "json": c}  # noqa: B018 - a sample, not used


def _penstock(*, shuffled: bool = False) -> OpenRemote:
    """Read with an empty cache of indexes: a row without an index must not use that of an earlier round."""

    def open_stream(stored: StoredData, url: str) -> Stream:
        import penstock as ps

        for name in (
            "penstock.engines.local.engine",
            "penstock.formats.tar.source",
            "penstock.storage.http",
            "urllib3",
        ):
            import_module(name)  # before the clock starts, as the modules of the other rows

        def start() -> Iterable[Sample]:
            os.environ["PENSTOCK_CACHE"] = tempfile.mkdtemp(prefix="penstock-bench-")
            atexit.register(shutil.rmtree, os.environ["PENSTOCK_CACHE"])
            ds = ps.read_tar(_urls(stored, url))
            return ds.shuffle() if shuffled else ds

        assert ps.Dataset is not None  # names are loaded on first use: load the engine before the clock starts
        return start

    return open_stream


def _webdataset(template: str, workers: int = 0, library: str = "webdataset") -> OpenRemote:
    """Read ``template`` with the URL in place of ``{url}``; webdataset starts a curl to read a plain URL."""

    def open_stream(stored: StoredData, url: str) -> Stream:
        wds: Any = import_module(library)
        assert wds.WebDataset is not None  # names are loaded on first use: load them before the clock starts
        urls = [template.format(url=shard_url) for shard_url in _urls(stored, url)]
        if not workers:
            return lambda: wds.WebDataset(urls, shardshuffle=False)

        def start() -> Iterable[Sample]:
            # Batches, so that samples cross the process boundary 64 at a time.
            ds = wds.WebDataset(urls, shardshuffle=False).batched(64, collation_fn=list)
            loader: Any = wds.WebLoader(ds, batch_size=None, num_workers=workers)
            return (sample for batch in loader for sample in batch)

        return start

    return open_stream


def _webdataset_urllib(stored: StoredData, url: str) -> Stream:
    """Read URLs with the standard library's urlopen, registered as webdataset's handler of the scheme."""
    from urllib.request import urlopen

    import webdataset as wds

    def open_url(url: str, mode: str = "rb", bufsize: int = 8192, **_: Any) -> Any:
        return urlopen(url)

    wds.gopen_schemes["http"] = open_url
    return lambda: wds.WebDataset(_urls(stored, url), shardshuffle=False)


# Single objects, and the first sample of a large shard


def _objects(stored: StoredData, url: str) -> list[str]:
    return [f"{url}{path.removeprefix(str(stored.folder))}" for path in list(_paths(stored.folder))[::OBJECTS]]


def _object_pass(read: Callable[[list[str]], int]) -> Measure:
    """Measure reading single objects; ``read`` returns the number of their bytes."""

    def measure(task: Task) -> Result:
        stored = files(task.sizes)
        with serving(stored.folder) as url:
            urls = _objects(stored, url)
            started_at, cpu_at_start = time.perf_counter(), _cpu_s()
            nbytes = read(urls)
            seconds, cpu_s = time.perf_counter() - started_at, _cpu_s() - cpu_at_start
        result: Result = {"samples": len(urls), "nbytes": nbytes}
        return result if task.check else {**result, "seconds": seconds, "CPU s": cpu_s}

    return measure


def _requests(urls: list[str]) -> int:
    """Read objects by bare requests over 64 connections."""
    jobs: SimpleQueue[str] = SimpleQueue()
    for url in urls:
        jobs.put(urlsplit(url).path)
    sizes: list[int] = []

    def fetch(host: str) -> None:
        connection = HTTPConnection(host)
        while True:
            try:
                path = jobs.get_nowait()
            except Empty:
                connection.close()
                return
            connection.request("GET", path)
            with connection.getresponse() as response:
                sizes.append(len(response.read()))

    _in_threads(64, lambda: fetch(urlsplit(urls[0]).netloc))
    return sum(sizes)


def _read_files(urls: list[str]) -> int:
    import penstock as ps

    return sum(len(sample["bytes"]) for sample in ps.read_files(urls))


def _first_sample(task: Task) -> Result:
    """Measure the time from the call to the first sample."""
    import penstock as ps

    stored = large(task.sizes)
    with serving(stored.folder) as url:
        start = _penstock()(stored, url)
        started_at = time.perf_counter()
        run = iter(start())
        sample = next(run)
        seconds = time.perf_counter() - started_at
        getattr(run, "close", lambda: None)()
    assert ps.Dataset is not None
    return {"samples": 1, "nbytes": len(sample["jpg"]), **({} if task.check else {"seconds": seconds})}


def _first_range(task: Task) -> Result:
    """Measure the limit: one bare request for the first MiB."""
    stored = large(task.sizes)
    with serving(stored.folder) as url:
        host, path = urlsplit(url).netloc, f"/{os.path.basename(stored.shards[0])}"
        jobs: SimpleQueue[Range] = SimpleQueue()
        jobs.put((path, 0, 1 << 20, None))
        started_at = time.perf_counter()
        _fetch(host, jobs)
        seconds = time.perf_counter() - started_at
    return {"samples": 1, "nbytes": 300_000, **({} if task.check else {"seconds": seconds})}


# A cache: the cost of a second epoch


def _second_pass(open_dataset: Callable[[StoredData, str, Path], Dataset]) -> Measure:
    """Measure the second epoch of a loader; the first fills the caches, and asks the server about every shard."""

    def measure(task: Task) -> Result:
        stored = shards(task.sizes)
        with serving(stored.folder) as url:
            loader = open_dataset(stored, url, task.scratch).loader()
            for _ in loader:
                pass
            return _measure_with_cpu(task, shards, lambda stored: lambda: loader)

    return measure


def _local(stored: StoredData, url: str, scratch: Path) -> Dataset:
    import penstock as ps

    return ps.read_tar(stored.shards)


def _remote(stored: StoredData, url: str, scratch: Path) -> Dataset:
    import penstock as ps

    return ps.read_tar(_urls(stored, url))


def _cached(stored: StoredData, url: str, scratch: Path) -> Dataset:
    import penstock as ps

    return ps.read_tar(_urls(stored, url), cache=ps.Cache(scratch / "cache"))


# Packing: files into shards, flushed to disk

Packer = Callable[[Path, Path], None]  # takes a folder of files and the folder for the shards


def _packed(prepare: Callable[[], Packer]) -> Measure:
    """Measure packing a folder of files into shards on disk. ``prepare`` is not timed."""

    def measure(task: Task) -> Result:
        stored, pack, out = files(task.sizes), prepare(), task.scratch / "out"
        nbytes = sum(os.path.getsize(path) for path in _paths(stored.folder))
        task.scratch.mkdir(parents=True)
        (task.scratch / LIST).write_text("\n".join(["path", *_paths(stored.folder)]))
        started_at, cpu_at_start = time.perf_counter(), _cpu_s()
        pack(stored.folder, out)
        seconds, cpu_s = time.perf_counter() - started_at, _cpu_s() - cpu_at_start
        if task.check:
            return _digest(out)
        return {"seconds": seconds, "samples": stored.samples, "nbytes": nbytes, "CPU s": cpu_s}

    return measure


def _digest(out: Path) -> Result:
    """Return the number of images and a checksum that ignores their order and names; no checksum without archives."""
    total = count = 0
    for shard in out.rglob("*.tar"):
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.name.endswith(".jpg"):
                    content = tar.extractfile(member)
                    assert content is not None
                    total, count = (total + zlib.crc32(content.read())) % 2**53, count + 1
    return {"samples": count, "digest": total} if count else {"samples": count}


def _paths(folder: Path) -> Iterator[str]:
    for class_name in sorted(os.listdir(folder)):
        for name in sorted(os.listdir(folder / class_name)):
            yield f"{folder}/{class_name}/{name}"


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _copy() -> Packer:
    """Copy all files into one file, inside the kernel: the limit."""

    def copy(folder: Path, out: Path) -> None:
        with open(out, "wb", buffering=0) as file:
            for path in _paths(folder):
                source = os.open(path, os.O_RDONLY)
                while os.sendfile(file.fileno(), source, None, RANGE_BYTES):
                    pass
                os.close(source)
        _flush(out)

    return copy


def _tar() -> Packer:
    """Write one archive with GNU tar, sorted by name as the other rows do."""

    def tar(folder: Path, out: Path) -> None:
        out.mkdir()
        subprocess.run(["tar", "--sort=name", "-cf", out / "all.tar", "-C", folder, "."], check=True)
        _flush(out / "all.tar")

    return tar


def _pack(shuffle: bool = False, labels: bool = True, shards: int | None = None) -> Callable[[], Packer]:
    def prepare() -> Packer:
        import penstock as ps

        def pack(folder: Path, out: Path) -> None:
            source = folder if labels else out.with_name(LIST)
            limit = {"max_bytes": SHARD_BYTES} if shards is None else {"shards": shards}
            ps.pack(source, out, shuffle=shuffle, progress=False, **limit)

        assert ps.pack is not None  # names are loaded on first use
        return pack

    return prepare


def _webdataset_writer(flushed: bool) -> Callable[[], Packer]:
    def prepare() -> Packer:
        import webdataset as wds

        def pack(folder: Path, out: Path) -> None:
            out.mkdir()
            with wds.ShardWriter(f"{out}/%06d.tar", maxsize=SHARD_BYTES, encoder=False, verbose=0) as writer:
                for sample in _samples(folder):
                    writer.write(sample)
            for shard in sorted(out.iterdir()) if flushed else ():
                _flush(shard)

        return pack

    return prepare


def _samples(folder: Path) -> Iterator[Sample]:
    """Yield the files with the numbers of their classes, with as little Python per file as possible."""
    labels = {class_name: b"%d" % number for number, class_name in enumerate(sorted(os.listdir(folder)))}
    for number, path in enumerate(_paths(folder)):
        _, class_name, name = path.rsplit("/", 2)
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        yield {"__key__": f"{number:09d}-{name.partition('.')[0]}", "jpg": content, "cls": labels[class_name]}


LIMIT = "limit: ranges by 8 connections"
CUT_LIMIT = "limit: ranges by 8 connections, cut into samples"
OBJECT_LIMIT = "limit: requests by 64 connections"
WEBDATASET = {  # "its curl" is webdataset's default; the workers of a loader read several shards at the same time
    "webdataset, its curl": _webdataset("{url}"),
    "webdataset, pipe:curl": _webdataset("pipe:curl -s -f {url}"),
    "webdataset, urllib": _webdataset_urllib,
    "webdataset, its curl, 4 loader workers": _webdataset("{url}", workers=4),
}

IN_RANGES = ("penstock, shards=8, the members of GNU tar", "penstock, shards=8")

DATA = (shards, bare, files, large)

CASES = {
    "remote": Case(
        "Photo shards (656 MB) behind a server with a latency of 50 ms and 200 MB/s per connection; one pass "
        "(CPU: of the reading side)",
        (
            Row(LIMIT, _ranges(8)),
            Row("limit: ranges by 16 connections", _ranges(16)),
            Row(CUT_LIMIT, _ranges(8, into_samples=True)),
            Row("one stream", _whole_shards),
            *(Row(name, _remote_pass(shards, open_stream)) for name, open_stream in WEBDATASET.items()),
            Row(COMPAT, _remote_pass(shards, _webdataset("{url}", library=COMPAT))),
            Row(f"{COMPAT}, without an index", _remote_pass(bare, _webdataset("{url}", library=COMPAT))),
            Row("penstock", _remote_pass(shards, _penstock())),
            Row("penstock, shuffled", _remote_pass(shards, _penstock(shuffled=True))),
            Row("penstock, without an index", _remote_pass(bare, _penstock())),
            Row("penstock, without an index, shuffled", _remote_pass(bare, _penstock(shuffled=True))),
        ),
        baseline=LIMIT,
        max_rounds=10,
    ),
    "objects": Case(
        "4,000 single objects of 30 KB behind a latency of 50 ms",
        (Row(OBJECT_LIMIT, _object_pass(_requests)), Row("penstock", _object_pass(_read_files))),
        baseline=OBJECT_LIMIT,
        max_rounds=10,
    ),
    "remote-first": Case(
        "The first sample of a shard of 1 GB without an index, behind a latency of 50 ms",
        (Row("limit: one range of 1 MiB", _first_range), Row("penstock", _first_sample)),
        baseline="limit: one range of 1 MiB",
        max_rounds=10,
    ),
    "cached": Case(
        "The second epoch over the same shards: local files, through a cache, without a cache",
        (
            Row("penstock, local files", _second_pass(_local)),
            Row("penstock, through a cache", _second_pass(_cached)),
            Row("penstock, remote", _second_pass(_remote)),
        ),
        baseline="penstock, local files",
        max_rounds=10,
    ),
    "pack": Case(
        "20,000 files of 30 KB in 100 class folders into shards of 100 MB, or one archive; flushed to disk unless the "
        "row says otherwise (penstock also hashes, indexes, and could resume after a crash; with labels, like "
        "webdataset, it writes twice as many members as GNU tar)",
        (
            Row("limit: the bytes in one file", _packed(_copy)),
            Row("GNU tar", _packed(_tar)),
            Row("webdataset", _packed(_webdataset_writer(flushed=True))),
            Row("webdataset, not flushed", _packed(_webdataset_writer(flushed=False))),
            Row("penstock, the members of GNU tar", _packed(_pack(labels=False))),
            Row("penstock", _packed(_pack())),
            Row("penstock, shuffled", _packed(_pack(shuffle=True))),
            Row(IN_RANGES[0], _packed(_pack(labels=False, shards=8))),
            Row(IN_RANGES[1], _packed(_pack(shards=8))),
        ),
        max_rounds=10,
    ),
}


if __name__ == "__main__":
    main(CASES)
