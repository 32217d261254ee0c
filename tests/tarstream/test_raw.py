"""Samples are found in archives of any kind, and copied with their headers or with new ones."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import BinaryIO, cast

import pytest

import penstock as ps
from penstock.errors import DataError, StorageError
from penstock.formats.tar.grouper import Grouper
from penstock.tarstream.gather import gather_samples
from penstock.tarstream.raw import RawReader, RawSample, open_raw
from penstock.tarstream.stream_writer import DescriptorStreamWriter, open_stream_writer

MakeArchive = Callable[..., str]

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
LONG = "a" * 120 + "/" + "b" * 180
HOSTILE = ["plain", "with space", "new\nline", "qu'o\"te", "ünïcode/键", LONG]


def copy(path: str, out: Path, mapped: bool) -> None:
    with open(out, "wb") as file, DescriptorStreamWriter(file.fileno()) as writer:
        for raw in gather_samples([path], mapped=mapped):
            writer.write_encoded(raw.encode())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mapped", [False, True])
def test_members_are_copied_with_their_headers(
    format: str, mapped: bool, make_archive: MakeArchive, tmp_path: Path
) -> None:
    keys = HOSTILE if format == "pax" else ["plain", "with space", "c" * 90]
    path = make_archive("in.tar", keys, FORMATS[format])
    copy(path, tmp_path / "out.tar", mapped)
    with tarfile.open(path) as before, tarfile.open(tmp_path / "out.tar") as after:
        want = [m for m in before.getmembers() if "." in m.name]
        got = after.getmembers()
    assert [(m.name, m.size, m.mtime, m.mode) for m in got] == [(m.name, m.size, m.mtime, m.mode) for m in want]
    assert [s["__key__"] for s in ps.read_tar(str(tmp_path / "out.tar"))] == keys


@pytest.mark.parametrize("compress", [None, "gz", "zst"])
@pytest.mark.parametrize("step", [100, 70_000])
def test_a_slow_pipe_yields_all_samples(compress: str | None, step: int) -> None:
    class Trickle(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return source.read(min(step, size) if size >= 0 else step)

    target = io.BytesIO()
    rows = [{"__key__": f"k{n}", "cls": b"%d" % n, "jpg": bytes([n]) * 3000 * n} for n in range(20)]
    with ps.TarWriter(target, compress=compress) as writer:
        for row in rows:
            writer.write(row)
    source = io.BytesIO(target.getvalue())
    found = list(RawReader.of_stream("-", cast(BinaryIO, Trickle())))
    assert [raw.sample() for raw in found if isinstance(raw, RawSample)] == [{**row, "__url__": "-"} for row in rows]


def test_a_member_larger_than_a_chunk_is_whole(tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    with ps.TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "bin": data, "txt": b"x"})
        writer.write({"__key__": "b", "bin": b"", "txt": b"y"})
    for mapped in (False, True):
        first, second = gather_samples([str(tmp_path / "a.tar")], mapped=mapped)
        assert (first.value("bin"), first.value("none"), second.fields()) == (data, None, {"bin": b"", "txt": b"y"})


def test_a_global_record_becomes_part_of_each_header(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", pax_headers={"path": "other.txt"}) as tar:
        member = tarfile.TarInfo("a.txt")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    copy(str(tmp_path / "a.tar"), tmp_path / "b.tar", mapped=True)
    assert [s["__key__"] for s in ps.read_tar(str(tmp_path / "b.tar"))] == [
        s["__key__"] for s in ps.read_tar(str(tmp_path / "a.tar"))
    ]


def test_a_sample_can_be_encoded_with_another_key_and_fewer_fields(make_archive: MakeArchive, tmp_path: Path) -> None:
    (raw,) = gather_samples([make_archive("a.tar", ["one"])])
    out = tmp_path / "b.tar"
    with open_stream_writer(str(out)) as writer:
        writer.write_encoded(raw.reencode("two", ["jpg"]))
    (sample,) = ps.read_tar(str(out)).take_all()
    assert sample == {"__key__": "two", "__url__": str(out), "jpg": bytes(700)}


def test_memory_does_not_grow_with_a_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with ps.TarWriter(path) as writer:
        for number in range(1500):
            writer.write({"__key__": f"{number}", "bin": bytes(200_000)})
    seen = 0
    for raw in open_raw(str(path), mapped=True):
        assert isinstance(raw, RawSample)
        seen += len(raw.value("bin") or b"")
    assert seen == 1500 * 200_000
    mapped = _resident(path)
    assert mapped is None or mapped < 150_000


def _resident(path: Path) -> int | None:
    """Return the kilobytes of a mapped file that are in memory; None if it is no longer mapped."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next((number for number, line in enumerate(lines) if line.endswith(str(path))), None)
    return None if at is None else int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1])


