"""``write_tar`` writes the samples of a dataset to tar shards, local or remote."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError
from penstock.storage import open_storage
from penstock.testing import numbers


def _samples(count: int) -> list[dict[str, Any]]:
    return [{"__key__": f"k{i:03d}", "cls": i, "txt": f"text {i}"} for i in range(count)]


def _shards(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".tar"))


def test_written_shards_are_read_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed = ps.from_items(_samples(25)).write_tar(str(out), max_samples=10)
    assert packed.shards == ("shard-000000.tar", "shard-000001.tar", "shard-000002.tar")
    assert (packed.folder, packed.samples) == (str(out), 25)
    assert packed.nbytes == sum((out / name).stat().st_size for name in packed.shards)
    ds = ps.read_tar(str(out))
    assert len(ds) == 25
    assert [(s["__key__"], s["cls"], s["txt"]) for s in ds.decode()] == [
        (s["__key__"], s["cls"], s["txt"]) for s in _samples(25)
    ]


def test_values_are_encoded_by_extension(tmp_path: Path) -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    sample = {"__key__": "a", "png": image, "npy": np.arange(3), "json": {"a": [1]}, "bin": b"\x00", "cls": 3}
    ps.from_items([sample]).write_tar(str(tmp_path / "out"))
    restored = ps.read_tar(str(tmp_path / "out")).decode().first()
    assert np.array_equal(restored["png"], image)
    assert np.array_equal(restored["npy"], np.arange(3))
    assert (restored["json"], restored["bin"], restored["cls"]) == ({"a": [1]}, b"\x00", 3)


def test_samples_without_a_key_get_their_number(tmp_path: Path) -> None:
    ps.from_items([{"cls": i} for i in range(3)]).write_tar(str(tmp_path / "out"))
    assert [s["__key__"] for s in ps.read_tar(str(tmp_path / "out"))] == ["000000000", "000000001", "000000002"]


def test_a_shard_is_bounded_in_bytes(tmp_path: Path) -> None:
    packed = ps.from_items([{"bin": bytes(3000)} for _ in range(10)]).write_tar(str(tmp_path / "out"), max_bytes="12KB")
    assert len(packed.shards) > 2
    assert all((tmp_path / "out" / name).stat().st_size <= 12_000 for name in packed.shards)


def test_the_target_may_be_a_pattern_or_one_file(tmp_path: Path) -> None:
    ds = ps.from_items(_samples(5))
    ds.write_tar(str(tmp_path / "p" / "train-%04d.tar"), max_samples=3)
    assert _shards(tmp_path / "p") == ["train-0000.tar", "train-0001.tar"]
    ds.write_tar(f"file:{tmp_path}/one/all.tar", max_samples=3)
    assert _shards(tmp_path / "one") == ["all.tar"]
    assert len(ps.read_tar(str(tmp_path / "one"))) == 5


@pytest.mark.parametrize("compress", ["gz", "zst", "bz2", "xz"])
def test_shards_may_be_compressed(tmp_path: Path, compress: Any) -> None:
    packed = ps.from_items(_samples(5)).write_tar(str(tmp_path / "out"), compress=compress)
    assert packed.shards == (f"shard-000000.tar.{compress}",)
    assert [s["cls"] for s in ps.read_tar(str(tmp_path / "out")).decode()] == list(range(5))


def test_the_order_is_that_of_the_next_epoch(tmp_path: Path) -> None:
    ds = ps.from_items(_samples(50)).shuffle()
    list(ds)
    ds.map(dict, workers=3).on("local", ordered=False).epoch(1).write_tar(str(tmp_path / "a"))
    ds.write_tar(str(tmp_path / "b"))
    want = [s["__key__"] for s in ds.epoch(1)]
    for name in ("a", "b"):
        assert [s["__key__"] for s in ps.read_tar(str(tmp_path / name))] == want


def test_a_rank_writes_its_share(tmp_path: Path) -> None:
    packed = ps.from_items(_samples(10)).shard(1, 3).write_tar(str(tmp_path / "out"))
    assert packed.samples == 3


def test_a_dataset_without_samples_gives_one_empty_shard(tmp_path: Path) -> None:
    packed = ps.from_items([]).write_tar(str(tmp_path / "out"))
    assert (packed.samples, packed.shards) == (0, ("shard-000000.tar",))
    assert ps.read_tar(str(tmp_path / "out")).take_all() == []


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ({"__key__": "k", "thing": 3}, "'thing'.*rename"),
        ({"__key__": "k", "cls": "three"}, "encode: field 'cls'"),
        ({"__key__": "k", "pkl": {1}}, "trust_pickle"),
        ({"__key__": "a.b", "cls": 1}, "dot"),
        ({"__key__": 7, "cls": 1}, "key must be text"),
        ({"__key__": "k"}, "without fields"),
        ({"__key__": "k", "CLS": b""}, "lower case"),
        ((1, 2), "samples with fields, not tuple"),
    ],
    ids=str,
)
def test_an_error_names_a_sample_that_cannot_be_stored_and_no_shard_is_left(
    tmp_path: Path, sample: Any, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        ps.from_items([{"__key__": "first", "cls": 1}, sample]).write_tar(str(tmp_path / "out"))
    assert _shards(tmp_path / "out") == []


def test_a_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="written before") as caught:
        ps.from_items(_samples(3)).repeat(2).write_tar(str(tmp_path / "out"))
    assert caught.value.key == "k000"


def test_trusted_pickle_is_written(tmp_path: Path) -> None:
    ps.from_items([{"pkl": {1}}]).write_tar(str(tmp_path / "out"), trust_pickle=True)
    assert ps.read_tar(str(tmp_path / "out")).decode(trust_pickle=True).first()["pkl"] == {1}


def test_failing_samples_may_be_skipped(tmp_path: Path) -> None:
    ds = numbers((10,), bad=(3,)).map(lambda s: {"cls": s["x"]}).on_error("skip")
    assert ds.write_tar(str(tmp_path / "out")).samples == 9


def test_a_dataset_is_not_written_to_the_folder_that_it_reads(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    ps.from_items(_samples(3)).write_tar(out)
    before = (tmp_path / "out" / "shard-000000.tar").read_bytes()
    os.symlink(out, tmp_path / "alias")
    for target in (out, f"{out}/other-%d.tar", str(tmp_path / "alias")):
        with pytest.raises(PlanError, match="choose another folder"):
            ps.read_tar(out).shuffle().write_tar(target)
    assert (tmp_path / "out" / "shard-000000.tar").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write") as caught:
        ps.from_items(_samples(3)).write_tar(str(tmp_path / "file" / "out"))
    assert caught.value.url == str(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    "given", [{"max_bytes": 0}, {"max_bytes": "many"}, {"max_samples": 0}, {"compress": "rar"}], ids=str
)
def test_a_wrong_argument_is_refused_before_anything_is_written(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        ps.from_items(_samples(3)).write_tar(str(tmp_path / "out"), **given)
    assert not (tmp_path / "out").exists()


def test_progress_is_shown_on_request_and_only_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ps.from_items(_samples(5)).write_tar(str(tmp_path / "quiet"), progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    ps.from_items(_samples(5)).write_tar(str(tmp_path / "a"))
    assert capsys.readouterr().err == ""
    ps.from_items(_samples(5)).write_tar(str(tmp_path / "b"), progress=True)
    assert "writing" in (shown := capsys.readouterr().err)
    assert "5/5 samples" in shown
    ps.from_items(_samples(5)).filter(bool).write_tar(str(tmp_path / "c"), progress=True)
    assert "writing: 5 samples" in capsys.readouterr().err


def test_remote_shards_have_the_bytes_of_local_ones(tmp_path: Path) -> None:
    ds = ps.from_items(_samples(25))
    local = ds.write_tar(str(tmp_path / "out"), max_samples=10)
    remote = ds.write_tar("memory://written/out", max_samples=10)
    assert (remote.folder, remote.shards, remote.nbytes) == ("memory://written/out", local.shards, local.nbytes)
    memory = open_storage("memory://written/out")
    for name in (*local.shards, "manifest.json"):
        assert b"".join(memory.stream(f"memory://written/out/{name}")) == (tmp_path / "out" / name).read_bytes()
    assert [s["cls"] for s in ps.read_tar("memory://written/out").decode()] == list(range(25))


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_smaller_set_replaces_a_larger_one(where: str, tmp_path: Path) -> None:
    url = str(tmp_path) if where == "disk" else "memory://smaller/out"
    ps.from_items(_samples(40)).write_tar(url, max_samples=10)
    packed = ps.from_items(_samples(20)).write_tar(url, max_samples=10, mode="replace")
    assert packed.shards == ("shard-000004.tar", "shard-000005.tar")
    names = sorted(one.url.rpartition("/")[2] for one in open_storage(url).list(url))
    assert names == ["manifest.json", *sorted(name + end for name in packed.shards for end in ("", ".index"))]
    assert len(ps.read_tar(url)) == 20


def test_a_dataset_is_not_written_to_the_remote_folder_that_it_reads() -> None:
    ps.from_items(_samples(3)).write_tar("memory://same/out")
    with pytest.raises(PlanError, match="choose another folder"):
        ps.read_tar("memory://same/out").write_tar("memory://same/out")


def test_a_name_of_another_compression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'two\.tar\.gz' is the name of another compression than compress='zst'"):
        ps.from_items(_samples(1)).write_tar(tmp_path / "two.tar.gz", compress="zst")
