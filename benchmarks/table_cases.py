"""Cases of tables: Parquet files to batches and rows, and batches to Parquet files.

``python table_cases.py CASE ROW`` measures one row once, see ``cases.py``. A table has 2,000,000 rows (set
PENSTOCK_TABLE_ROWS for another number) of an id, 200 letters of text and 128 numbers, in eight files. Rows also report
CPU seconds, which can be compared on a busy machine.
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
from cases import Case, Measure, Result, Row, Task, main
from data import FULL, Sizes, StoredData
from watching import cpu_seconds

FILES = 8
ROW_GROUP = 32_768
BATCH = 1024
CSV_BATCH = 8192
CSV_LIMIT = "limit: pyarrow open_csv"
CSV_TABLE = "pyarrow read_csv, the whole table, cut into batches of 8192"
LIMIT = "limit: pyarrow read_table"
HUGGINGFACE = ("Hugging Face, map-style", "Hugging Face, streaming")
RECIPE = "the document's recipe"

Batch = dict[str, Any]
Batches = Callable[[str], Iterable[Batch]]


def table(sizes: Sizes) -> StoredData:
    """Return the Parquet files, which are written once."""
    rows = int(os.environ.get("PENSTOCK_TABLE_ROWS", "2000000")) // (1 if sizes == FULL else 20)
    folder = data.HOME / f"table-{rows}"
    if not folder.exists():
        data.ignored_folder(data.HOME)
        draft = folder.with_name(f".{folder.name}-{os.getpid()}")
        draft.mkdir(parents=True)
        for number in range(FILES):
            _write(draft / f"part-{number:05d}.parquet", number, rows // FILES)
        draft.rename(folder)
    return StoredData(folder, rows // FILES * FILES)


def _write(path: Path, number: int, rows: int) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(number)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)
    with pq.ParquetWriter(path, _schema()) as writer:
        for first in range(0, rows, ROW_GROUP):
            count = min(ROW_GROUP, rows - first)
            text = letters[rng.integers(0, len(letters), count * 200)]
            offsets = pa.py_buffer((np.arange(count + 1) * 200).astype(np.int32))
            strings = pa.StringArray.from_buffers(count, offsets, pa.py_buffer(text))
            numbers = pa.array(rng.integers(0, 1 << 20, count * 128).astype(np.int32))
            ids = np.arange(count) + number * rows + first
            columns = [pa.array(ids), strings, pa.FixedSizeListArray.from_arrays(numbers, 128)]
            writer.write_table(pa.Table.from_arrays(columns, schema=_schema()))


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([("id", pa.int64()), ("text", pa.string()), ("values", pa.list_(pa.int32(), 128))])


def _timed(rows: int, nbytes: int, work: Callable[[], object]) -> Result:
    cpu, started_at = time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - started_at
    return {"seconds": seconds, "samples": rows, "nbytes": nbytes, "CPU s": time.process_time() - cpu}


def _nbytes(stored: StoredData) -> int:
    return sum(path.stat().st_size for path in stored.folder.iterdir())


def _batches(read: Batches) -> Measure:
    """Measure a pass over all batches."""

    def measure(task: Task) -> Result:
        stored = table(task.sizes)
        batches = read(str(stored.folder))
        if task.check:
            return _digest(batches)

        def work() -> None:
            for _ in batches:
                pass

        return _timed(stored.samples, _nbytes(stored), work)

    return measure


def _digest(batches: Iterable[Batch]) -> Result:
    """Return the number of rows and a checksum that ignores the order of rows, the batches and the width of numbers."""
    import numpy as np

    total = count = 0
    for batch in batches:
        for number, text, values in zip(batch["id"], batch["text"], batch["values"], strict=True):
            checksum = zlib.crc32(str(text).encode(), int(number) & 0xFFFFFFFF)
            total = (total + zlib.crc32(np.asarray(values, np.int32).tobytes(), checksum)) % 2**53
            count += 1
    return {"samples": count, "digest": total}


def _read_table(folder: str) -> Iterable[Batch]:
    """Read the whole table as one batch, with two threads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(2)

    def one_batch() -> Iterable[Batch]:
        table = pq.read_table(folder)
        yield {"id": table["id"].to_numpy(), "text": table["text"], "values": _matrix(table["values"])}

    return one_batch()


def _matrix(column: Any) -> Any:
    import numpy as np

    return np.concatenate([chunk.flatten().to_numpy().reshape(len(chunk), -1) for chunk in column.chunks])


def _iter_batches(folder: str) -> Iterable[Batch]:
    """Read batches with pyarrow alone, file by file."""
    import pyarrow.parquet as pq

    def all_files() -> Iterable[Batch]:
        for path in sorted(Path(folder).iterdir()):
            for batch in pq.ParquetFile(path).iter_batches(BATCH):
                values = batch["values"].flatten().to_numpy().reshape(batch.num_rows, -1)
                yield {"id": batch["id"].to_numpy(), "text": batch["text"].to_pylist(), "values": values}

    return all_files()


