from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main

Capture = pytest.CaptureFixture[bytes]


@pytest.mark.parametrize("comma", [False, True], ids=["tsv", "csv"])
def test_a_shard_is_created_from_a_table(comma: bool, tmp_path: Path, capfdbinary: Capture) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "1.jpg").write_bytes(b"\xffone")
    table = tmp_path / ("table.csv" if comma else "table.tsv")
    lines = ["@jpg\tcls\ttxt", "1.jpg\t3\ta\\tb", "\t4\tc"]
    table.write_text("\n".join(line.replace("\t", ",") if comma else line for line in lines) + "\n")
    assert main(["create", str(table), "-C", str(tmp_path / "f"), "-o", str(tmp_path / "out.tar")]) == 0
    samples = ps.read_tar(str(tmp_path / "out.tar")).drop("__url__").take_all()
    text = b"a\\tb" if comma else b"a\tb"
    assert samples == [
        {"__key__": "000000000", "cls": b"3", "jpg": b"\xffone", "txt": text},
        {"__key__": "000000001", "cls": b"4", "txt": b"c"},
    ]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", "the table is empty"),
        ("@jpg\tcls\nnone.jpg\t1\n", "line 2: there is no file"),
        ("a\tb\n1\n", "line 2 has 1 cell, but the first line has 2"),
        ("a\t@a\n1\t2\n", "two columns are named 'a'"),
        ("__key__\n1\n", "names no field"),
        ("__key__\ta\nx.y\t1\n", "line 2: the key has a dot"),
        ("__key__\ta\nx\t1\nx\t1\n", "line 3: the key was written before"),
        ("__key__\ta\n../x\t1\n", "line 2: the key is an absolute path or leads out"),
    ],
)
def test_a_wrong_table_leaves_nothing_behind(table: str, message: str, tmp_path: Path, capfdbinary: Capture) -> None:
    (tmp_path / "table.tsv").write_text(table)
    assert main(["create", str(tmp_path / "table.tsv"), str(tmp_path / "out.tar")]) == 1
    assert message in capfdbinary.readouterr().err.decode()
    assert not (tmp_path / "out.tar").exists()


def test_a_table_written_by_tsv_recreates_the_shard(
    hostile_shard: str, pipe: Callable[..., bytes], capfdbinary: Capture
) -> None:
    assert main(["tsv", hostile_shard]) == 0
    table = capfdbinary.readouterr().out
    assert pipe(table, "create") == Path(hostile_shard).read_bytes()


def test_two_outputs_are_refused(tmp_path: Path, capfdbinary: Capture) -> None:
    (tmp_path / "t.tsv").write_text("__key__\tcls\na\t1\n")
    with pytest.raises(SystemExit):
        main(["create", f"{tmp_path}/t.tsv", f"{tmp_path}/a.tar", "-o", f"{tmp_path}/b.tar"])
    assert b"two outputs are named" in capfdbinary.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["t.tsv"]
