"""Samples are read by number, in any order, with any fields and compression, from shards of any tool."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import pickle
import subprocess
import tarfile
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from penstock.errors import DataError, StorageError
from penstock.formats.manifest import ShardEntry, write_manifest
from penstock.formats.tar import ArchiveLimits, LocatedTar, TarReader, TarWriter, scan
from penstock.formats.tar.index import INDEX_SUFFIX
from penstock.plan import EVERYTHING, Fields


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def rows(shard: int, count: int) -> list[dict[str, Any]]:
    """Return samples whose fields vary."""
    other = "png" if shard % 2 else "jpg"
    return [
        {
            "__key__": f"{shard}/{n}",
            "cls": b"%d" % n,
            ("jpg" if n % 3 else other): bytes([shard, n % 256]) * n,
        }
        for n in range(count)
    ]


def write(path: Path, samples: list[dict[str, Any]], index: bool = True) -> Path:
    with TarWriter(path) as writer:
        for sample in samples:
            writer.write(sample)
    if not index:
        Path(str(path) + INDEX_SUFFIX).unlink()
    return path


def reader_of(*paths: Path, **more: Any) -> TarReader:
    return TarReader(
        [f"url:{path.name}" for path in paths], [path.name for path in paths], [str(p) for p in paths], **more
    )


def read_all(path: Path) -> list[dict[str, Any]]:
    reader = TarReader([str(path)], [path.name], [str(path)])
    count = reader.count(0)
    found, errors = reader.locate(np.zeros(count, np.int64), np.arange(count), EVERYTHING).read()
    assert not errors
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in found if sample]


def test_samples_are_read_in_the_requested_order_across_shards(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.tar", rows(n, 50)) for n in range(5)]
    reader = reader_of(*paths)
    assert reader.counts(scan=False) is None
    counts = reader.counts(scan=True)
    assert counts is not None
    assert counts.tolist() == [50] * 5
    places = np.random.default_rng(0).permutation(250)
    found, errors = reader.locate(places // 50, places % 50, EVERYTHING).read()
    assert not errors
    everything = [
        {"__key__": row["__key__"], "__url__": f"url:{n}.tar", **row} for n in range(5) for row in rows(n, 50)
    ]
    assert found == [everything[place] for place in places]
    assert [list(row or {})[:2] for row in found] == [["__key__", "__url__"]] * 250


def test_some_of_the_located_samples_can_be_taken(tmp_path: Path) -> None:
    reader = reader_of(write(tmp_path / "a.tar", rows(0, 40)), write(tmp_path / "b.tar", rows(1, 40)))
    located = reader.locate(np.repeat([1, 0], 40), np.tile(np.arange(40), 2), EVERYTHING)
    whole, _ = located.read()
    assert located.take(slice(30, 50)).read()[0] == whole[30:50]
    assert located.take(np.array([70, 3, 41])).read()[0] == [whole[70], whole[3], whole[41]]
    assert located.take(slice(10, 60)).take(slice(5, 7)).read()[0] == whole[15:17]
    assert located.take(slice(0, 0)).read() == ([], {})
    payload = [sum(len(v) for k, v in (row or {}).items() if k[0] != "_") for row in whole]
    assert located.nbytes.tolist() == payload


@pytest.mark.parametrize("wanted", [("cls",), ("__key__",), ("__url__",), ("jpg", "__key__"), ("none",)])
def test_only_wanted_fields_are_read(wanted: tuple[str, ...], tmp_path: Path) -> None:
    reader = reader_of(write(tmp_path / "b.tar", rows(1, 10)))
    located = reader.locate(np.zeros(10, np.int64), np.arange(10), Fields(frozenset(wanted), meta=False))
    found, errors = located.read()
    assert not errors
    full = [{**row, "__url__": "url:b.tar"} for row in rows(1, 10)]
    assert found == [{name: row[name] for name in wanted if name in row} for row in full]


def test_samples_with_many_fields_are_read(tmp_path: Path) -> None:
    wide = [{"__key__": f"{n}", **{f"f{i:04d}": b"%d" % i for i in range(n)}} for n in range(1, 300, 37)]
    assert read_all(write(tmp_path / "wide.tar", wide)) == wide


def test_bad_samples_are_reported_by_position_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("a.jpg", "b.jpg", "../c.jpg", "d.jpg", "d.jpg", "e.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(name[:1].encode()))
    reader = reader_of(path)
    located = reader.locate(np.zeros(5, np.int64), np.array([4, 3, 0, 2, 1]), EVERYTHING)
    found, errors = located.read()
    assert [row and row["jpg"] for row in found] == [b"e", None, b"a", None, b"b"]
    assert {n: (error.key, error.shard) for n, error in errors.items()} == {
        1: ("d", "url:a.tar"),
        3: ("../c", "url:a.tar"),
    }
    only_bad, errors = located.take(np.array([3])).read()
    assert (only_bad, list(errors)) == ([None], [0])
    assert reader.key(0, 4) == "e"


def test_asking_beyond_a_shard_is_an_index_error(tmp_path: Path) -> None:
    reader = reader_of(write(tmp_path / "a.tar", rows(0, 3)))
    with pytest.raises(IndexError, match="sample 3 of 3"):
        reader.locate(np.array([0]), np.array([3]), EVERYTHING)
    with pytest.raises(IndexError):
        reader.locate(np.array([0]), np.array([-1]), EVERYTHING)
    with pytest.raises(IndexError):
        reader.key(0, 3)


def test_more_shards_can_be_read_than_stay_open(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.tar", rows(n % 256, 2)) for n in range(80)]
    reader = reader_of(*paths)
    all_located: list[LocatedTar] = [reader.locate(np.array([n]), np.array([1]), EVERYTHING) for n in range(80)]
    assert len(reader._open) == 32
    assert [located.read()[0][0]["__key__"] for located in all_located] == [f"{n}/1" for n in range(80)]  # type: ignore[index]


def test_counts_of_a_manifest_are_used_without_opening_a_shard(tmp_path: Path) -> None:
    write_manifest(tmp_path, [ShardEntry("no.tar", 7, 12345, "00")])
    reader = reader_of(tmp_path / "no.tar", counts=np.array([7]))
    assert reader.count(0) == 7
    assert reader.sizes() == [12345]
    with pytest.raises(StorageError, match=r"No such file.*url:no\.tar"):
        reader.locate(np.array([0]), np.array([0]), EVERYTHING)


def test_samples_that_the_manifest_counts_but_the_shard_lacks_are_bad(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", rows(0, 5), index=False)
    os.truncate(path, path.stat().st_size - 1024)  # without the end marker
    reader = reader_of(path, counts=np.array([8]))
    found, errors = reader.locate(np.zeros(8, np.int64), np.arange(8), EVERYTHING).read()
    assert list(errors) == [5, 6, 7]
    assert "the manifest says 8 samples, 5 were found" in str(errors[6])
    assert [row["__key__"] for row in found if row] == [f"0/{n}" for n in range(5)]


@pytest.mark.parametrize("count", [4, 8])
def test_a_whole_shard_with_another_count_than_in_the_manifest_is_an_error(count: int, tmp_path: Path) -> None:
    reader = reader_of(write(tmp_path / "a.tar", rows(0, 5)), counts=np.array([count]))
    with pytest.raises(DataError, match=f"written again: manifest.json says {count} samples, the shard holds 5"):
        reader.locate(np.array([0]), np.array([0]), EVERYTHING)


def test_a_shard_that_shrinks_while_it_is_open_is_an_error_instead_of_a_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", rows(0, 50))
    reader = reader_of(path)
    reader.locate(np.array([0]), np.array([49]), EVERYTHING)
    os.truncate(path, 512)
    with pytest.raises(StorageError, match="changed while it was being read"):
        reader.locate(np.array([0]), np.array([49]), EVERYTHING)


def test_a_reader_pickles_as_its_arguments(tmp_path: Path) -> None:
    reader = reader_of(write(tmp_path / "a.tar", rows(0, 5)))
    reader.locate(np.array([0]), np.array([0]), EVERYTHING)
    again: TarReader = pickle.loads(pickle.dumps(reader))
    assert again.names == ["a.tar"]
    assert again.count(0) == 5


def test_threads_share_a_reader(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.tar", rows(n, 30)) for n in range(8)]
    reader = reader_of(*paths)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for places in np.random.default_rng(seed).permutation(240).reshape(8, 30):
            found, _ = reader.locate(places // 30, places % 30, EVERYTHING).read()
            if [row and row["__key__"] for row in found] != [f"{p // 30}/{p % 30}" for p in places]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.tar.zst", "a.tar.bz2", "a.tar.xz"])
def test_compression_is_recognised_by_content_whatever_the_name(name: str, tmp_path: Path) -> None:
    written = write(tmp_path / name, rows(0, 20))
    for other in (name, "other.tar"):
        path = tmp_path / "copy" / other
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(written.read_bytes())
        assert read_all(path) == rows(0, 20)


def test_a_tar_whose_first_name_looks_like_a_magic_number_is_a_tar(tmp_path: Path) -> None:
    samples = [{"__key__": "BZh9", "txt": b"x"}]
    assert read_all(write(tmp_path / "a.tar", samples, index=False)) == samples


def test_several_compressed_streams_in_a_row_are_one_archive(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.tar", rows(0, 20)).read_bytes()
    half = len(whole) // 2
    packers: list[Any] = [gzip.compress, lzma.compress, zstandard.ZstdCompressor().compress]
    for number, pack in enumerate(packers):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(pack(whole[:half]) + pack(whole[half:]))
        assert read_all(path) == rows(0, 20)


def test_a_compressed_shard_is_not_decompressed_to_be_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.tar.gz", rows(0, 20), index=False)
    assert reader_of(path).count(0) == 20
    monkeypatch.setattr(scan, "open_archive", lambda *_: pytest.fail("decompressed again"))
    assert reader_of(path).count(0) == 20


def test_limits_hold_for_compressed_shards(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar.gz", rows(0, 20), index=False)
    reader = reader_of(path, limits=ArchiveLimits(max_bytes=4096))
    _, errors = reader.locate(np.array([0]), np.array([0]), EVERYTHING).read()
    assert "decompresses to more than 4096 bytes" in str(errors[0])


def test_an_xz_stream_that_needs_gigabytes_of_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.xz"
    compressed = subprocess.run(
        ["xz", "--lzma2=preset=0,dict=1GiB", "-T1", "-c"], input=b"x" * 1000, capture_output=True, check=True
    )
    path.write_bytes(compressed.stdout)
    _, errors = reader_of(path).locate(np.array([0]), np.array([0]), EVERYTHING).read()
    assert "xz stream is damaged" in str(errors[0])


def test_a_full_disk_while_decompressing_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tar.gz", rows(0, 20), index=False)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    class Full(io.BytesIO):
        write = full  # type: ignore[assignment]

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(StorageError, match="No space left on device"):
        reader_of(path).count(0)


@pytest.mark.parametrize("format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
@pytest.mark.parametrize("blocks", [1, 20, 300])
def test_shards_of_gnu_tar_are_read(format: str, blocks: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    expected: list[dict[str, Any]] = []
    long = "deep" * 12
    for key in ["a/0001", "a/0002", *([f"{long}/{'long' * 20}"] if format != "v7" else [])]:
        (source / key).parent.mkdir(parents=True, exist_ok=True)
        fields = {"cls": b"3", "jpg": key.encode() * 100, "seg.png": b""}
        for field, data in fields.items():
            (source / f"{key}.{field}").write_bytes(data)
        expected.append({"__key__": key, **fields})
    (source / "a/link.jpg").symlink_to("0001.jpg")
    (source / "README").write_text("read me")
    target = tmp_path / "a.tar"
    flags = ["--sort=name", f"--format={format}", f"--blocking-factor={blocks}"]
    subprocess.run(["tar", *flags, "-cf", target, "-C", source, "."], check=True)
    assert read_all(target) == expected


def test_shards_of_webdataset_are_read(tmp_path: Path) -> None:
    wds = import_module("webdataset")
    expected = rows(1, 20)
    with wds.ShardWriter(str(tmp_path / "w-%03d.tar"), maxcount=50, verbose=0, encoder=False) as sink:
        for row in expected:
            sink.write(row)
    assert read_all(tmp_path / "w-000.tar") == expected


def test_shards_of_tarproc_are_read(tmp_path: Path) -> None:
    writer = import_module("tarproclib.writer")
    sink = writer.TarWriter(str(tmp_path / "t.tar"))
    for row in rows(1, 20):
        sink.write(row)
    sink.close()
    assert read_all(tmp_path / "t.tar") == rows(1, 20)