def _penstock(*, shuffled: bool = False) -> Batches:
    def read(folder: str) -> Iterable[Batch]:
        import pyarrow.parquet

        import penstock as ps

        assert pyarrow.parquet is not None  # imported before the clock starts
        ds = ps.read_parquet(folder)
        return (ds.shuffle() if shuffled else ds).iter_batches(BATCH)

    return read


def _huggingface(*, streaming: bool) -> Batches:
    """Read Hugging Face's batches in numpy; its cache is filled before the clock starts."""

    def read(folder: str) -> Iterable[Batch]:
        import datasets as hf

        hf.config.HF_DATASETS_CACHE = data.HOME / "huggingface"
        hf.disable_progress_bars()
        files = sorted(map(str, Path(folder).iterdir()))
        dataset = hf.load_dataset("parquet", data_files=files, split="train", streaming=streaming)
        batches: Iterable[Batch] = dataset.with_format("numpy").iter(BATCH)
        return batches

    return read


def _ray(folder: str) -> Iterable[Batch]:
    """Yield an empty batch when Ray is started and has read before, then Ray Data's batches in numpy."""
    from ray_programs import running_ray

    with running_ray() as ray_data:
        next(iter(ray_data.read_parquet(folder).limit(BATCH).iter_batches(batch_size=BATCH)))
        yield {}
        yield from ray_data.read_parquet(folder).iter_batches(batch_size=BATCH, batch_format="numpy")


def _ray_batches(task: Task) -> Result:
    stored = table(task.sizes)
    batches = iter(_ray(str(stored.folder)))
    next(batches)
    return _digest(batches) if task.check else _timed(stored.samples, _nbytes(stored), lambda: deque(batches, maxlen=0))


def _limit(task: Task) -> Result:
    """Measure ``read_table`` alone."""
    stored = table(task.sizes)
    if task.check:
        return _digest(_read_table(str(stored.folder)))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(2)
    return _timed(stored.samples, _nbytes(stored), lambda: pq.read_table(str(stored.folder)))


def _written(task: Task) -> Result:
    """Measure reading the first tenth of the table and writing it again."""
    import penstock as ps

    stored = table(task.sizes)
    count = stored.samples // 10
    target = task.scratch / "written"
    shutil.rmtree(target, ignore_errors=True)
    ds = ps.read_parquet(str(stored.folder)).limit(count)
    if task.check:
        return {"samples": ds.write_parquet(target).samples}
    return _timed(count, 0, lambda: ds.write_parquet(target))


def _written_by_arrow(task: Task) -> Result:
    """Measure the same with pyarrow, which holds the whole tenth in memory."""
    import pyarrow.parquet as pq

    stored = table(task.sizes)
    count = stored.samples // 10
    task.scratch.mkdir(parents=True, exist_ok=True)
    target = task.scratch / "arrow.parquet"

    def work() -> None:
        first = min(stored.folder.iterdir())  # has an eighth of the rows, which is enough
        pq.write_table(pq.read_table(first).slice(0, count), target, compression="zstd", row_group_size=40_000)

    if task.check:
        work()
        return {"samples": count}
    return _timed(count, 0, work)


# Hugging Face to Parquet with embedded media

SHARD_BYTES = 100_000_000


def _hf_photos(sizes: Sizes) -> StoredData:
    return photos.files(sizes.images)


def _embedded(write: Callable[[Any, Path], object]) -> Measure:
    """Measure writing a dataset of paths to files that contain the photos."""

    def measure(task: Task) -> Result:
        import datasets as hf

        hf.config.HF_DATASETS_CACHE = data.HOME / "huggingface"
        hf.disable_progress_bars()
        stored = _hf_photos(task.sizes)
        labeled_paths = photos.labeled_paths(stored)
        columns = {"image": [path for path, _ in labeled_paths], "label": [label for _, label in labeled_paths]}
        dataset = hf.Dataset.from_dict(columns).cast_column("image", hf.Image())
        target = task.scratch / "out"
        target.parent.mkdir(parents=True)
        if task.check:
            write(dataset, target)
            return _photo_digest(target)
        nbytes = sum(Path(path).stat().st_size for path, _ in labeled_paths)
        write(dataset.select(range(1)), task.scratch / "warm")  # imports what it needs before the clock starts
        cpu_at_start, started_at = cpu_seconds(), time.perf_counter()
        write(dataset, target)
        seconds, cpu_s = time.perf_counter() - started_at, cpu_seconds() - cpu_at_start
        return {"seconds": seconds, "samples": stored.samples, "nbytes": nbytes, "CPU s": cpu_s}

    return measure


