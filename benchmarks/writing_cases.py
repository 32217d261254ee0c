"""Cases of writing many shards at once: photos that are decoded, scaled and stored again, on Ray and in processes.

``python writing_cases.py CASE ROW`` measures one row once, see ``cases.py``. Every row calls the same function for each
photo. The hand-written programs for Ray Data have one task for each file that they write, which reads, scales and
writes without a hop between nodes. All rows run in the project's own environment.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import crops
import data
import photos
import ray_programs as programs
from cases import Case, Measure, Result, Row, Task, main
from data import FULL, QUICK, Sizes, StoredData
from watching import cpu_seconds

SHARDS = 32
COPIES = 5  # of every shard, in the full size: 19,200 photos
RAY_DATA = {kind: f"Ray Data, hand-written, {kind}" for kind in ("Parquet", "tar")}
OURS = {kind: f"penstock, {kind}" for kind in RAY_DATA}
PROCESSES = {count: f"{count} worker process{'es' if count > 1 else ''}" for count in (1, 2)}

Columns = dict[str, Any]
Write = Callable[[Any, list[list[str]], Path], None]  # takes ray.data, the inputs of each file, and the folder


def _sources(sizes: Sizes) -> StoredData:
    """Return the photos in 32 shards."""
    stored = photos.photos(sizes.images)
    samples = ((str(s["__key__"]), {"jpg": s["jpg"], "cls": s["cls"]}) for s in data.read_samples(stored))
    write = partial(data.write_with_tarfile, samples=samples, shards=SHARDS)
    return data.create_once(f"images-{sizes.images}-in-{SHARDS}", sizes.images, write)


def _inputs(sizes: Sizes, copies: int = 1) -> list[list[str]]:
    """Return the shards that each of the 32 files is written from: hard links, so that their bytes are stored once."""
    stored = _sources(sizes)

    def link(folder: Path) -> None:
        for shard in stored.shards:
            for copy in range(copies):
                os.link(shard, folder / f"{Path(shard).stem}-{copy}.tar")

    paths = data.create_once(f"{stored.folder.name}-x{copies}", copies * stored.samples, link).shards
    return [paths[start : start + copies] for start in range(0, len(paths), copies)]


# Programs


def _scaled(paths: list[str]) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield key, photo and class of every sample, with as little Python as possible."""
    for path in paths:
        with tarfile.open(path, "r|") as tar:
            jpg = b""
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                if member.name.endswith(".jpg"):
                    jpg = content.read()
                else:
                    key = member.name.partition(".")[0]
                    yield f"{Path(path).stem}/{key}", crops.shrunk(jpg), content.read()
                tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps every header in memory


def _ray_data_table(task: Columns) -> Columns:
    import numpy as np

    keys, jpgs, labels = zip(*_scaled(list(task["paths"][0])), strict=True)
    return {"key": np.array(keys), "jpg": np.array(jpgs, object), "cls": np.array([int(label) for label in labels])}


def _ray_data_parquet(ray_data: Any, inputs: list[list[str]], out: Path) -> None:
    tasks = ray_data.from_items([{"paths": paths} for paths in inputs], override_num_blocks=len(inputs))
    tasks.map_batches(_ray_data_table, batch_size=1, batch_format="numpy").write_parquet(str(out))


def _ray_data_tar(ray_data: Any, inputs: list[list[str]], out: Path) -> None:
    """Let each task write its archive, which is faster than ``write_webdataset``."""
    out.mkdir(parents=True)
    items = [{"paths": paths, "out": str(out / f"{number:05d}.tar")} for number, paths in enumerate(inputs)]
    ray_data.from_items(items, override_num_blocks=len(items)).map(_write_archive).take_all()