def test_the_source_that_tarproc_notes_is_not_a_field(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("k1.__source__", "k1.cls", "k2.__source__", "k2.cls"):
            tar.addfile(tarfile.TarInfo(name))
    (tmp_path / "a.tar.gz").write_bytes(
        subprocess.run(["gzip", "-c", tmp_path / "a.tar"], stdout=subprocess.PIPE, check=True).stdout
    )
    for name in ("a.tar", "a.tar.gz"):
        assert [raw.field_names for raw in gather_samples([str(tmp_path / name)])] == [("cls",), ("cls",)]
        assert len(ps.read_tar(str(tmp_path / name)).take_all()) == 2


def _write_odd_archive(random: Random, path: Path) -> None:
    """Write mostly similar samples with odd ones in between, and sometimes damage."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        prefix = random.choice(["", "", "./", "deep/er/"])
        for number in range(80):
            odd = random.random() < 0.06
            kind = random.choice([["a"], ["jpg", "cls"], ["CLS", "jpg"], ["\xff"]]) if odd else ["cls", "jpg"]
            key = random.choice(["k3", "x.y/k", "../out", ".hidden", "a b"]) if odd else f"k{number}"
            for field in kind:
                member = tarfile.TarInfo(f"{prefix}{key}.{field}")
                member.size = random.choice([0, 1, 512, 700])
                member.type = tarfile.DIRTYPE if random.random() < 0.01 else tarfile.REGTYPE
                tar.addfile(member, io.BytesIO(random.randbytes(member.size)))
    if random.random() < 0.3:
        data = bytearray(path.read_bytes())
        data[random.randrange(len(data))] ^= 0x41
        path.write_bytes(data[: random.randrange(len(data))] if random.random() < 0.3 else data)


def _content(path: Path, mapped: bool) -> list[object]:
    """Return keys and fields of samples, and messages of losses."""
    with closing(open_raw(str(path), mapped=mapped)) as reader:
        return [str(item) if isinstance(item, DataError) else (item.key, item.fields()) for item in reader]


@pytest.mark.parametrize("seed", range(400 if os.environ.get("PENSTOCK_FULL") else 25))
def test_samples_grouped_in_runs_equal_those_grouped_one_by_one(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_odd_archive(Random(seed), tmp_path / "a.tar")
    in_runs = [_content(tmp_path / "a.tar", mapped) for mapped in (False, True)]
    monkeypatch.setattr(Grouper, "push_run", lambda *_: None)
    one_by_one = _content(tmp_path / "a.tar", True)
    assert one_by_one
    assert in_runs == [one_by_one, one_by_one]


def test_the_first_sample_is_yielded_before_many_headers_are_read(make_archive: MakeArchive) -> None:
    path = make_archive("a.tar", [f"k{n:03}" for n in range(500)], tarfile.GNU_FORMAT)
    with closing(open_raw(path, mapped=True)) as reader:
        next(iter(reader))
        assert reader._buffer.offset < 60_000


def test_a_detached_sample_has_the_same_fields(make_archive: MakeArchive) -> None:
    raw = next(gather_samples([make_archive("a.tar", ["a", "b"])]))
    detached = raw.detached()
    assert (detached.key, detached.fields()) == (raw.key, raw.fields())
    assert b"".join(detached.encode().pieces) == b"".join(raw.encode().pieces)


def test_a_missing_archive_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"No such file.*none\.tar"):
        open_raw(str(tmp_path / "none.tar"))
