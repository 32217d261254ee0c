"""Samples are sorted by key or field, in memory or through spilled runs, from files and from pipes."""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError
from penstock.plan.expression_text import TextExpression
from penstock.tarstream import sort
from penstock.tarstream.gather import gather_parts, gather_samples
from penstock.tarstream.select import Selection
from penstock.tarstream.sort import SortOrder, sort_samples

MakeArchive = Callable[..., str]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Thirty samples whose ``num`` repeats, with the keys in another order than the numbers."""
    with ps.TarWriter(tmp_path / "in.tar") as writer:
        for number in range(30):
            writer.write({"__key__": f"k{number * 7 % 30:02}", "num": b"%d" % (number % 6 * 5), "txt": b"x" * number})
    return str(tmp_path / "in.tar")


def sorted_keys(path: str, order: SortOrder, mapped: bool = True) -> list[str]:
    return [encoded.keys[0] for encoded in sort_samples(gather_samples([path], mapped=mapped), order)]


@pytest.mark.parametrize("records", [200_000, 4])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_sort_is_stable(
    records: int, mapped: bool, reverse: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sort, "_RUN_RECORDS", records)
    numbers = {sample["__key__"]: int(sample["num"]) for sample in ps.read_tar(path)}
    want = sorted(numbers, key=lambda key: numbers[key], reverse=reverse)
    assert sorted_keys(path, SortOrder("num", "int", reverse), mapped) == want
    assert sorted_keys(path, SortOrder(reverse=reverse), mapped) == sorted(numbers, reverse=reverse)


def test_numbers_are_not_compared_as_text(path: str) -> None:
    numbers = {sample["__key__"]: int(sample["num"]) for sample in ps.read_tar(path)}
    by_text = [numbers[key] for key in sorted_keys(path, SortOrder("num"))]
    assert by_text == sorted(by_text, key=str) != sorted(by_text)


def test_a_system_that_takes_no_advice_on_reads_sorts_alike(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sorted_keys(path, SortOrder("num"))
    monkeypatch.delattr(os, "posix_fadvise")
    assert sorted_keys(path, SortOrder("num")) == expected


def test_a_shuffle_depends_on_its_seed_alone(path: str) -> None:
    first, again, other = (sorted_keys(path, SortOrder(type="shuffle", seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == sorted(other)


def test_samples_of_a_compressed_archive_keep_their_bytes(path: str, tmp_path: Path) -> None:
    (tmp_path / "in.tar.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
    got = [
        b"".join(encoded.pieces)
        for encoded in sort_samples(gather_samples([str(tmp_path / "in.tar.gz")]), SortOrder(), str(tmp_path))
    ]
    stored = {raw.key: b"".join(raw.encode().pieces) for raw in gather_samples([path])}
    assert got == [stored[key] for key in sorted(stored)]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (SortOrder("tx"), ": the sample has no field 'tx'; the fields are nan, txt: did you mean txt?"),
        (SortOrder("txt", "int"), " by the field 'txt': '' is not of type int"),
        (SortOrder("nan", "float"), " by the field 'nan': its value is NaN"),
    ],
)
def test_a_sample_without_a_sortable_value_is_a_data_error(order: SortOrder, message: str, tmp_path: Path) -> None:
    with ps.TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "k", "txt": b"", "nan": b"nan"})
    with pytest.raises(DataError, match=re.escape(f"cannot sort{message}") + ".*key: k"):
        sorted_keys(str(tmp_path / "a.tar"), order)


def test_an_unknown_type_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="unknown sort type 'size'"):
        SortOrder(type="size")


def test_a_folder_that_cannot_be_written_is_a_storage_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write temporary files"):
        list(sort_samples(gather_samples([path]), SortOrder(), str(tmp_path / "none")))


def test_an_archive_that_shrinks_is_a_storage_error(path: str) -> None:
    samples = list(gather_samples([path], mapped=True))
    os.truncate(path, 4096)
    with pytest.raises(StorageError, match=r"shorter while it was being sorted.*in\.tar"):
        list(sort_samples(samples, SortOrder()))


def apart(path: Path, parts: list[tuple[str, str, bytes]]) -> str:
    """Write an archive member by member."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for key, field, data in parts:
            info = tarfile.TarInfo(f"{key}.{field}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


@pytest.mark.parametrize("records", [200_000, 4], ids=["in memory", "in merged runs"])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    "order",
    [SortOrder(), SortOrder(reverse=True), SortOrder("cls", "int"), SortOrder(type="shuffle")],
    ids=["key", "reverse", "cls", "shuffle"],
)
def test_members_that_lie_apart_become_samples(
    records: int, compressed: bool, order: SortOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sort, "_RUN_RECORDS", records)
    samples = {f"k{n:03}": {"jpg": b"image %d" % n, "cls": b"%d" % (n % 7), "a.txt": b"t" * n} for n in range(40)}
    members = [(key, field, data) for key, fields in samples.items() for field, data in fields.items()]
    Random(3).shuffle(members)
    path = apart(tmp_path / "in.tar", members)
    if compressed:
        (tmp_path / "in.tar.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
        path += ".gz"
    with (tmp_path / "out.tar").open("wb") as out:
        for encoded in sort_samples(gather_parts([path]), order, str(tmp_path)):
            out.writelines(encoded.pieces)
        out.write(bytes(1024))
    got = {s["__key__"]: {f: v for f, v in s.items() if f[0] != "_"} for s in ps.read_tar(tmp_path / "out.tar")}
    assert got == samples
    first_seen = list(dict.fromkeys(key for key, _, _ in members))
    if order.by == "cls":
        assert list(got) == sorted(first_seen, key=lambda key: samples[key]["cls"])
    elif order.type == "text":
        assert list(got) == sorted(samples, reverse=order.reverse)


def test_equal_keys_of_two_archives_are_two_samples(tmp_path: Path) -> None:
    paths = [apart(tmp_path / f"{n}.tar", [("k", "a", b"1"), ("other", "a", b""), ("k", "b", b"2")]) for n in range(2)]
    got = [(encoded.keys, encoded.field_names) for encoded in sort_samples(gather_parts(paths), SortOrder())]
    assert got == [(["k"], ("a", "b")), (["k"], ("a", "b")), (["other"], ("a",)), (["other"], ("a",))]


def test_a_field_that_comes_twice_is_an_error_or_left_out(tmp_path: Path) -> None:
    path = apart(tmp_path / "in.tar", [("k", "a", b"1"), ("other", "a", b""), ("k", "a", b"2")])
    with pytest.raises(DataError, match=r"the field 'a' appears twice .*key: k"):
        list(sort_samples(gather_parts([path]), SortOrder()))
    errors: list[DataError] = []
    kept = sort_samples(gather_parts([path]), SortOrder(), on_error=errors.append)
    assert ([encoded.keys for encoded in kept], len(errors)) == ([["other"]], 1)


def test_a_selection_sees_whole_samples_in_their_original_order(tmp_path: Path) -> None:
    members = [(f"k{n}", field, b"%d" % n) for field in ("txt", "cls") for n in (5, 3, 4, 1, 2)]
    path = apart(tmp_path / "in.tar", members)
    chosen = Selection(where=TextExpression("cls < 5 and txt != '3'"), stop=2).samples
    got = [encoded.keys[0] for encoded in sort_samples(gather_parts([path]), SortOrder(), select=chosen)]
    assert got == ["k1", "k4"]
