"""Arrow IPC files and streams: those of other tools too, damaged ones, and the laws that hold for all sources."""

from __future__ import annotations

import os
import pickle
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import polars
import pyarrow as pa
import pyarrow.feather
import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.tables.arrow_file import open_arrow
from penstock.formats.tables.source import ArrowSource
from penstock.storage import Memory, open_storage
from penstock.testing import fingerprint
from penstock.testing.servers import http_server

FORMS = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}


def make_table(first: int, rows: int) -> pa.Table:
    ids = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "text": pa.array([None if i % 7 == 3 else f"t{i}" for i in ids], pa.string()),
            "v": pa.array([[i, i] for i in ids], pa.list_(pa.int32())),
            "kind": pa.array([f"k{i % 3}" for i in ids]).dictionary_encode(),
        }
    )


def write(path: Path, table: pa.Table, form: str = "file", batch: int = 10, compression: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with path.open("wb") as file, FORMS[form](file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


@pytest.fixture
def no_progress_bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    datasets.disable_progress_bars()
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # starts no thread for disabled progress bars
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data/a.arrow", make_table(0, 25))
    write(tmp_path / "data/b.ipc", make_table(25, 0), "stream")
    write(tmp_path / "data/c.feather", make_table(25, 40), "stream", compression="zstd")
    return tmp_path / "data"


def test_files_and_streams_are_shards_and_rows_are_samples(folder: Path) -> None:
    ds = ps.read_arrow(folder)
    assert len(ds) == 65
    assert [s["id"] for s in ds] == list(range(65))
    assert fingerprint(ds[30]) == fingerprint(
        {"id": 30, "text": "t30", "v": np.array([30, 30], np.int32), "kind": "k0"}
    )
    assert sorted(s["id"] for s in ds.shuffle()) == list(range(65))
    assert [s["id"] for s in ps.read_arrow(str(folder / "{a,c}.*"))] == list(range(65))
    assert "read_arrow" in repr(ds)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_columns_are_what_arrow_reads(form: str, compression: str | None, tmp_path: Path) -> None:
    table = make_table(0, 33)
    path = write(tmp_path / "x.arrow", table, form, 8, compression)
    found = ps.read_arrow(path).to_arrow()
    assert found.drop_columns("kind").to_pylist() == table.drop_columns("kind").to_pylist()
    assert found["kind"].to_pylist() == table["kind"].to_pylist()
    assert ps.read_arrow(path, columns=["kind", "id"]).first() == {"kind": "k0", "id": 0}
    assert ps.read_arrow(path).filter(ps.col("id") > 30).select("text").take_all() == [{"text": None}, {"text": "t32"}]


def test_dictionaries_may_grow_and_change(tmp_path: Path) -> None:
    batches = [
        pa.record_batch({"k": pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(words))})
        for words in (["a", "b"], ["a", "b", "c"], ["x", "y"])
    ]
    for deltas in (True, False):
        path = tmp_path / f"{deltas}.arrow"
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
        with path.open("wb") as file, pa.ipc.new_stream(file, batches[0].schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        assert [s["k"] for s in ps.read_arrow(path)] == ["a", "b", "a", "b", "x", "y"]
        assert ps.read_arrow(path)[5] == {"k": "y"}


def test_numbers_of_a_local_file_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", pa.table({"n": np.arange(1_000_000)}), batch=1_000_000)
    before = pa.total_allocated_bytes()
    ds = ps.read_arrow(path)
    batches = list(ds.iter_batches(100_000))
    assert sum(int(batch["n"].sum()) for batch in batches) == 499_999_500_000
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_files_of_feather_and_polars_are_read(tmp_path: Path) -> None:
    pyarrow.feather.write_feather(make_table(0, 9), str(tmp_path / "f.feather"))  # compressed with LZ4
    assert len(ps.read_arrow(tmp_path / "f.feather").take_all()) == 9
    frame = polars.DataFrame({"a": [1, 2, None], "t": ["x", None, "z"], "l": [[1.5], [], [2.0, 3.0]]})
    frame.write_ipc(tmp_path / "p.arrow")
    frame.write_ipc_stream(tmp_path / "q.arrow")
    for name in "pq":
        rows = ps.read_arrow(tmp_path / f"{name}.arrow").select("a", "t").take_all()
        assert rows == frame.select("a", "t").to_dicts()


@pytest.mark.usefixtures("no_progress_bars")
def test_a_saved_hugging_face_dataset_is_read_with_its_features(tmp_path: Path) -> None:
    features = datasets.Features({"n": datasets.Value("int32"), "label": datasets.ClassLabel(names=["a", "b"])})
    hf = datasets.Dataset.from_dict({"n": range(50), "label": [0, 1] * 25}, features=features)
    hf.save_to_disk(tmp_path / "saved", num_shards=3)
    saved = datasets.load_from_disk(tmp_path / "saved")
    assert len(saved.filter(lambda row: row["n"] > 5)) == 44  # leaves a cache file in the folder
    assert list((tmp_path / "saved").glob("cache-*.arrow"))
    ds = ps.read_arrow(tmp_path / "saved")
    assert [s["n"] for s in ds] == list(range(50))
    ds.write_parquet(tmp_path / "out")
    again = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "out/*"), cache_dir=tmp_path / "c", split="train"
    )
    assert again.features == features
    (tmp_path / "saved/data-00001-of-00003.arrow").unlink()
    with pytest.raises(StorageError, match=r"data-00001-of-00003\.arrow"):
        len(ps.read_arrow(tmp_path / "saved"))