def _write_archive(task: Columns) -> Columns:
    count = 0
    with tarfile.open(task["out"], "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, jpg, label in _scaled(list(task["paths"])):
            for name, value in ((f"{key}.jpg", jpg), (f"{key}.cls", label)):
                member = tarfile.TarInfo(name)
                member.size = len(value)
                tar.addfile(member, io.BytesIO(value))
            count += 1
    return {"samples": count}


def _scale_sample(sample: Columns) -> Columns:
    key = f"{Path(sample['__url__']).stem}/{sample['__key__']}"
    return {"__key__": key, "jpg": crops.shrunk(sample["jpg"]), "cls": int(sample["cls"])}


def _penstock(kind: str, engine: str = "ray", workers: int | None = None) -> Write:
    """Write what a user would; with ``workers``, that many processes scale."""

    def write(_: Any, inputs: list[list[str]], out: Path) -> None:
        import penstock as ps

        ds = ps.read_tar([path for paths in inputs for path in paths])
        ds = ds.map(_scale_sample, workers=workers, on="processes" if workers else "threads").on(engine)  # type: ignore[arg-type]
        getattr(ds, f"write_{kind.lower()}")(str(out), shards=SHARDS)

    return write


# Measures


def _measure_on_ray(write: Write) -> Measure:
    def measure(task: Task) -> Result:
        with programs.running_ray() as ray_data:
            write(ray_data, _inputs(QUICK), task.scratch / "warm")
            if task.check:
                return _digest(task.scratch / "warm")
            inputs = _inputs(task.sizes, COPIES if task.sizes == FULL else 1)
            received = _count_received()
            return _timed(lambda: write(ray_data, inputs, task.scratch / "out"), inputs) | {
                "MB to the driver": received[0] / 1e6
            }

    return measure


def _measure_processes(count: int) -> Measure:
    def measure(task: Task) -> Result:
        write = _penstock("Parquet", "local", count)
        write(None, _inputs(QUICK), task.scratch / "warm")
        if task.check:
            return _digest(task.scratch / "warm")
        inputs = _inputs(task.sizes)
        return _timed(lambda: write(None, inputs, task.scratch / "out"), inputs)

    return measure


def _timed(run: Callable[[], None], inputs: list[list[str]]) -> Result:
    samples = sum(map(_count_photos, (path for paths in inputs for path in paths)))
    cpu_at_start, started_at = cpu_seconds(), time.perf_counter()
    run()
    seconds, cpu_s = time.perf_counter() - started_at, cpu_seconds() - cpu_at_start
    return {"seconds": seconds, "samples": samples, "CPU ms a sample": 1000 * cpu_s / samples}


@cache
def _count_photos(path: str) -> int:
    with tarfile.open(path) as tar:
        return len(tar.getnames()) // 2


def _count_received() -> list[int]:
    """Count the bytes of all objects that this process gets from the cluster from now on."""
    import ray

    received, get = [0], ray.get

    def counted(refs: Any, **options: Any) -> Any:
        found = get(refs, **options)
        for one in found if isinstance(found, list) else [found]:
            received[0] += len(one) if isinstance(one, bytes) else int(getattr(one, "nbytes", 0))
        return found

    ray.get = counted
    return received


def _digest(out: Path) -> Result:
    """Return the number of photos that were written and a checksum that ignores their order."""
    found: list[bytes] = []
    for path in out.rglob("*.parquet"):
        import pyarrow.parquet

        found += pyarrow.parquet.read_table(path, columns=["jpg"])["jpg"].to_pylist()
    for path in out.rglob("*.tar"):
        with tarfile.open(path) as tar:
            members = [tar.extractfile(member) for member in tar if member.name.endswith(".jpg")]
            found += [member.read() for member in members if member is not None]
    shutil.rmtree(out)
    return {"samples": len(found), "digest": sum(map(zlib.crc32, found)) % 2**53}


DATA = (_sources, lambda sizes: photos.photos(sizes.images))

CASES: dict[str, Case] = {
    "ray-write": Case(
        "Reading, decoding, scaling and writing photos to 32 files on Ray with 2 CPUs: a whole pass on a running Ray",
        tuple(
            row
            for kind, program in (("Parquet", _ray_data_parquet), ("tar", _ray_data_tar))
            for row in (
                Row(RAY_DATA[kind], _measure_on_ray(program)),
                Row(OURS[kind], _measure_on_ray(_penstock(kind))),
            )
        ),
        baseline=RAY_DATA["Parquet"],
        max_rounds=3,
    ),
    "write-processes": Case(
        "The same work on one machine: reading, decoding, scaling and writing photos to 32 Parquet files",
        tuple(Row(name, _measure_processes(count)) for count, name in PROCESSES.items()),
        baseline=PROCESSES[1],
        max_rounds=6,
    ),
}


if __name__ == "__main__":
    main(CASES)
