"""The manifest is merged atomically, quick to load and strict about its content."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import DataError
from penstock.formats.manifest import (
    MANIFEST,
    Manifest,
    ShardEntry,
    read_manifest,
    read_manifest_at,
    write_manifest,
    write_manifest_at,
)
from penstock.storage import Memory


def entry(name: str, samples: int = 1) -> ShardEntry:
    return ShardEntry(name, samples, 100, "ab" * 32)


def test_entries_are_read_sorted_by_name(tmp_path: Path) -> None:
    write_manifest(tmp_path, [entry("b.tar", 2), entry("a.tar", 1)])
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.shards == (entry("a.tar", 1), entry("b.tar", 2))
    assert manifest.entry("b.tar") == entry("b.tar", 2)
    assert manifest.entry("c.tar") is None
    assert manifest.format == "tar"
    raw = json.loads((tmp_path / MANIFEST).read_text())
    assert raw["v"] == 1
    assert raw["shards"][0] == {"name": "a.tar", "samples": 1, "bytes": 100, "sha256": "ab" * 32}


def test_entries_of_the_same_name_are_replaced_and_others_stay(tmp_path: Path) -> None:
    write_manifest(tmp_path, [entry("a.tar", 1), entry("b.tar", 2)])
    manifest = write_manifest(tmp_path, [entry("b.tar", 5), entry("c.tar", 3)])
    assert [shard.samples for shard in manifest.shards] == [1, 5, 3]
    reread = read_manifest(tmp_path)
    assert reread is not None
    assert reread.shards == manifest.shards
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_reading_a_folder_without_a_manifest_returns_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "missing") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"v": 2, "format": "tar", "shards": []}',
        '{"v": 1, "format": 3, "shards": []}',
        '{"v": 1, "format": "tar", "shards": {}, "x": 1, "shards": 5}',
        '{"v": 1, "format": "tar", "shards": [{"name": "a"}]}',
        '{"v": 1, "format": "tar", "shards": [{"name": "a", "samples": -1, "bytes": 1, "sha256": ""}]}',
        '{"v": 1, "format": "tar", "shards": [{"name": "a", "samples": true, "bytes": 1, "sha256": ""}]}',
        '{"v": 1, "format": "tar", "shards": [{"name": "../a", "samples": 1, "bytes": 1, "sha256": ""}]}',
        '{"v": 1, "format": "tar", "shards": [{"name": 3, "samples": 1, "bytes": 1, "sha256": ""}]}',
        '{"v": 1, "format": "tar", "shards": [1]}',
        "[" * 100_000,
    ],
    ids=range(15),
)
def test_the_error_of_a_malformed_manifest_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DataError, match=r"manifest.*manifest\.json"):
        read_manifest(tmp_path)


def test_a_shard_listed_twice_is_a_data_error(tmp_path: Path) -> None:
    shard = {"name": "a", "samples": 1, "bytes": 1, "sha256": ""}
    (tmp_path / MANIFEST).write_text(json.dumps({"v": 1, "format": "tar", "shards": [shard, shard]}))
    with pytest.raises(DataError, match="twice"):
        read_manifest(tmp_path)


def test_each_format_has_a_manifest_of_its_own(tmp_path: Path) -> None:
    write_manifest(tmp_path, [entry("a.tar")])
    write_manifest(tmp_path, [entry("a.parquet")], "parquet")
    found = [read_manifest(tmp_path, format) for format in ("tar", "parquet", "csv")]
    assert [one and [shard.name for shard in one.shards] for one in found] == [["a.tar"], ["a.parquet"], None]


def test_a_changed_manifest_is_read_again(tmp_path: Path) -> None:
    for count in (1, 2, 3):
        write_manifest(tmp_path, [entry("a.tar", count)])
        manifest = read_manifest(tmp_path)
        assert manifest is not None
        assert manifest.shards[0].samples == count


def test_ten_thousand_shards_load_in_50_ms(tmp_path: Path) -> None:
    write_manifest(tmp_path, [entry(f"shard-{n:06d}.tar", n) for n in range(10_000)])
    times = []
    for copy in range(10):
        folder = tmp_path / str(copy)
        folder.mkdir()
        (folder / MANIFEST).write_bytes((tmp_path / MANIFEST).read_bytes())
        start = time.process_time()  # CPU time of this process: the machine may be busy
        manifest = read_manifest(folder)
        times.append(time.process_time() - start)
        assert manifest is not None
        assert len(manifest.shards) == 10_000
    assert min(times) < 0.05


def add_entries(folder: str, worker: int) -> None:
    for number in range(10):
        write_manifest(folder, [entry(f"{worker}-{number}.tar")])


def test_processes_that_write_at_the_same_time_lose_no_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=add_entries, args=(str(tmp_path), worker)) for worker in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert len(manifest.shards) == 30


def test_classes_and_the_source_fingerprint_are_stored(tmp_path: Path) -> None:
    write_manifest(tmp_path, [entry("a.tar")], classes=("cat", "d\u00f6g"), made={"": "abc"})
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert (manifest.classes, manifest.made) == (("cat", "d\u00f6g"), {"": "abc"})
    manifest = write_manifest(tmp_path, [entry("b.tar")])
    assert (manifest.classes, manifest.made) == (("cat", "d\u00f6g"), {})


def test_a_manifest_on_another_storage_has_the_same_bytes(tmp_path: Path) -> None:
    url = "memory://manifest/out"
    assert read_manifest_at(url) is None
    for folder, write in ((tmp_path, write_manifest), (url, None)):
        for entries, without in (([entry("a.tar"), entry("b.tar")], ()), ([entry("c.tar", 9)], ("a.tar",))):
            if write is not None:
                write(folder, entries, without=without, classes=["x"])
            else:
                write_manifest_at(str(folder), Memory(), entries, without=without, classes=["x"])
    assert b"".join(Memory().stream(f"{url}/{MANIFEST}")) == (tmp_path / MANIFEST).read_bytes()
    manifest = read_manifest_at(url, Memory())
    assert manifest is not None
    assert [shard.name for shard in manifest.shards] == ["b.tar", "c.tar"]
    local = read_manifest_at(str(tmp_path))
    assert local is not None
    assert local.shards == manifest.shards


def test_a_malformed_manifest_on_another_storage_is_a_data_error() -> None:
    with Memory().put("memory://manifest/bad/manifest.json") as upload:
        upload.write(b"{}")
        upload.commit()
    with pytest.raises(DataError, match=r"malformed.*memory://manifest/bad/manifest\.json"):
        read_manifest_at("memory://manifest/bad")


@pytest.mark.parametrize(
    ("name", "read", "advice"),
    [
        ("shard-000001.tar", ps.read_tar, "`penstock index {0}` adds them"),
        ("set-001-00000-of-00001.parquet", ps.read_parquet, "{0}/*.parquet reads them too"),
    ],
)
def test_a_warning_names_the_files_that_are_left_out(
    name: str, read: Any, advice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ps.from_items([{"__key__": "a", "cls": 1}])
    rows.write_tar(tmp_path / "set") if read is ps.read_tar else rows.write_parquet(tmp_path / "set")
    first = next((tmp_path / "set").glob(f"*{Path(name).suffix}"))
    (tmp_path / "set" / name).write_bytes(first.read_bytes())
    ds = read(str(tmp_path / "set"))
    assert ds.count() == len(list(ds)) == 1
    assert len(caplog.messages) == 1
    assert f"left out, because the manifest does not list them: {name}; unless" in caplog.text
    assert advice.format(tmp_path / "set") in caplog.text
    caplog.clear()
    assert len(list(read(f"{tmp_path}/set/*{Path(name).suffix}"))) == 2
    assert caplog.messages == []


def test_files_that_a_manifest_does_not_list_are_current_only_if_they_belong_to_no_set() -> None:
    manifest = Manifest([entry("shard-000003.tar")], made={"": "abc", "val-%02d.tar": ""})
    names = ("shard-000003.tar", "shard-000000.tar", "shard-000004.tar.gz", "val-01.tar", "mine.tar", "train-01.tar")
    assert [name for name in names if manifest.is_current(name)] == ["shard-000003.tar", "mine.tar", "train-01.tar"]
