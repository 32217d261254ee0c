"""Samples are found where they lie, from anything that can be read, and copied byte for byte."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, cast

import pytest

import penstock as ps
from penstock.errors import DataError
from penstock.formats.tar.grouper import Grouper
from penstock.tarstream.gather import find_shards, gather, stretches
from penstock.tarstream.raw import RawReader, RawSample, open_raw
from penstock.tarstream.select import Selection
from penstock.tarstream.stream_writer import StreamWriter, open_outlet

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
LONG = "a" * 120 + "/" + "b" * 180
HOSTILE = ["plain", "with space", "new\nline", "qu'o\"te", "ünïcode/键", LONG]


def archive(path: Path, keys: list[str], format: int = tarfile.PAX_FORMAT, size: int = 700) -> None:
    with tarfile.open(path, "w", format=format) as tar:
        tar.addfile(tarfile.TarInfo("README"))
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for number, key in enumerate(keys):
            for field, data in (("cls", b"%d" % number), ("jpg", bytes([number % 256]) * (size + number))):
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size, member.mtime, member.mode = len(data), 1e9 + 0.5, 0o440
                tar.addfile(member, io.BytesIO(data))


def copied(path: Path, out: Path, mapped: bool) -> None:
    with open(out, "wb") as file, StreamWriter(file.fileno()) as writer:
        for raw in gather([str(path)], mapped=mapped):
            writer.write_parts(raw.parts())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mapped", [False, True])
def test_members_are_copied_with_all_their_headers_say(format: str, mapped: bool, tmp_path: Path) -> None:
    keys = HOSTILE if format == "pax" else ["plain", "with space", "c" * 90]
    archive(tmp_path / "in.tar", keys, FORMATS[format])
    copied(tmp_path / "in.tar", tmp_path / "out.tar", mapped)
    with tarfile.open(tmp_path / "in.tar") as before, tarfile.open(tmp_path / "out.tar") as after:
        wanted = [m for m in before.getmembers() if "." in m.name]
        got = after.getmembers()
    assert [(m.name, m.size, m.mtime, m.mode) for m in got] == [(m.name, m.size, m.mtime, m.mode) for m in wanted]
    assert [s["__key__"] for s in ps.read_tar(str(tmp_path / "out.tar"))] == keys


@pytest.mark.parametrize("compress", [None, "gz", "zst"])
@pytest.mark.parametrize("step", [100, 70_000])
def test_a_trickling_pipe_gives_all_samples(compress: str | None, step: int) -> None:
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
        first, second = gather([str(tmp_path / "a.tar")], mapped=mapped)
        assert (first.value("bin"), first.value("none"), second.fields()) == (data, None, {"bin": b"", "txt": b"y"})


def test_records_for_all_members_are_worked_into_headers(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", pax_headers={"path": "other.txt"}) as tar:
        member = tarfile.TarInfo("a.txt")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    copied(tmp_path / "a.tar", tmp_path / "b.tar", mapped=True)
    assert [s["__key__"] for s in ps.read_tar(str(tmp_path / "b.tar"))] == [
        s["__key__"] for s in ps.read_tar(str(tmp_path / "a.tar"))
    ]


def test_other_keys_and_fewer_fields_keep_the_bytes_of_the_others(tmp_path: Path) -> None:
    archive(tmp_path / "a.tar", ["one"])
    (raw,) = gather([str(tmp_path / "a.tar")])
    out = tmp_path / "b.tar"
    with open_outlet(str(out)) as writer:
        writer.write_parts(raw.changed("two", ["jpg"]))
    (sample,) = ps.read_tar(str(out)).take_all()
    assert sample == {"__key__": "two", "__url__": str(out), "jpg": bytes(700 + 0)}


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
    """Kilobytes of a file that are mapped into this process; None where it is not mapped any more."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next((number for number, line in enumerate(lines) if line.endswith(str(path))), None)
    return None if at is None else int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1])