def _photo_digest(folder: Path) -> Result:
    import pyarrow.parquet as pq

    total = count = 0
    for path in folder.glob("*.parquet"):
        for row in pq.read_table(path).to_pylist():
            total = (total + zlib.crc32(row["image"]["bytes"], row["label"])) % 2**53
            count += 1
    return {"samples": count, "digest": total}


def _recipe(dataset: Any, folder: Path) -> None:
    """Write contiguous shards one by one, with media embedded by a map and private functions of datasets."""
    from datasets.table import embed_table_storage
    from datasets.utils.py_utils import convert_file_size_to_int

    shards = int(dataset._estimate_nbytes() / convert_file_size_to_int(SHARD_BYTES)) + 1
    folder.mkdir()
    for number in range(shards):
        shard = dataset.shard(num_shards=shards, index=number, contiguous=True).with_format("arrow")
        shard = shard.map(embed_table_storage, batched=True, batch_size=1000, keep_in_memory=True)
        shard.with_format(None).to_parquet(str(folder / f"{number:05d}-of-{shards:05d}.parquet"))


def _embed(workers: int, **options: str) -> Callable[[Any, Path], object]:
    def write(dataset: Any, folder: Path) -> object:
        import penstock as ps

        ds = ps.from_huggingface(dataset, workers=workers)
        return ds.write_parquet(str(folder), max_bytes=SHARD_BYTES, **options)

    return write


DATA = (table, _hf_photos)


def _csv_file(sizes: Sizes) -> StoredData:
    """Return a folder with one CSV file of numbers and short text, which is written once."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv as pc

    rows = 3_000_000 // (1 if sizes == FULL else 20)
    folder = data.HOME / f"csv-{rows}"
    if not folder.exists():
        data.ignored_folder(data.HOME)
        draft = folder.with_name(f".{folder.name}-{os.getpid()}")
        draft.mkdir(parents=True)
        rng = np.random.default_rng(0)
        integers = {"id": np.arange(rows), "n": rng.integers(1 << 20, size=rows)}
        numbers = {**integers, "x": rng.random(rows), "y": rng.random(rows)}
        text = [f"word{number % 977} some text {number}" for number in range(rows)]
        pc.write_csv(pa.table({**numbers, "text": text}), draft / "rows.csv")
        draft.rename(folder)
    return StoredData(folder, rows)


def _csv(read: Callable[[str], Iterable[Any]]) -> Measure:
    """Measure a pass over the batches of the CSV file; it runs once before, so that row offsets are known."""

    def measure(task: Task) -> Result:
        stored = _csv_file(task.sizes)
        path = str(stored.folder / "rows.csv")
        if task.check:
            ids = [int(number) for batch in read(path) for number in batch["id"].to_pylist()]
            return {"samples": len(ids), "digest": zlib.crc32(repr(ids).encode())}
        next(iter(read(path)))  # imports what it needs
        return _timed(stored.samples, _nbytes(stored), lambda: deque(read(path), maxlen=0))

    return measure


def _arrow_read_csv(path: str) -> Iterable[Any]:
    import pyarrow as pa
    import pyarrow.csv as pc

    pa.set_cpu_count(2)
    return pc.read_csv(path).to_batches(max_chunksize=CSV_BATCH)  # type: ignore[no-any-return]


def _arrow_open_csv(path: str) -> Iterable[Any]:
    import pyarrow as pa
    import pyarrow.csv as pc

    pa.set_cpu_count(2)
    with pc.open_csv(path) as reader:
        yield from reader


def _penstock_csv(size: int) -> Callable[[str], Iterable[Any]]:
    import penstock as ps

    return lambda path: ps.read_csv(path).iter_batches(size, format="arrow")


CASES: dict[str, Case] = {
    "csv-batches": Case(
        "One CSV file of 230 MB (4 columns of numbers, one of text) to batches of Arrow columns",
        (
            Row(CSV_LIMIT, _csv(_arrow_open_csv)),
            Row(CSV_TABLE, _csv(_arrow_read_csv)),
            Row("penstock, batches of 8192", _csv(_penstock_csv(CSV_BATCH))),
            Row("penstock, batches of 1024", _csv(_penstock_csv(BATCH))),
        ),
        baseline=CSV_LIMIT,
        max_rounds=9,
    ),
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
        max_rounds=5,
    ),
    "table-written": Case(
        "A tenth of the same rows read and written again, zstd",
        (Row("pyarrow", _written_by_arrow), Row("penstock", _written)),
        baseline="pyarrow",
        max_rounds=5,
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
        max_rounds=6,
    ),
}


if __name__ == "__main__":
    main(CASES)