def test_a_run_resumes_in_the_middle_of_a_file(folder: Path) -> None:
    loader = ps.read_arrow(folder).shuffle(20).batched(4).loader()
    batches = iter(loader)
    seen = [next(batches)["id"].tolist() for _ in range(5)]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = [batch["id"].tolist() for batch in batches]
    other = ps.read_arrow(folder).shuffle(20).batched(4).loader()
    other.load_state_dict(state)
    assert [batch["id"].tolist() for batch in other] == rest
    assert sorted(i for ids in seen + rest for i in ids) == list(range(65))


def test_engines_yield_the_same(folder: Path) -> None:
    ds = ps.read_arrow(folder).shuffle(16).map(dict).batched(5)
    want = [fingerprint(batch) for batch in ds.on("serial")]
    assert [fingerprint(batch) for batch in ds.on("local")] == want


def test_partition_folders_add_columns(tmp_path: Path) -> None:
    for part in (1, 2):
        write(tmp_path / f"part={part}/x.arrow", make_table(part * 10, 3))
    ds = ps.read_arrow(tmp_path)
    assert [s["part"] for s in ds] == [1, 1, 1, 2, 2, 2]
    assert [s["id"] for s in ds.filter(ps.col("part") == 2)] == [20, 21, 22]


@pytest.mark.parametrize("form", FORMS)
def test_remote_files_are_read_by_ranges(form: str, tmp_path: Path) -> None:
    rows = pa.table({"id": np.arange(600), "text": [f"{i:0500d}" for i in range(600)]})
    path = write(tmp_path / "x.arrow", rows, form, 100, "zstd" if form == "file" else None)
    store = open_storage("memory://bucket/", Memory())
    with store.put("memory://bucket/d/x.arrow", size_hint=None) as upload:
        upload.write(path.read_bytes())
        upload.commit()
    assert [s["id"] for s in ps.read_arrow("memory://bucket/d")] == list(range(600))
    with http_server(tmp_path) as port:
        ds = ps.read_arrow(f"http://127.0.0.1:{port}/x.arrow")
        assert [s["id"] for s in ds.shuffle(50).take_all()] != list(range(600))
        assert ds[599]["id"] == 599


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_cut_off_is_named(form: str, tmp_path: Path) -> None:
    data = write(tmp_path / "x.arrow", make_table(0, 40), form).read_bytes()
    bad = tmp_path / "bad.arrow"
    for size in [0, 3, 7, 8, 100, len(data) // 2, len(data) - 9]:
        bad.write_bytes(data[:size])
        with pytest.raises(DataError, match="not a complete Arrow file") as caught:
            len(ps.read_arrow(bad))
        assert "bad.arrow" in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_damage_never_crashes_and_names_the_file(form: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", make_table(0, 40), form)
    data, rng = path.read_bytes(), random.Random(3)
    failures = 0
    for _ in range(400 if os.environ.get("PENSTOCK_FULL") else 60):
        bad = bytearray(data)
        for _ in range(3):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        failure = error_of(ps.read_arrow(path).on("serial"))
        failures += failure is not None
        assert failure is None or "x.arrow" in failure
    assert failures


def error_of(ds: ps.Dataset) -> str | None:
    try:
        ds.take_all()
    except DataError as exc:
        return str(exc)
    return None


def test_a_damaged_record_batch_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    rows = pa.table({"id": np.arange(30), "text": [f"text {i}" for i in range(30)]})
    path = write(tmp_path / "x.arrow", rows, "stream")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"text 15", b"te\xff\xfe 15"))
    with pytest.raises(DataError, match="record batch 1 cannot be decoded") as caught:
        ps.read_arrow(path).take_all()
    assert "x.arrow" in str(caught.value)
    rest = ps.read_arrow(path).on_error("skip").take_all()
    assert [s["id"] for s in rest] == [*range(10), *range(20, 30)]


