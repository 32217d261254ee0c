"""What is measured of tables: Parquet files into batches and rows, and batches into Parquet files.

``python table_cases.py CASE ROW`` measures one row once, as ``cases.py`` does for the others. A table has 2,000,000
rows of an id, 200 letters of text and 128 numbers, in eight files; PENSTOCK_TABLE_ROWS says otherwise. CPU seconds
stand beside the time: on a busy machine they are what can be compared.
"""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import data
import photos
from cases import Case, Result, Row, Task, main
from data import FULL, Made, Sizes
from watching import cpu_seconds

FILES = 8
GROUP = 32_768
BATCH = 1024
LIMIT = "limit: pyarrow read_table"
HUGGINGFACE = ("Hugging Face, map-style", "Hugging Face, streaming")
RECIPE = "the document's recipe"

Batch = dict[str, Any]
Batches = Callable[[str], Iterable[Batch]]


def table(sizes: Sizes) -> Made:
    """The files, made once."""
    rows = int(os.environ.get("PENSTOCK_TABLE_ROWS", "2000000")) // (1 if sizes == FULL else 20)
    folder = data.HOME / f"table-{rows}"
    if not folder.exists():
        data.private(data.HOME)
        draft = folder.with_name(f".{folder.name}-{os.getpid()}")
        draft.mkdir(parents=True)
        for number in range(FILES):
            _write(draft / f"part-{number:05d}.parquet", number, rows // FILES)
        draft.rename(folder)
    return Made(folder, rows // FILES * FILES)


def _write(path: Path, number: int, rows: int) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    dice = np.random.default_rng(number)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)
    with pq.ParquetWriter(path, _schema()) as writer:
        for first in range(0, rows, GROUP):
            many = min(GROUP, rows - first)
            text = letters[dice.integers(0, len(letters), many * 200)]
            edges = pa.py_buffer((np.arange(many + 1) * 200).astype(np.int32))
            words = pa.StringArray.from_buffers(many, edges, pa.py_buffer(text))
            numbers = pa.array(dice.integers(0, 1 << 20, many * 128).astype(np.int32))
            ids = np.arange(many) + number * rows + first
            columns = [pa.array(ids), words, pa.FixedSizeListArray.from_arrays(numbers, 128)]
            writer.write_table(pa.Table.from_arrays(columns, schema=_schema()))


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([("id", pa.int64()), ("text", pa.string()), ("values", pa.list_(pa.int32(), 128))])


def _timed(rows: int, nbytes: int, work: Callable[[], object]) -> Result:
    cpu, begun = time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "samples": rows, "nbytes": nbytes, "CPU s": time.process_time() - cpu}


def _nbytes(made: Made) -> int:
    return sum(path.stat().st_size for path in made.folder.iterdir())


def _batches(make: Batches) -> Callable[[Task], Result]:
    """Measure a pass over all batches."""

    def measure(task: Task) -> Result:
        made = table(task.sizes)
        batches = make(str(made.folder))
        if task.check:
            return _digest(batches)

        def work() -> None:
            for _ in batches:
                pass

        return _timed(made.samples, _nbytes(made), work)

    return measure


def _digest(batches: Iterable[Batch]) -> Result:
    """What came, in any order and cut anyhow; numbers may be wider than they were."""
    import numpy as np

    total = count = 0
    for batch in batches:
        for number, text, values in zip(batch["id"], batch["text"], batch["values"], strict=True):
            told = zlib.crc32(str(text).encode(), int(number) & 0xFFFFFFFF)
            total = (total + zlib.crc32(np.asarray(values, np.int32).tobytes(), told)) % 2**53
            count += 1
    return {"samples": count, "digest": total}


