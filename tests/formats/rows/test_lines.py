"""CSV, JSON lines and text: random access to rows, types inferred once, errors that name file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.rows import lines, row_scan
from penstock.formats.rows import reader as reader_module
from penstock.storage import open_storage
from penstock.testing import fingerprint

TEXTS = ["plain", 'a "quote"', "new\nline", "com,ma", "ü\r\nß", ""]
ROWS = [{"id": n, "text": TEXTS[n % 6], "x": n / 8} for n in range(700)]


def as_csv(samples: list[dict[str, Any]], **options: Any) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(samples[0]), lineterminator="\n", **options)
    writer.writeheader()
    writer.writerows(samples)
    return out.getvalue().encode()


def as_json(samples: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(sample) + "\n" for sample in samples).encode()


def write_parts(folder: Path, suffix: str, encode: Callable[[list[dict[str, Any]]], bytes]) -> str:
    """Write three files of different lengths and return a glob for them."""
    for number, (first, last) in enumerate([(0, 400), (400, 401), (401, 700)]):
        (folder / f"{number}{suffix}").write_bytes(encode(ROWS[first:last]))
    return str(folder / f"*{suffix}")


@pytest.fixture(params=["csv", "json"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> ps.Dataset:
    if request.param == "csv":
        return ps.read_csv(write_parts(tmp_path, ".csv", as_csv))
    return ps.read_json(write_parts(tmp_path, ".jsonl", as_json))


def test_rows_are_read_in_order_with_their_types(dataset: ps.Dataset) -> None:
    assert fingerprint(dataset.take_all()) == fingerprint(ROWS)


def test_the_length_and_any_row_can_be_read(dataset: ps.Dataset) -> None:
    assert len(dataset) == 700
    assert [dataset[i] for i in (0, 63, 64, 399, 400, 401, 699, -1)] == [
        ROWS[i] for i in (0, 63, 64, 399, 400, 401, 699, -1)
    ]


def test_a_shuffled_epoch_has_every_row_once(dataset: ps.Dataset) -> None:
    got = list(dataset.shuffle(50, seed=3))
    assert got != ROWS
    assert sorted(got, key=lambda row: row["id"]) == ROWS


def test_many_workers_and_ranks_read_one_file(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_bytes(as_csv(ROWS))
    ds = ps.read_csv(str(path), workers=3)
    assert ds.take_all() == ROWS
    shares = [list(ds.shard(rank, 4)) for rank in range(4)]
    assert [len(share) for share in shares] == [175] * 4
    assert [row for share in shares for row in share] == ROWS


def test_a_state_restores_in_the_middle_of_a_file(dataset: ps.Dataset) -> None:
    loader = dataset.shuffle(40).batched(7).loader()
    iterator = iter(loader)
    before = [next(iterator)["id"] for _ in range(31)]
    state = loader.state_dict()
    iterator.close()  # type: ignore[attr-defined]
    restored = dataset.shuffle(40).batched(7).loader()
    restored.load_state_dict(state)
    rest = [batch["id"] for batch in restored]
    assert sorted(np.concatenate(before + rest).tolist()) == list(range(700))


def test_batches_are_columns(dataset: ps.Dataset) -> None:
    batch = next(iter(dataset.iter_batches(100)))
    assert batch["id"].dtype == np.int64
    assert batch["x"].tolist() == [row["x"] for row in ROWS[:100]]
    assert batch["text"] == [row["text"] for row in ROWS[:100]]


def test_only_selected_fields_are_in_samples(dataset: ps.Dataset) -> None:
    assert dataset.select("x").take(2) == [{"x": 0.0}, {"x": 0.125}]
    assert dataset.map(len).take(2) == [3, 3]
    assert dataset.drop("id", "text", "x").take(2) == [{}, {}]


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_compression_is_recognised_by_content(suffix: str, tmp_path: Path) -> None:
    import bz2
    import lzma

    import zstandard

    compressors: dict[str, Any] = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": zstandard.compress,
    }
    compress = compressors[suffix]
    (tmp_path / f"a.csv.{suffix}").write_bytes(compress(as_csv(ROWS)))
    assert ps.read_csv(str(tmp_path)).take_all() == ROWS
    (tmp_path / "b.jsonl").write_bytes(compress(as_json(ROWS)))
    assert ps.read_json(str(tmp_path / "b.jsonl"))[699] == ROWS[699]


def test_remote_files_are_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, samples in enumerate((ROWS[:300], ROWS[300:])):
        with open_storage("memory://lines").put(f"memory://lines/{number}.csv") as upload:
            upload.write(as_csv(samples))
            upload.commit()
    ds = ps.read_csv("memory://lines/{0..1}.csv")
    with pytest.raises(TypeError, match="length is not known"):
        len(ds)  # files are not fetched just to count their rows
    assert ds.take_all() == ROWS
    assert sorted(row["id"] for row in ds.shuffle(30)) == list(range(700))
    assert ds[650] == ROWS[650]
    assert ds.count() == 700


def test_files_written_by_pandas_are_read(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "when": pd.to_datetime(["2020-01-01 10:00:00.0", "2021-02-03 11:12:13.5"]),
            "day": ["2020-01-01", "2021-05-06"],
            "n": pd.array([1, None], dtype="Int64"),
            "ok": [True, False],
            "s": ["a\nb", 'c"d'],
        }
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.drop(columns="when").to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    first, second = ps.read_csv(str(tmp_path / "a.csv"))
    assert first["when"] == np.datetime64("2020-01-01T10:00:00")
    assert second["when"] == np.datetime64("2021-02-03T11:12:13.5")
    assert (first["n"], second["n"]) == (1, None)
    assert (first["ok"], second["ok"]) == (True, False)
    assert (first["s"], second["s"]) == ("a\nb", 'c"d')
    assert first["day"] == np.datetime64("2020-01-01")
    assert ps.read_json(str(tmp_path / "a.jsonl")).first() == {"day": "2020-01-01", "n": 1, "ok": True, "s": "a\nb"}


def test_nested_json_becomes_dicts_lists_and_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": {"b": [1, 2], "c": null}, "d": ["x"], "e": 1}\n\n  \n{"a": null, "d": [], "e": 2.5}\n')
    first, second = ps.read_json(str(path))
    assert first["a"]["b"].tolist() == [1, 2]
    assert (first["a"]["c"], first["d"], first["e"]) == (None, ["x"], 1.0)
    assert second == {"a": None, "d": [], "e": 2.5}


def test_every_line_of_text_is_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\n\nth\u00fcree\r\nlast".encode())
    ds = ps.read_text(str(path))
    assert ds.take_all() == [{"text": "one"}, {"text": ""}, {"text": "thüree"}, {"text": "last"}]
    assert len(ds) == 4
    path.write_bytes(b"good\nb\xffd\ngood\n")
    with pytest.raises(DataError, match=r"the line is not UTF-8.*key: line 2"):
        ps.read_text(str(path)).take_all()
    assert len(ps.read_text(str(path)).on_error("skip").take_all()) == 2


def test_delimiter_names_and_types_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("1\t007\tx\n2\t008\ty\n")
    ds = ps.read_csv(str(path), delimiter="\t", names=["n", "code", "t"], types={"n": "float32", "code": "string"})
    assert ds.take_all() == [{"n": 1.0, "code": "007", "t": "x"}, {"n": 2.0, "code": "008", "t": "y"}]


def test_a_header_may_be_quoted_and_follow_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeff"a\nb","c,d"\r\n1,2\r\n'.encode())
    assert ps.read_csv(str(path)).take_all() == [{"a\nb": 1, "c,d": 2}]


def test_files_may_have_their_columns_in_another_order_and_be_empty(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("")
    (tmp_path / "1.csv").write_text("a,b\n")
    (tmp_path / "2.csv").write_text("a,b\n1,x\n")
    (tmp_path / "3.csv").write_text("b,a\ny,2\n")
    assert ps.read_csv(str(tmp_path)).take_all() == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


INVALID = [
    ("a,b\n1,2\n3\n4,5\n", r"expected 2 values in the row, found 1 \(.*0.csv, key: line 3\)", 2),
    ("a,b\n1,2\n3,oops\n4,5\n", r"column 'b': 'oops' is not a valid int64 \(.*0.csv, key: line 3\)", 2),
    ('a,b\n"1\n",2\n3,4\n5,6,7\n', r"expected 2 values in the row, found 3.*line 5", 2),
    ("a,b\n1,2\n3,\udcff\n", r"line 3", 1),
    ('a,b\n1,2\n3,"never closed\n4,5\n', r"line 3", 1),
]


@pytest.mark.parametrize(("text", "problem", "valid_rows"), INVALID)
def test_the_error_of_an_invalid_csv_row_names_file_and_line(
    text: str, problem: str, valid_rows: int, tmp_path: Path
) -> None:
    (tmp_path / "0.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    types = {"a": "string"} if '"1' in text else {"a": "int64", "b": "int64"}
    ds = ps.read_csv(str(tmp_path), types=types)
    with pytest.raises(DataError, match=problem):
        ds.take_all()
    assert len(ds.on_error("skip").take_all()) == valid_rows


def test_rows_of_a_later_file_with_other_types_are_errors(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("a\n1\n")
    (tmp_path / "1.csv").write_text("a\n2\n2.5\n")
    (tmp_path / "0.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "1.jsonl").write_text('{"a": 2}\n{"a": "x"}\n{"a": 3, "b": 4}\n[1]\n{"a"\n')
    with pytest.raises(DataError, match=r"column 'a': '2.5' is not a valid int64 \(.*1.csv, key: line 3\)"):
        ps.read_csv(str(tmp_path)).take_all()
    assert ps.read_csv(str(tmp_path), types={"a": "float64"}).take_all() == [{"a": 1.0}, {"a": 2.0}, {"a": 2.5}]
    ds = ps.read_json(str(tmp_path))
    with pytest.raises(DataError, match=r"1.jsonl, key: line 2"):
        ds.take_all()
    assert ds.on_error("skip").take_all() == [{"a": 1}, {"a": 2}]
    assert [f"line {n}" in str(error_at(ds, n)) for n in (2, 3, 4, 5)] == [True] * 4


def error_at(ds: ps.Dataset, line: int) -> Exception:
    with pytest.raises(DataError) as caught:
        ds.__getitem__(line)  # the file before has one row
    return caught.value


BROKEN = [
    (0, ['{"a": 0, "b": '], "the line is not a JSON object"),
    (0, ['{"a": {"c": 1,'], "the line is not a JSON object"),
    (3, ["null"], "the line is not a JSON object"),
    (3, ['{"a": 3, "b": "\udcff"}'], "the line is not UTF-8"),
    (0, ['{"a": "text", "b": "0"}'], "field 'a': expected number, found string"),
    (3, ['{"a": 3, "b": "3"}{"a": 4, "b": "4"}', '{"a": 5, "b":', '"5"}'], "does not hold exactly one row"),
    (1, ['{"a": 1, "a": 1, "b": "1"}'], "the field 'a' appears twice"),
]


@pytest.mark.parametrize(("at", "broken", "problem"), BROKEN)
def test_a_broken_line_of_json_loses_no_other_line(at: int, broken: list[str], problem: str, tmp_path: Path) -> None:
    rows = [{"a": n, "b": str(n)} for n in range(100)]
    lines = [json.dumps(row) for row in rows]
    lines[at : at + len(broken)] = broken
    (tmp_path / "0.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    ds = ps.read_json(str(tmp_path))
    with pytest.raises(DataError, match=rf"{problem}.*0.jsonl, key: line {at + 1}\)"):
        ds.take_all()
    assert ds.on_error("skip").take_all() == rows[:at] + rows[at + len(broken) :]


def test_a_broken_line_changes_no_type_and_hides_no_field(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"a": 1, "c": {"x": null}}\noops\n{"a": 1.5, "b": 2, "c": {"x": 3, "y": 4}}\n')
    assert ps.read_json(str(tmp_path)).on_error("skip").take_all() == [
        {"a": 1.0, "b": None, "c": {"x": None, "y": None}},
        {"a": 1.5, "b": 2, "c": {"x": 3, "y": 4}},
    ]


@pytest.mark.parametrize("broken", [[], ["oops"]])
def test_integers_above_those_with_a_sign_stay_exact(broken: list[str], tmp_path: Path) -> None:
    large = [7, 2**63 + 5, 2**64 - 1]
    rows = [{"name": "x", "id": number, "size": 1e30} for number in large]
    (tmp_path / "0.jsonl").write_text("\n".join([json.dumps(row) for row in rows] + broken))
    (tmp_path / "0.csv").write_text(as_csv(rows).decode() + "\n".join(broken))
    assert ps.read_json(str(tmp_path)).on_error("skip").take_all() == rows
    assert ps.read_csv(str(tmp_path)).on_error("skip").take_all() == rows


def test_the_error_of_files_with_different_columns_names_both(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("a,b\n1,2\n")
    (tmp_path / "1.csv").write_text("a,c\n1,2\n")
    with pytest.raises(DataError, match=r"the columns are a, c, but those of .*0.csv are a, b"):
        ps.read_csv(str(tmp_path)).take_all()
    assert len(ps.read_csv(str(tmp_path)).on_error("skip").take_all()) == 1
    (tmp_path / "2.csv").write_text("a,a\n1,2\n")
    with pytest.raises(DataError, match="two columns are named 'a'"):
        ps.read_csv(str(tmp_path / "2.csv")).take_all()
    with pytest.raises(DataError, match="types names the column 'z', but the columns are a, b"):
        ps.read_csv(str(tmp_path / "0.csv"), types={"z": "int8"}).take_all()


def test_a_json_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1},\n {"a": 2}]\n')
    with pytest.raises(DataError, match="the file is one JSON array"):
        ps.read_json(str(tmp_path)).take_all()


def test_a_damaged_compressed_file_yields_its_readable_rows_and_one_error(tmp_path: Path) -> None:
    samples = [{"id": n, "noise": os.urandom(6).hex()} for n in range(500)]
    compressed = gzip.compress(as_csv(samples))
    (tmp_path / "a.csv.gz").write_bytes(compressed[: len(compressed) // 2])
    ds = ps.read_csv(str(tmp_path))
    got = ds.on_error("skip").take_all()
    assert 50 < len(got) < 400
    assert got == samples[: len(got)]
    assert len(ds) == len(got) + 1
    with pytest.raises(DataError, match=r"gz stream is damaged.*a.csv.gz"):
        ds.take_all()


@pytest.mark.parametrize("content", [b"a,b\r1,2\r", b"PK\x03\x04\x14\x00zip", "a,b\n1,2\n".encode("utf-16")])
def test_a_csv_file_without_a_header_in_text_is_one_error_and_not_an_empty_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_bytes(content)
    (tmp_path / "2.csv").write_bytes(b"a,b\n1,2\n")
    ds = ps.read_csv(tmp_path)
    with pytest.raises(DataError, match="the first line names no columns"):
        ds.take_all()
    assert ds.on_error("skip").take_all() == [{"a": 1, "b": 2}]


def test_a_compressed_file_that_ends_before_its_first_row_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(as_csv(ROWS))[:12])
    with pytest.raises(DataError, match="the gz stream is damaged"):
        ps.read_csv(tmp_path / "a.csv.gz").take_all()


def test_a_file_is_scanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(as_csv(ROWS))
    assert len(ps.read_csv(str(path))) == 700
    scans: list[str] = []
    original = row_scan.scan_lines
    monkeypatch.setattr(lines, "scan_lines", lambda *args, **kwargs: scans.append("scan") or original(*args, **kwargs))  # type: ignore[func-returns-value]
    assert len(ps.read_csv(str(path))) == 700
    assert ps.read_csv(str(path))[650] == ROWS[650]
    assert not scans
    path.write_bytes(as_csv(ROWS[:20]))
    assert len(ps.read_csv(str(path))) == 20
    assert scans


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(as_csv(ROWS))
    ds = ps.read_csv(str(path))
    assert len(ds) == 700
    path.write_bytes(as_csv(ROWS[:10]))
    with pytest.raises(StorageError, match="changed while it was being read"):
        ds[5]  # by the reader that counted the rows before


def test_files_are_reopened_if_not_all_may_be_open(dataset: ps.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_OPEN_FILES", 1)
    assert sorted(row["id"] for row in dataset.shuffle(20, shards=3)) == list(range(700))


@pytest.mark.parametrize(
    "read",
    [
        lambda: ps.read_csv("a", delimiter=",,"),
        lambda: ps.read_csv("a", delimiter='"'),
        lambda: ps.read_csv("a", delimiter="ü"),
        lambda: ps.read_csv("a", names="ab"),
        lambda: ps.read_csv("a", names=[1]),  # type: ignore[list-item]
        lambda: ps.read_csv("a", names=3),  # type: ignore[arg-type]
        lambda: ps.read_csv("a", names=[]),
        lambda: ps.read_tfrecords("a", lists=3),  # type: ignore[arg-type]
        lambda: ps.read_csv("a", types=["int64"]),  # type: ignore[arg-type]
        lambda: ps.read_json("a", types={"a": "Not A Type"}),
        lambda: ps.read_text([]),
        lambda: ps.read_text("a", workers=0),
    ],
)
def test_invalid_arguments_are_refused_when_the_dataset_is_built(read: Callable[[], object]) -> None:
    with pytest.raises(PlanError):
        read()


def test_datasets_of_lines_compare_by_their_arguments() -> None:
    assert ps.read_csv("a.csv", types={"x": "int8"}) == ps.read_csv("a.csv", types={"x": "int8"})
    assert ps.read_csv("a.csv") != ps.read_csv("a.csv", delimiter=";")
    assert "read_json('a.jsonl')" in repr(ps.read_json("a.jsonl"))
    with pytest.raises(StorageError, match="no such file"):
        ps.read_text("nowhere.txt").take_all()


def test_a_row_that_is_short_and_not_utf8_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n1,x\n2,y\n\xff\xfe\n3,z\n")
    ds = ps.read_csv(path)
    assert [sample["a"] for sample in ds.on_error("skip")] == [1, 2, 3]
    with pytest.raises(DataError, match="line 4"):
        list(ds)
