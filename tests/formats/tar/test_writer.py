"""Shards are deterministic, exact in size, whole or absent, and readable by other tools."""

from __future__ import annotations

import gc
import hashlib
import io
import os
import subprocess
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DataError, PlanError
from penstock.formats.manifest import ShardEntry, read_manifest
from penstock.formats.tar import Index, ShardWriter, TarWriter, iter_samples, load_index
from penstock.formats.tar.scan import scan
from penstock.plan import Fields
from penstock.storage import Memory, NotFound


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def rows(count: int, size: int = 700) -> list[dict[str, Any]]:
    return [{"__key__": f"a/{n:04d}", "jpg": os.urandom(size), "cls": b"%d" % n} for n in range(count)]


def write(target: Any, batch: list[dict[str, Any]], **options: Any) -> None:
    with TarWriter(target, **options) as writer:
        for row in batch:
            writer.write(row)


def read(data: bytes) -> list[dict[str, Any] | None]:
    found = list(iter_samples(io.BytesIO(data), "x", Fields(excluded=frozenset({"__url__"}))))
    assert all(error is None for _, error in found)
    return [row for row, _ in found]


def members_of(data: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return archive.getmembers()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_same_samples_are_written_as_the_same_bytes_whatever_the_order_of_fields(tmp_path: Path) -> None:
    expected = rows(5)
    reordered = [dict(reversed(row.items())) for row in expected]
    first, second = io.BytesIO(), io.BytesIO()
    write(first, expected)
    write(second, reordered)
    assert first.getvalue() == second.getvalue()
    members = members_of(first.getvalue())
    assert [member.name for member in members[:2]] == ["a/0000.cls", "a/0000.jpg"]
    assert {(m.mtime, m.mode, m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0o644, 0, 0, "", "")}
    assert first.getvalue()[257:265] == b"ustar\00000"
    assert first.getvalue().endswith(bytes(1024))
    assert len(first.getvalue()) == 5 * (512 + 1024 + 1024) + 1024


@pytest.mark.parametrize("compress", ["gz", "zst", "bz2", "xz"])
def test_compressed_shards_are_deterministic_and_read_back(compress: str, tmp_path: Path) -> None:
    expected = rows(30, 90)
    with (
        ShardWriter(tmp_path / "one", compress=compress) as first,
        ShardWriter(tmp_path / "two", compress=compress) as second,
    ):
        for row in expected:
            first.write(row)
            second.write(row)
    name = f"shard-000000.tar.{compress}"
    data = (tmp_path / "one" / name).read_bytes()
    assert data == (tmp_path / "two" / name).read_bytes()
    assert read(data) == expected
    entry = read_manifest(tmp_path / "one")
    assert entry is not None
    assert entry.shards[0].sha256 == hashlib.sha256(data).hexdigest()
    assert entry.shards[0].bytes == len(data)
    index = load_index(str(tmp_path / "one" / name))
    assert index.content_size == 30 * 4 * 512 + 1024


keys = st.text(st.characters(exclude_characters="./\0", exclude_categories=["Cs"]), min_size=1, max_size=60)
fields = st.from_regex(r"[a-z0-9_]{1,8}(\.[a-z0-9]{1,4})?", fullmatch=True).filter(
    lambda name: not name.startswith("__")
)


@given(
    st.dictionaries(
        st.lists(keys, min_size=1, max_size=5).map("/".join),
        st.dictionaries(fields, st.binary(max_size=1500), min_size=1, max_size=4),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_written_samples_are_read_by_us_and_by_tarfile(content_by_key: dict[str, dict[str, bytes]]) -> None:
    target = io.BytesIO()
    expected = [{"__key__": key, **dict(sorted(content.items()))} for key, content in content_by_key.items()]
    write(target, expected)
    assert read(target.getvalue()) == expected
    index = scan(target.getvalue())
    assert index.keys() == list(content_by_key)
    assert not index.bad
    with tarfile.open(fileobj=io.BytesIO(target.getvalue())) as archive:
        read_back = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert read_back == {
        f"{key}.{name}": data for key, content in content_by_key.items() for name, data in content.items()
    }


@pytest.mark.parametrize(
    ("key", "extended"),
    [
        ("k" * 96, False),
        ("k" * 97, True),
        (f"{'p' * 155}/{'k' * 96}", False),
        (f"{'p' * 156}/{'k' * 96}", True),
        ("\u00fc", True),
    ],
)
def test_a_pax_header_is_written_only_if_a_plain_one_does_not_suffice(key: str, extended: bool) -> None:
    target = io.BytesIO()
    write(target, [{"__key__": key, "jpg": b"x"}])
    assert (target.getvalue()[156:157] == b"x") is extended
    assert [member.name for member in members_of(target.getvalue())] == [f"{key}.jpg"]
    assert scan(target.getvalue()).keys() == [key]


def test_a_size_too_large_for_a_plain_header_goes_into_a_pax_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.formats.tar.archive._MAX_OCTAL_SIZE", 1000)
    target = io.BytesIO()
    write(target, [{"__key__": "a", "jpg": b"x" * 1000, "cls": b"1"}])
    assert read(target.getvalue()) == [{"__key__": "a", "cls": b"1", "jpg": b"x" * 1000}]
    assert [member.size for member in members_of(target.getvalue())] == [1, 1000]


def test_max_bytes_is_never_exceeded_and_shards_are_full(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    expected = [{"__key__": f"{n}", "jpg": bytes(int(rng.integers(0, 9000)))} for n in range(200)]
    with ShardWriter(tmp_path, max_bytes=40_000) as writer:
        for row in expected:
            writer.write(row)
    sizes = [entry.bytes for entry in writer.entries]
    assert max(sizes) <= 40_000
    for size, following in zip(sizes, writer.entries[1:], strict=False):
        first = load_index(str(tmp_path / following.name)).size[0]
        assert size + 512 + (first + 511) // 512 * 512 > 40_000
    whole = [row for entry in writer.entries for row in read((tmp_path / entry.name).read_bytes())]
    assert whole == expected


def test_a_shard_may_be_filled_to_the_last_byte(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, max_bytes=4 * 1024 + 1024) as writer:
        for n in range(8):
            writer.write({"__key__": f"{n}", "txt": b"x"})
    assert [(entry.samples, entry.bytes) for entry in writer.entries] == [(4, 5120), (4, 5120)]


def test_a_sample_larger_than_a_shard_gets_its_own_shard(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, max_bytes=4000) as writer:
        for n, size in enumerate([10, 9000, 10]):
            writer.write({"__key__": f"{n}", "txt": bytes(size)})
    assert [entry.samples for entry in writer.entries] == [1, 1, 1]


@pytest.mark.parametrize("compress", ["gz", "zst", "bz2", "xz"])
def test_compressed_shards_of_random_bytes_stay_within_max_bytes(compress: str, tmp_path: Path) -> None:
    with ShardWriter(tmp_path, max_bytes=100_000, compress=compress) as writer:
        for row in rows(60, 8191):
            writer.write(row)
    assert max(entry.bytes for entry in writer.entries) <= 100_000
    assert sum(entry.samples for entry in writer.entries) == 60


def test_max_samples_is_exact(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "train-%03d.tar", max_samples=4, start=7) as writer:
        for row in rows(10, 5):
            writer.write(row)
    assert [(entry.name, entry.samples) for entry in writer.entries] == [
        ("train-007.tar", 4),
        ("train-008.tar", 4),
        ("train-009.tar", 2),
    ]


def test_a_shard_gets_a_trusted_index_and_a_manifest_entry(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        for row in rows(10):
            writer.write(row)
    assert names(tmp_path) == ["manifest.json", "shard-000000.tar", "shard-000000.tar.index"]
    shard = tmp_path / "shard-000000.tar"
    index = load_index(str(shard))
    scanned = scan(shard.read_bytes())
    for name in ("kinds", "bad", "skipped", "content_size", "text"):
        assert getattr(index, name) == getattr(scanned, name)
    for name in ("kind", "first", "start", "size", "edges"):
        assert getattr(index, name).tolist() == getattr(scanned, name).tolist()
    assert not (tmp_path / "cache").exists()
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    entry = manifest.entry("shard-000000.tar")
    assert entry is not None
    assert (entry.samples, entry.bytes) == (10, shard.stat().st_size)
    assert entry.sha256 == hashlib.sha256(shard.read_bytes()).hexdigest()


def test_a_single_archive_takes_everything(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "all.tar", max_samples=2, max_bytes=2000) as writer:
        for row in rows(9):
            writer.write(row)
    assert [(entry.name, entry.samples) for entry in writer.entries] == [("all.tar", 9)]


def test_a_shard_appears_when_it_is_complete_and_not_after_an_error(tmp_path: Path) -> None:
    def run() -> None:
        with ShardWriter(tmp_path, max_samples=3) as writer:
            for row in rows(5):
                writer.write(row)
            visible = [name for name in names(tmp_path) if not name.startswith(".")]
            assert visible == ["shard-000000.tar", "shard-000000.tar.index"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert names(tmp_path) == ["shard-000000.tar", "shard-000000.tar.index"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a.tar", rows(3))
    assert names(tmp_path) == []


def test_replacing_a_shard_replaces_its_index_and_its_entry(tmp_path: Path) -> None:
    for count in (5, 3):
        with ShardWriter(tmp_path) as writer:
            for row in rows(count):
                writer.write(row)
    index = load_index(str(tmp_path / "shard-000000.tar"))
    assert (index.samples, index.bad) == (3, {})
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert [entry.samples for entry in manifest.shards] == [3]


@pytest.mark.parametrize("key", ["", "a.b", "d/a.b", "/a", "../a", "a/../b", "a/", "a\0b", "./a", ".a", 7])
def test_a_key_that_would_be_read_back_differently_is_refused_and_named(key: Any) -> None:
    target = io.BytesIO()
    with TarWriter(target) as writer:
        writer.write({"__key__": "good", "jpg": b"1"})
        with pytest.raises(DataError) as caught:
            writer.write({"__key__": key, "jpg": b"1"})
        writer.write({"__key__": "good2", "jpg": b"1"})
    assert caught.value.key is not None
    assert [row and row["__key__"] for row in read(target.getvalue())] == ["good", "good2"]


@pytest.mark.parametrize("field", ["", "a/b", "JPG", ".jpg", "a\0"])
def test_a_field_that_would_be_read_back_differently_is_refused(field: str) -> None:
    with pytest.raises(DataError, match=r"cannot be a field name.*key: k"):
        write(io.BytesIO(), [{"__key__": "k", field: b""}])


def test_values_are_stored_by_their_extension_and_bytes_as_they_are() -> None:
    target = io.BytesIO()
    write(target, [{"__key__": "k", "txt": "text", "cls": 3, "json": {"a": 1}, "bin": bytearray(b"b")}])
    with tarfile.open(fileobj=io.BytesIO(target.getvalue())) as tar:
        stored = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert stored == {"k.bin": b"b", "k.cls": b"3", "k.json": b'{"a":1}', "k.txt": b"text"}


@pytest.mark.parametrize("value", [3, None, [b"x"]])
def test_values_that_their_extension_cannot_store_are_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"'txt' .*expected text.*key: k"):
        write(io.BytesIO(), [{"__key__": "k", "txt": value}])


def test_an_encoder_must_return_bytes() -> None:
    with pytest.raises(DataError, match=r"'txt' must be bytes, not str.*key: k"):
        TarWriter(io.BytesIO(), encode=lambda _, value: value).write({"__key__": "k", "txt": "text"})


def test_a_sample_without_a_key_is_refused() -> None:
    with pytest.raises(DataError, match="no '__key__'"):
        TarWriter(io.BytesIO()).write({"txt": b""})


def test_a_key_twice_in_one_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"written before.*key: k"):
        write(tmp_path / "a.tar", [{"__key__": "k", "txt": b""}] * 2)
    assert names(tmp_path) == []


def test_a_sample_without_fields_is_refused() -> None:
    with pytest.raises(DataError, match="without fields"):
        write(io.BytesIO(), [{"__key__": "k", "__url__": "x"}])


def test_buffers_are_copied_when_they_are_given() -> None:
    target = io.BytesIO()
    buffer = bytearray(b"one")
    with TarWriter(target) as writer:
        writer.write({"__key__": "a", "x": buffer, "y": memoryview(buffer)})
        buffer[:] = b"two"
    assert read(target.getvalue()) == [{"__key__": "a", "x": b"one", "y": b"one"}]


def test_values_are_encoded_by_the_function_given(tmp_path: Path) -> None:
    target = io.BytesIO()
    write(target, [{"__key__": "a", "n": 7}], encode=lambda field, value: f"{field}={value}".encode())
    assert read(target.getvalue()) == [{"__key__": "a", "n": b"n=7"}]


@pytest.mark.parametrize(
    "bad",
    [{"max_bytes": 0}, {"max_samples": 0}, {"compress": "rar"}],
    ids=["bytes", "samples", "compression"],
)
def test_invalid_arguments_are_plan_errors(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PlanError):
        ShardWriter(tmp_path, **bad)


@pytest.mark.parametrize("pattern", ["a-%s-%s.tar", "100%.tar", "a-%%.tar"])
def test_a_pattern_without_one_number_is_a_plan_error(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is not a pattern"):
        ShardWriter(tmp_path / pattern)


def test_an_empty_archive_is_read_as_no_samples(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [])
    index = load_index(str(tmp_path / "a.tar"))
    assert (index.samples, index.bad) == (0, {})
    assert scan((tmp_path / "a.tar").read_bytes()).samples == 0


def test_gnu_tar_reads_our_shards(tmp_path: Path) -> None:
    expected = [*rows(3), {"__key__": "\u00fc" * 90, "txt": b"long"}]
    write(tmp_path / "a.tar", expected)
    (tmp_path / "out").mkdir()
    done = subprocess.run(["tar", "-xf", tmp_path / "a.tar", "-C", tmp_path / "out"], check=True, capture_output=True)
    assert not done.stderr
    for row in expected:
        for field in set(row) - {"__key__"}:
            assert (tmp_path / "out" / f"{row['__key__']}.{field}").read_bytes() == row[field]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its files open
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_reads_our_shards(tmp_path: Path) -> None:
    wds = import_module("webdataset")
    expected = rows(7)
    write(tmp_path / "a.tar", expected)
    read_back = [
        {name: value for name, value in row.items() if name not in ("__url__", "__local_path__")}
        for row in wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    ]
    gc.collect()
    assert read_back == expected


def test_tarproc_reads_our_shards(tmp_path: Path) -> None:
    reader = import_module("tarproclib.reader")
    expected = rows(7)
    write(tmp_path / "a.tar", expected)
    with open(tmp_path / "a.tar", "rb") as file:
        read_back = [{k: row[k] for k in ("__key__", "cls", "jpg")} for row in reader.tariterator(file)]
    assert read_back == expected


def test_a_smaller_set_removes_the_remaining_shards_of_a_larger_one(tmp_path: Path) -> None:
    (tmp_path / "shard-000007.tar").write_bytes(b"not ours")
    for count in (40, 20):
        with ShardWriter(tmp_path, max_samples=10) as writer:
            for number in range(count):
                writer.write({"__key__": f"{count}-{number:02d}", "txt": b"x"})
    names = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".tar")
    assert names == ["shard-000000.tar", "shard-000001.tar", "shard-000007.tar"]
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert [shard.name for shard in manifest.shards] == names[:2]


def test_a_remote_archive_appears_when_it_is_closed_or_never(tmp_path: Path) -> None:
    expected, url = rows(5), "memory://writer/a.tar"
    with pytest.raises(DataError), TarWriter(url) as writer:
        writer.write({"__key__": "a", "jpg": "no bytes"})
    with pytest.raises(NotFound):
        Memory().info(url)
    write(url, expected)
    write(tmp_path / "a.tar", expected)
    data = b"".join(Memory().stream(url))
    assert data == (tmp_path / "a.tar").read_bytes()
    index = Index.from_bytes(b"".join(Memory().stream(url + ".index")))
    assert (index.samples, index.shard_size, len(index.checksums)) == (5, len(data), 1)


@pytest.mark.parametrize("background", [False, True])
def test_published_is_called_for_every_shard_in_order_with_its_note(background: bool, tmp_path: Path) -> None:
    calls: list[tuple[str, int, bool]] = []

    def published(entry: ShardEntry, note: Any) -> None:
        calls.append((entry.name, note, (tmp_path / entry.name).exists()))

    with ShardWriter(tmp_path, max_samples=2, background=background, published=published) as writer:
        for number, row in enumerate(rows(7)):
            writer.write(row, lambda number=number: number)  # type: ignore[misc]
        writer.close(lambda: 7)
    assert calls == [(f"shard-{n:06d}.tar", at, True) for n, at in enumerate([2, 4, 6, 7])]


def test_a_failure_in_the_background_is_raised_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    def run() -> None:
        with ShardWriter(tmp_path, max_samples=2, background=True) as writer:
            for row in rows(400):
                writer.write(row)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run()
    assert names(tmp_path) == []


def test_shards_written_in_the_background_are_the_same(tmp_path: Path) -> None:
    expected = rows(50)
    for name, background in (("a", False), ("b", True)):
        with ShardWriter(tmp_path / name, max_samples=7, background=background) as writer:
            for row in expected:
                writer.write(row)
    for name in names(tmp_path / "a"):
        if not name.endswith(".index"):
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
