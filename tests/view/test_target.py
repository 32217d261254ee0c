"""What ``penstock view`` opens: files of any format by their names, or the dataset of a program."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PlanError, StorageError
from penstock.view import open_target
from penstock.view.target import is_program


def test_formats_are_recognised(photo_shards: Path, tmp_path: Path) -> None:
    assert len(open_target([str(photo_shards / "train-{0000..0003}.tar")])) == 100
    images = open_target([str(photo_shards / "photos")])
    assert images.first().keys() == {"image", "path", "label"}
    flat = tmp_path / "flat"
    shutil.copytree(photo_shards / "photos" / "cat", flat)
    assert open_target([str(flat)]).first().keys() == {"image", "path"}
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("hello")
    assert open_target([str(tmp_path / "notes")]).first().keys() == {"path", "bytes"}
    ps.from_items([{"x": 1}, {"x": 2}]).write_parquet(tmp_path / "rows")
    ps.from_items([{"x": 3}]).write_csv(tmp_path / "more.csv")
    assert [row["x"] for row in open_target([str(tmp_path / "rows"), str(tmp_path / "rows")])] == [1, 2, 1, 2]
    with pytest.raises(PlanError, match="several formats"):
        open_target([str(tmp_path / "rows"), str(tmp_path / "more.csv")])
    with pytest.raises(StorageError):
        list(open_target([str(tmp_path / "nothing.tar")]))


def test_a_program_gives_its_dataset(tmp_path: Path) -> None:
    program = tmp_path / "prog.py"
    (tmp_path / "beside_prog.py").write_text("ITEMS = [1, 2, 3]\n")
    text = "import penstock as ps\nfrom beside_prog import ITEMS\nds = ps.from_items(ITEMS)\n"
    program.write_text(f"{text}class Config:\n    train = ds\nother = 3\n")
    assert is_program(f"{program}:ds")
    assert not is_program(str(program))
    assert list(open_target([f"{program}:ds"])) == [1, 2, 3]
    assert list(open_target([f"{program}:Config.train"])) == [1, 2, 3]
    with pytest.raises(PlanError, match="has no 'nothing'"):
        open_target([f"{program}:nothing"])
    with pytest.raises(PlanError, match="not a Dataset"):
        open_target([f"{program}:other"])
    with pytest.raises(PlanError, match="there is no file"):
        open_target([f"{tmp_path}/none.py:ds"])
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(PlanError, match="ZeroDivisionError"):
        open_target([f"{tmp_path / 'broken.py'}:ds"])