def test_several_archives_at_a_time_give_every_sample_once(tmp_path: Path) -> None:
    for shard in range(5):
        archive(tmp_path / f"s{shard}.tar", [f"{shard}-{number}" for number in range(40)], size=60_000)
    urls = find_shards([str(tmp_path / "s{0..4}.tar")])
    want = [raw.key for raw in gather(urls)]
    assert sorted(raw.key for raw in gather(urls, workers=3)) == sorted(want)
    some = gather(urls, workers=3)
    assert next(some).key in want
    some.close()  # type: ignore[attr-defined]


def test_what_cannot_be_read_is_raised_from_any_worker(tmp_path: Path) -> None:
    archive(tmp_path / "good.tar", ["a"])
    (tmp_path / "bad.tar").write_bytes(b"junk" * 1000)
    urls = [str(tmp_path / "good.tar"), str(tmp_path / "bad.tar")]
    with pytest.raises(ps.errors.DataError, match=r"no tar archive.*bad\.tar"):
        list(gather(urls, workers=2))
    told: list[Any] = []
    assert [raw.key for raw in gather(urls, bad=told.append)] == ["a"]
    assert len(told) == 1


def test_a_shard_with_the_source_that_others_note_is_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("k1.__source__", "k1.cls", "k2.__source__", "k2.cls"):
            tar.addfile(tarfile.TarInfo(name))
    (tmp_path / "a.tar.gz").write_bytes(
        subprocess.run(["gzip", "-c", tmp_path / "a.tar"], stdout=subprocess.PIPE, check=True).stdout
    )
    for name in ("a.tar", "a.tar.gz"):
        assert [raw.kind for raw in gather([str(tmp_path / name)])] == [("cls",), ("cls",)]
        assert len(ps.read_tar(str(tmp_path / name)).take_all()) == 2


def _mixed(random: Random, path: Path) -> None:
    """An archive of samples alike, with all that may lie between them, and sometimes a damage."""
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


def _told(path: Path, mapped: bool) -> list[object]:
    with closing(open_raw(str(path), mapped=mapped)) as reader:
        return [str(item) if isinstance(item, DataError) else (item.key, item.fields()) for item in reader]


@pytest.mark.parametrize("seed", range(400 if os.environ.get("PENSTOCK_FULL") else 25))
def test_samples_taken_together_are_those_taken_one_by_one(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mixed(Random(seed), tmp_path / "a.tar")
    together = [_told(tmp_path / "a.tar", mapped) for mapped in (False, True)]
    monkeypatch.setattr(Grouper, "run", lambda *_: None)
    alone = _told(tmp_path / "a.tar", True)
    assert alone
    assert together == [alone, alone]


@pytest.mark.parametrize("mapped", [False, True])
def test_samples_alike_are_copied_in_few_pieces(mapped: bool, tmp_path: Path) -> None:
    archive(tmp_path / "a.tar", [f"k{n:04}" for n in range(2000)], tarfile.GNU_FORMAT, size=30)
    parts = list(Selection().copies(stretches([str(tmp_path / "a.tar")], mapped=mapped)))
    assert [key for some in parts for key in some.keys] == [f"k{n:04}" for n in range(2000)]
    assert len(parts) < 100


def test_a_slice_of_what_lies_together_is_that_slice(tmp_path: Path) -> None:
    keys = [f"k{n:03}" for n in range(200)]
    archive(tmp_path / "a.tar", keys, tarfile.GNU_FORMAT)
    random = Random(5)
    for _ in range(30):
        start, stop = random.randrange(220), random.choice([None, random.randrange(220)])
        chosen = Selection(start=start, stop=stop)
        parts = chosen.copies(stretches([str(tmp_path / "a.tar")], mapped=True))
        assert [key for some in parts for key in some.keys] == keys[start:stop]


def test_few_samples_are_given_before_much_is_looked_at(tmp_path: Path) -> None:
    archive(tmp_path / "a.tar", [f"k{n:03}" for n in range(500)], tarfile.GNU_FORMAT)
    with closing(open_raw(str(tmp_path / "a.tar"), mapped=True)) as reader:
        next(iter(reader))
        assert reader._buffer.offset < 60_000
