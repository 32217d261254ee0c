from __future__ import annotations

import os
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PlanError, StorageError
from penstock.jobs.inputs import Input, inputs_of, key_of, sign, signs
from penstock.storage import Memory


def _names(given: object) -> list[str]:
    return [one.url for one in inputs_of(given)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "x[1].txt", "y{1,2}.txt", "z::z.txt"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_glob_a_folder_and_braces_mean_files_by_name(folder: Path) -> None:
    assert _names("?.txt") == ["a.txt", "b.txt"]
    assert [os.path.basename(name) for name in _names(folder)][:2] == ["a.txt", "b.txt"]
    assert _names("{b,a}.txt") == ["b.txt", "a.txt"]
    assert _names(["?.txt", "missing.txt"]) == ["a.txt", "b.txt", "missing.txt"]


def test_a_file_that_is_there_is_meant_literally(folder: Path) -> None:
    odd = ["x[1].txt", "y{1,2}.txt", "z::z.txt"]
    assert _names(odd) == odd
    assert _names("y{1,2}.txt") == ["y{1,2}.txt"]


def test_a_column_of_a_dataset_is_a_list(folder: Path) -> None:
    (folder / "list.csv").write_text("input,label\nb.txt,1\na.txt,2\n")
    assert _names(ps.read_csv("list.csv")["input"]) == ["b.txt", "a.txt"]
    assert _names(ps.read_csv("list.csv").map(lambda row: f"in/{row['input']}")) == ["in/b.txt", "in/a.txt"]
    with pytest.raises(PlanError, match=r'no path or URL; choose a column, as in ds\["input"\]'):
        inputs_of(ps.read_csv("list.csv"))


@pytest.mark.parametrize("given", [3, None, b"a", [3], [""], ["a\0b"]], ids=str)
def test_what_is_no_input_is_refused(given: object) -> None:
    with pytest.raises(PlanError, match="input"):
        inputs_of(given)


def test_an_input_that_comes_twice_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'a.txt' comes twice among the inputs \(numbers 0 and 2\)"):
        inputs_of(["a.txt", "b.txt", "a.txt"])


def test_a_glob_of_nothing_is_an_error(folder: Path) -> None:
    with pytest.raises(StorageError, match="nothing is there"):
        inputs_of("*.wav")


def test_a_secret_in_a_url_is_not_in_its_key() -> None:
    one, two = key_of("https://host/a.wav?token=secret"), key_of("https://host/a.wav?token=other")
    assert "secret" not in one
    assert one != two


def test_a_change_of_size_time_or_tag_changes_the_sign(folder: Path) -> None:
    one = Input(0, "a.txt", "a.txt")
    before = sign(one, None)
    os.utime("a.txt", ns=(1, 1))
    assert sign(one, None) != before
    far = Input(0, "memory://j/a", "memory://j/a")
    _put(far.url, b"1")
    before = sign(far, None)
    _put(far.url, b"2")
    assert sign(far, None) != before


def _put(url: str, data: bytes) -> None:
    with Memory().put(url) as upload:
        upload.write(data)
        upload.commit()


def test_of_what_is_not_there_nothing_is_known(folder: Path) -> None:
    gone = Input(0, "gone", "gone")
    with pytest.raises(StorageError, match="there is no such file"):
        sign(gone, None)
    assert signs([gone, Input(1, "memory://j/gone", "k")], None) == [None, None]