CLAIMED = {
    "numbers": pa.table({"id": np.arange(37)}),
    "text": pa.table({"text": [f"t{i}" for i in range(37)]}),
    "nulls": pa.table({"nothing": pa.nulls(37)}),
    "nulls and numbers": pa.table({"nothing": pa.nulls(37), "id": np.arange(37)}),
}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("columns", CLAIMED)
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_claims_more_rows_than_it_holds_is_refused(
    form: str, columns: str, compression: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.arrow", CLAIMED[columns], form, 37, compression)
    honest, claimed = (struct.pack("<q", rows) for rows in (37, 1 << 40))
    data = path.read_bytes()
    assert honest in data
    path.write_bytes(data.replace(honest, claimed))
    for ds in (ps.read_arrow(path), ps.read_arrow(path).on_error("skip")):
        with pytest.raises(DataError, match=r"not a complete Arrow file.*x\.arrow|x\.arrow.*not a complete Arrow file"):
            ds.take_all()


def test_a_stream_without_its_end_marker_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", make_table(0, 20), "stream")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="no end-of-stream marker"):
        len(ps.read_arrow(path))


def test_counting_a_remote_file_reads_one_small_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows = pa.table({"id": np.arange(40, dtype=np.uint8), "blob": [rng.bytes(100_000) for _ in range(40)]})
    data = write(tmp_path / "x.arrow", rows, batch=10).read_bytes()
    storage, url, spans, read = Memory(), "memory://counted/x.arrow", [], Memory.read
    with storage.put(url) as upload:
        upload.write(data)
        upload.commit()

    def noted(self: Memory, url: str, start: int, stop: int, **rest: Any) -> bytes | memoryview:
        spans.append(stop - start)
        return read(self, url, start, stop, **rest)

    monkeypatch.setattr(Memory, "read", noted)
    file = open_arrow(url, url, storage, ())
    assert (file.groups, file.rows) == (4, 40)
    assert sum(spans) < len(data) // 4
    [batch] = file.decode(3, ("id",))
    assert batch["id"].to_pylist() == list(range(30, 40))
    assert sum(spans) < len(data) // 3


def test_a_remote_stream_is_fetched_to_a_file_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, url, left, read = Memory(), "memory://fetched/x.arrow", list[str](), Memory.read
    with storage.put(url) as upload:
        upload.write(write(tmp_path / "x.arrow", make_table(0, 20), "stream").read_bytes())
        upload.commit()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))

    def noted(self: Memory, url: str, start: int, stop: int, **rest: Any) -> bytes | memoryview:
        left.extend(os.listdir(tmp_path / "temporary"))
        return read(self, url, start, stop, **rest)

    monkeypatch.setattr(Memory, "read", noted)
    assert open_arrow(url, url, storage, ()).rows == 20
    assert left == []


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "d/a.arrow", make_table(0, 3))
    write(tmp_path / "d/b.arrow", pa.table({"id": ["x"]}))
    with pytest.raises(DataError, match=r"b\.arrow"):
        ps.read_arrow(tmp_path / "d").take_all()
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(40))
    with pytest.raises(DataError, match="Feather file of version 1"):
        len(ps.read_arrow(tmp_path / "old.feather"))
    with pytest.raises(PlanError, match="list of names"):
        ps.read_arrow("x.arrow", columns="id")


def test_a_file_that_changes_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", make_table(0, 30))
    reader = ArrowSource((str(path),)).open()
    assert reader.count(0) == 30
    write(path, make_table(0, 50))
    with pytest.raises(StorageError, match="was changed"):
        reader.file(0).decode(0, ("id",))