def _read_table(folder: str) -> Iterable[Batch]:
    """All of it in memory by two threads: no batch is cut of it, except where they are looked at."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(2)

    def all_of_it() -> Iterable[Batch]:
        whole = pq.read_table(folder)
        yield {"id": whole["id"].to_numpy(), "text": whole["text"], "values": _matrix(whole["values"])}

    return all_of_it()


def _matrix(column: Any) -> Any:
    import numpy as np

    return np.concatenate([chunk.flatten().to_numpy().reshape(len(chunk), -1) for chunk in column.chunks])


def _iter_batches(folder: str) -> Iterable[Batch]:
    """What pyarrow itself offers for batches, file by file."""
    import pyarrow.parquet as pq

    def all_files() -> Iterable[Batch]:
        for path in sorted(Path(folder).iterdir()):
            for batch in pq.ParquetFile(path).iter_batches(BATCH):
                values = batch["values"].flatten().to_numpy().reshape(batch.num_rows, -1)
                yield {"id": batch["id"].to_numpy(), "text": batch["text"].to_pylist(), "values": values}

    return all_files()


def _penstock(*, shuffled: bool = False) -> Batches:
    def make(folder: str) -> Iterable[Batch]:
        import pyarrow.parquet

        import penstock as ps

        assert pyarrow.parquet is not None  # its import is not the measured part
        ds = ps.read_parquet(folder)
        return (ds.shuffle() if shuffled else ds).iter_batches(BATCH)

    return make


def _huggingface(*, streaming: bool) -> Batches:
    """Its own batches in numpy; what it needs in its cache is there before."""

    def make(folder: str) -> Iterable[Batch]:
        import datasets as hf

        hf.config.HF_DATASETS_CACHE = data.HOME / "huggingface"
        hf.disable_progress_bars()
        files = sorted(map(str, Path(folder).iterdir()))
        found = hf.load_dataset("parquet", data_files=files, split="train", streaming=streaming)
        batches: Iterable[Batch] = found.with_format("numpy").iter(BATCH)
        return batches

    return make


def _ray(folder: str) -> Iterable[Batch]:
    """Its own batches in numpy, on a Ray that runs and has read before."""
    from ray_programs import started

    with started() as ray_data:
        next(iter(ray_data.read_parquet(folder).limit(BATCH).iter_batches(batch_size=BATCH)))
        yield {}  # from here on it is measured
        yield from ray_data.read_parquet(folder).iter_batches(batch_size=BATCH, batch_format="numpy")


def _ray_batches(task: Task) -> Result:
    made = table(task.sizes)
    batches = iter(_ray(str(made.folder)))
    next(batches)
    return _digest(batches) if task.check else _timed(made.samples, _nbytes(made), lambda: deque(batches, maxlen=0))


def _limit(task: Task) -> Result:
    """``read_table`` and nothing more."""
    made = table(task.sizes)
    if task.check:
        return _digest(_read_table(str(made.folder)))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(2)
    return _timed(made.samples, _nbytes(made), lambda: pq.read_table(str(made.folder)))


def _written(task: Task) -> Result:
    """The first tenth, read and written again."""
    import penstock as ps

    made = table(task.sizes)
    many = made.samples // 10
    target = task.scratch / "written"
    shutil.rmtree(target, ignore_errors=True)
    ds = ps.read_parquet(str(made.folder)).limit(many)
    if task.check:
        return {"samples": ds.write_parquet(target).samples}
    return _timed(many, 0, lambda: ds.write_parquet(target))


def _written_by_arrow(task: Task) -> Result:
    """The same by pyarrow, with the whole tenth in memory."""
    import pyarrow.parquet as pq

    made = table(task.sizes)
    many = made.samples // 10
    task.scratch.mkdir(parents=True, exist_ok=True)
    target = task.scratch / "arrow.parquet"

    def work() -> None:
        first = min(made.folder.iterdir())  # it has an eighth
        pq.write_table(pq.read_table(first).slice(0, many), target, compression="zstd", row_group_size=40_000)

    if task.check:
        work()
        return {"samples": many}
    return _timed(many, 0, work)


# Hugging Face to Parquet with the media inside

SHARD_BYTES = 100_000_000


def _hf_photos(sizes: Sizes) -> Made:
    return photos.files(sizes.images)


def _embedded(write: Callable[[Any, Path], object]) -> Callable[[Task], Result]:
    """Measure from a dataset of paths to files that hold the photos."""

    def measure(task: Task) -> Result:
        import datasets as hf

        hf.config.HF_DATASETS_CACHE = data.HOME / "huggingface"
        hf.disable_progress_bars()
        made = _hf_photos(task.sizes)
        listed = photos.listed(made)
        columns = {"image": [path for path, _ in listed], "label": [label for _, label in listed]}
        dataset = hf.Dataset.from_dict(columns).cast_column("image", hf.Image())
        target = task.scratch / "out"
        target.parent.mkdir(parents=True)
        if task.check:
            write(dataset, target)
            return _photos_in(target)
        nbytes = sum(Path(path).stat().st_size for path, _ in listed)
        write(dataset.select(range(1)), task.scratch / "warm")  # imports are no part of it
        cpu, begun = cpu_seconds(), time.perf_counter()
        write(dataset, target)
        seconds, spent = time.perf_counter() - begun, cpu_seconds() - cpu
        return {"seconds": seconds, "samples": made.samples, "nbytes": nbytes, "CPU s": spent}

    return measure


def _photos_in(folder: Path) -> Result:
    import pyarrow.parquet as pq

    total = count = 0
    for path in folder.glob("*.parquet"):
        for row in pq.read_table(path).to_pylist():
            total = (total + zlib.crc32(row["image"]["bytes"], row["label"])) % 2**53
            count += 1
    return {"samples": count, "digest": total}


def _recipe(dataset: Any, folder: Path) -> None:
    """Shards by position, media embedded by a map, one after the other, with what datasets keeps private."""
    from datasets.table import embed_table_storage
    from datasets.utils.py_utils import convert_file_size_to_int

    many = int(dataset._estimate_nbytes() / convert_file_size_to_int(SHARD_BYTES)) + 1
    folder.mkdir()
    for number in range(many):
        shard = dataset.shard(num_shards=many, index=number, contiguous=True).with_format("arrow")
        shard = shard.map(embed_table_storage, batched=True, batch_size=1000, keep_in_memory=True)
        shard.with_format(None).to_parquet(str(folder / f"{number:05d}-of-{many:05d}.parquet"))


def _embed(workers: int, **options: str) -> Callable[[Any, Path], object]:
    def write(dataset: Any, folder: Path) -> object:
        import penstock as ps

        ds = ps.from_huggingface(dataset, workers=workers)
        return ds.write_parquet(str(folder), max_bytes=SHARD_BYTES, **options)

    return write


DATA = (table, _hf_photos)

CASES: dict[str, Case] = {
    "table-batches": Case(
        "Parquet files (id, 200 letters, 128 int32) to batches of 1024 in numpy; text as a list of str",
        (
            Row(LIMIT, _limit),
            Row("pyarrow, iter_batches", _batches(_iter_batches)),
            Row("penstock", _batches(_penstock())),
            Row("penstock, shuffled", _batches(_penstock(shuffled=True))),
            Row(HUGGINGFACE[0], _batches(_huggingface(streaming=False)), peer="huggingface"),
            Row(HUGGINGFACE[1], _batches(_huggingface(streaming=True)), peer="huggingface"),
            Row("Ray Data", _ray_batches, peer="ray"),
        ),
        baseline=LIMIT,
        most_rounds=5,
    ),
    "table-written": Case(
        "A tenth of the same read and written again, zstd",
        (Row("pyarrow", _written_by_arrow), Row("penstock", _written)),
        baseline="pyarrow",
        most_rounds=5,
    ),
    "huggingface-parquet": Case(
        "A Hugging Face dataset of photos (paths) to Parquet with the photos inside, shards of at most 100 MB",
        (
            Row(RECIPE, _embedded(_recipe)),
            Row("penstock, workers=1", _embedded(_embed(1))),
            Row("penstock, workers=2", _embedded(_embed(2))),
            Row("penstock, workers=2, snappy as in the recipe", _embedded(_embed(2, compression="snappy"))),
        ),
        baseline=RECIPE,
        most_rounds=6,
    ),
}


if __name__ == "__main__":
    main(CASES)
