"""What is measured of places far away and of packing: shards behind a slow server, a cache, files into shards.

``python remote_cases.py CASE ROW`` measures one row once, as ``cases.py`` does for the others.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import data
from cases import Case, Result, Row, Sample, Source, Stream, Task, main, streamed
from data import Made, Sizes
from server import serving

RANGE = 8 << 20
SHARDS = 8
CLASSES = 100
SHARD_BYTES = 1e8  # of packing
LIST = "list.csv"  # the files to be packed, without their classes

Dataset = Any  # the library is imported by the rows that measure it


# The data: 20,000 photos (656 MB), as shards of our own, as the same shards without what we put beside them, as files


def _photos(sizes: Sizes) -> Made:
    return data.photos(Sizes(photos=sizes.photos * 10 // 3))


def shards(sizes: Sizes) -> Made:
    """Shards of 82 MB with indexes and a manifest."""
    return _kept("remote", _photos(sizes), _write_own)


def bare(sizes: Sizes) -> Made:
    """The same shards and nothing beside them."""
    return _kept("remote-bare", shards(sizes), _link)


def files(sizes: Sizes) -> Made:
    """A file of about 30 KB a photo, in class folders."""
    return _kept("files", _photos(sizes), _unpack)


def _kept(kind: str, of: Made, make: Callable[[Path, Made], None]) -> Made:
    """A data set made of another one; its folder appears when it is complete."""
    folder = data.private(data.HOME) / f"{kind}-{of.samples}"
    if not folder.is_dir():
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        make(unfinished, of)
        unfinished.rename(folder)
    return Made(folder, of.samples)


def _write_own(folder: Path, of: Made) -> None:
    import penstock as ps

    ps.read_tar(of.shards).write_tar(str(folder), max_samples=of.samples // SHARDS)


def _link(folder: Path, of: Made) -> None:
    for shard in of.shards:
        os.link(shard, folder / os.path.basename(shard))


def _unpack(folder: Path, of: Made) -> None:
    for number in range(CLASSES):
        (folder / f"class{number:03d}").mkdir()
    for sample in data.samples_of(of):
        name, content = sample["__key__"], sample["jpg"]
        assert isinstance(name, str)
        assert isinstance(content, bytes)
        (folder / f"class{int(sample['cls']) % CLASSES:03d}" / f"{name}.jpg").write_bytes(content)


# Remote: a pass over shards behind 50 ms and 200 MB/s a connection

Remote = Callable[[Made, str], Stream]  # the data set, and the URL of the folder


def _passed(source: Source, opened: Remote) -> Callable[[Task], Result]:
    """Measure one pass; the server is there before, and what it computes is not counted."""

    def measure(task: Task) -> Result:
        with serving(source(task.sizes).folder) as url:
            return _with_cpu(task, source, lambda made: opened(made, url))

    return measure


def _with_cpu(task: Task, source: Source, opened: Callable[[Made], Stream]) -> Result:
    """Measure one pass, and the processor time of this process and of the children it waited for."""
    before: list[float] = []

    def noted(made: Made) -> Stream:
        stream = opened(made)

        def start() -> Iterable[Sample]:
            before.append(_cpu_s())
            return stream()

        return start

    result = streamed(source, noted)(task)
    return {**result, "CPU s": _cpu_s() - before[0]}


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _urls(made: Made, url: str) -> list[str]:
    return [f"{url}/{os.path.basename(shard)}" for shard in made.shards]


def _ranges(connections: int) -> Callable[[Task], Result]:
    """The limit: ranges of 8 MiB into the same few buffers, and away.

    By the client of the standard library: urllib3 on top of it copies what arrives once more.
    """
    return _fetched(lambda size: [(at, min(at + RANGE, size)) for at in range(0, size, RANGE)], connections)


def _whole(task: Task) -> Result:
    """Every shard by one request, one after the other."""
    return _fetched(lambda size: [(0, size)], 1)(task)


def _fetched(cut: Callable[[int], list[tuple[int, int]]], connections: int) -> Callable[[Task], Result]:
    def measure(task: Task) -> Result:
        made = shards(task.sizes)
        jobs: SimpleQueue[tuple[str, int, int]] = SimpleQueue()
        for shard in made.shards:
            for start, stop in cut(os.path.getsize(shard)):
                jobs.put((f"/{os.path.basename(shard)}", start, stop))
        with serving(made.folder) as url:
            host = urlsplit(url).netloc
            begun, before = time.perf_counter(), _cpu_s()
            threads = [threading.Thread(target=_fetch, args=(host, jobs)) for _ in range(connections)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = time.perf_counter() - begun
            used = _cpu_s() - before
        return {"seconds": seconds, "samples": made.samples, "nbytes": made.nbytes, "CPU s": used}

    return measure


def _fetch(host: str, jobs: SimpleQueue[tuple[str, int, int]]) -> None:
    connection, buffer = HTTPConnection(host), memoryview(bytearray(RANGE))
    while True:
        try:
            path, start, stop = jobs.get_nowait()
        except Empty:
            connection.close()
            return
        connection.request("GET", path, headers={"Range": f"bytes={start}-{stop - 1}"})
        with connection.getresponse() as answer:
            left = stop - start
            while left:
                left -= answer.readinto(buffer[: min(left, RANGE)]) or _broken(path)


def _broken(path: str) -> int:
    raise OSError(f"the answer for {path} ended early")


def _penstock(*, shuffled: bool = False) -> Remote:
    def opened(made: Made, url: str) -> Stream:
        import penstock as ps

        def start() -> Iterable[Sample]:
            ds = ps.read_tar(_urls(made, url))
            return ds.shuffle() if shuffled else ds

        assert ps.Dataset is not None  # names are loaded on first use: the engine's import is not the measured part
        return start

    return opened


def _webdataset(spelled: str, workers: int = 0) -> Remote:
    """``spelled`` is what stands for ``{url}``: the URL itself is read by a curl that the library starts."""

    def opened(made: Made, url: str) -> Stream:
        import webdataset as wds

        urls = [spelled.format(url=one) for one in _urls(made, url)]
        if not workers:
            return lambda: wds.WebDataset(urls, shardshuffle=False)

        def start() -> Iterable[Sample]:
            ds = wds.WebDataset(urls, shardshuffle=False).batched(64, collation_fn=list)  # a hop for 64 at a time
            loader: Any = wds.WebLoader(ds, batch_size=None, num_workers=workers)
            return (sample for batch in loader for sample in batch)

        return start

    return opened


def _webdataset_urllib(made: Made, url: str) -> Stream:
    """The library's own way to read a URL otherwise: a handler, here of the standard library's urlopen."""
    from urllib.request import urlopen

    import webdataset as wds

    def open_url(place: str, mode: str = "rb", bufsize: int = 8192, **_: Any) -> Any:
        return urlopen(place)

    wds.gopen_schemes["http"] = open_url
    return lambda: wds.WebDataset(_urls(made, url), shardshuffle=False)


# A cache: what a second epoch costs


def _second(dataset: Callable[[Made, str, Path], Dataset]) -> Callable[[Task], Result]:
    """Measure the second pass over a dataset; the first one fills what there is to fill."""

    def measure(task: Task) -> Result:
        made = shards(task.sizes)
        with serving(made.folder) as url:
            ds = dataset(made, url, task.scratch)
            for _ in ds:
                pass
            return _with_cpu(task, shards, lambda made: lambda: ds)

    return measure


def _local(made: Made, url: str, scratch: Path) -> Dataset:
    import penstock as ps

    return ps.read_tar(made.shards)


def _remote(made: Made, url: str, scratch: Path) -> Dataset:
    import penstock as ps

    return ps.read_tar(_urls(made, url))


def _cached(made: Made, url: str, scratch: Path) -> Dataset:
    import penstock as ps

    return ps.read_tar(_urls(made, url), cache=ps.Cache(scratch / "cache"))


# Packing: files into shards, all of it flushed to disk

Packer = Callable[[Path, Path], None]  # from a folder to another


def _packed(ready: Callable[[], Packer]) -> Callable[[Task], Result]:
    """Measure from a folder of files to shards on disk; or tell what is in them. What ``ready`` does is not timed."""

    def measure(task: Task) -> Result:
        made, pack, out = files(task.sizes), ready(), task.scratch / "out"
        nbytes = sum(os.path.getsize(path) for path in _listed(made.folder))
        task.scratch.mkdir(parents=True)
        (task.scratch / LIST).write_text("\n".join(["path", *_listed(made.folder)]))
        begun, before = time.perf_counter(), _cpu_s()
        pack(made.folder, out)
        seconds, used = time.perf_counter() - begun, _cpu_s() - before
        if task.check:
            return _contents(out)
        return {"seconds": seconds, "samples": made.samples, "nbytes": nbytes, "CPU s": used}

    return measure


def _contents(out: Path) -> Result:
    """The bytes of all images, in any order and under any name; nothing to say of what is no archive."""
    total = count = 0
    for shard in out.rglob("*.tar"):
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.name.endswith(".jpg"):
                    content = tar.extractfile(member)
                    assert content is not None
                    total, count = (total + zlib.crc32(content.read())) % 2**53, count + 1
    return {"samples": count, "digest": total} if count else {"samples": count}


def _listed(folder: Path) -> Iterator[str]:
    for kind in sorted(os.listdir(folder)):
        for name in sorted(os.listdir(folder / kind)):
            yield f"{folder}/{kind}/{name}"


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _copy() -> Packer:
    """The limit: the bytes of all files, one after the other, in one file, without a way through this process."""

    def copy(folder: Path, out: Path) -> None:
        with open(out, "wb", buffering=0) as file:
            for path in _listed(folder):
                one = os.open(path, os.O_RDONLY)
                while os.sendfile(file.fileno(), one, None, RANGE):
                    pass
                os.close(one)
        _flush(out)

    return copy


def _tar() -> Packer:
    """GNU tar: one archive, by name as the others."""

    def tar(folder: Path, out: Path) -> None:
        out.mkdir()
        subprocess.run(["tar", "--sort=name", "-cf", out / "all.tar", "-C", folder, "."], check=True)
        _flush(out / "all.tar")

    return tar


def _pack(shuffle: bool = False, labels: bool = True) -> Callable[[], Packer]:
    def ready() -> Packer:
        import penstock as ps

        def pack(folder: Path, out: Path) -> None:
            source = folder if labels else out.with_name(LIST)
            ps.pack(source, out, max_bytes=SHARD_BYTES, shuffle=shuffle, progress=False)

        assert ps.pack is not None  # names are loaded on first use
        return pack

    return ready


def _webdataset_writer(flushed: bool) -> Callable[[], Packer]:
    def ready() -> Packer:
        import webdataset as wds

        def pack(folder: Path, out: Path) -> None:
            out.mkdir()
            with wds.ShardWriter(f"{out}/%06d.tar", maxsize=SHARD_BYTES, encoder=False, verbose=0) as writer:
                for sample in _samples(folder):
                    writer.write(sample)
            for shard in sorted(out.iterdir()) if flushed else ():
                _flush(shard)

        return pack

    return ready


def _samples(folder: Path) -> Iterator[Sample]:
    """Files and the numbers of their classes, as lean as that can be done in Python."""
    numbers = {kind: b"%d" % number for number, kind in enumerate(sorted(os.listdir(folder)))}
    for number, path in enumerate(_listed(folder)):
        _, kind, name = path.rsplit("/", 2)
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        yield {"__key__": f"{number:09d}-{name.partition('.')[0]}", "jpg": content, "cls": numbers[kind]}


LIMIT = "limit: ranges by 8 connections"
WEBDATASET = {  # "its curl": what the library does by itself; a loader's workers read shards side by side
    "webdataset, its curl": _webdataset("{url}"),
    "webdataset, pipe:curl": _webdataset("pipe:curl -s -f {url}"),
    "webdataset, urllib": _webdataset_urllib,
    "webdataset, its curl, 4 loader workers": _webdataset("{url}", workers=4),
}

DATA = (shards, bare, files)

CASES = {
    "remote": Case(
        "Photo shards (656 MB) behind a server that answers after 50 ms and gives a connection 200 MB/s; one pass "
        "(CPU: of the reading side)",
        (
            Row(LIMIT, _ranges(8)),
            Row("limit: ranges by 16 connections", _ranges(16)),
            Row("one stream", _whole),
            *(Row(name, _passed(shards, opened)) for name, opened in WEBDATASET.items()),
            Row("penstock", _passed(shards, _penstock())),
            Row("penstock, shuffled", _passed(shards, _penstock(shuffled=True))),
            Row("penstock, without an index", _passed(bare, _penstock())),
        ),
        baseline=LIMIT,
        most_rounds=10,
    ),
    "cached": Case(
        "The second epoch over the same shards: files of this machine, through a cache, without one",
        (
            Row("penstock, local files", _second(_local)),
            Row("penstock, through a cache", _second(_cached)),
            Row("penstock, remote", _second(_remote)),
        ),
        baseline="penstock, local files",
        most_rounds=10,
    ),
    "pack": Case(
        "20,000 files of 30 KB in 100 class folders into shards of 100 MB, or one archive; flushed to disk but where "
        "it says so (penstock also hashes, indexes, and could go on after a crash; with labels, as webdataset, it has "
        "twice the members of GNU tar)",
        (
            Row("limit: the bytes in one file", _packed(_copy)),
            Row("GNU tar", _packed(_tar)),
            Row("webdataset", _packed(_webdataset_writer(flushed=True))),
            Row("webdataset, not flushed", _packed(_webdataset_writer(flushed=False))),
            Row("penstock, the members of GNU tar", _packed(_pack(labels=False))),
            Row("penstock", _packed(_pack())),
            Row("penstock, shuffled", _packed(_pack(shuffle=True))),
        ),
        most_rounds=10,
    ),
}


if __name__ == "__main__":
    main(CASES)
