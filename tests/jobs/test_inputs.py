from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PlanError, StorageError
from penstock.jobs.inputs import Input, fingerprints, journal_key, resolve_inputs, take_fingerprint
from penstock.storage import Info, Memory


def _urls(given: object) -> list[str]:
    return [job_input.url for job_input in resolve_inputs(given)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "x[1].txt", "y{1,2}.txt", "z::z.txt"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_globs_folders_and_braces_are_expanded_in_order(folder: Path) -> None:
    assert _urls("?.txt") == ["a.txt", "b.txt"]
    assert [os.path.basename(name) for name in _urls(folder)][:2] == ["a.txt", "b.txt"]
    assert _urls("{b,a}.txt") == ["b.txt", "a.txt"]
    assert _urls(["?.txt", "missing.txt"]) == ["a.txt", "b.txt", "missing.txt"]


def test_an_existing_file_is_taken_literally(folder: Path) -> None:
    hostile = ["x[1].txt", "y{1,2}.txt", "z::z.txt"]
    assert _urls(hostile) == hostile
    assert _urls("y{1,2}.txt") == ["y{1,2}.txt"]


def test_a_column_of_a_dataset_is_a_list_of_inputs(folder: Path) -> None:
    (folder / "list.csv").write_text("input,label\nb.txt,1\na.txt,2\n")
    assert _urls(ps.read_csv("list.csv")["input"]) == ["b.txt", "a.txt"]
    assert _urls(ps.read_csv("list.csv").map(lambda row: f"in/{row['input']}")) == ["in/b.txt", "in/a.txt"]
    with pytest.raises(PlanError, match=r'not a path or URL; choose a column, as in ds\["input"\]'):
        resolve_inputs(ps.read_csv("list.csv"))


@pytest.mark.parametrize("given", [3, None, b"a", [3], [""], ["a\0b"]], ids=str)
def test_a_value_that_is_not_a_path_is_refused(given: object) -> None:
    with pytest.raises(PlanError, match="input"):
        resolve_inputs(given)


def test_a_repeated_input_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'a.txt' appears twice among the inputs \(numbers 0 and 2\)"):
        resolve_inputs(["a.txt", "b.txt", "a.txt"])


def test_a_glob_without_matches_is_an_error(folder: Path) -> None:
    with pytest.raises(StorageError, match="matches no files"):
        resolve_inputs("*.wav")


def test_the_key_of_a_url_hides_its_secret_and_stays_unique() -> None:
    first, second = journal_key("https://host/a.wav?token=secret"), journal_key("https://host/a.wav?token=other")
    assert "secret" not in first
    assert first != second


def test_a_change_of_size_time_or_tag_changes_the_fingerprint(folder: Path) -> None:
    local = Input(0, "a.txt", "a.txt")
    before = take_fingerprint(local, None)
    os.utime("a.txt", ns=(1, 1))
    assert take_fingerprint(local, None) != before
    remote = Input(0, "memory://j/a", "memory://j/a")
    _put(remote.url, b"1")
    before = take_fingerprint(remote, None)
    _put(remote.url, b"2")
    assert take_fingerprint(remote, None) != before


def _put(url: str, data: bytes) -> None:
    with Memory().put(url) as upload:
        upload.write(data)
        upload.commit()


def test_a_missing_input_has_no_fingerprint(folder: Path) -> None:
    gone = Input(0, "gone", "gone")
    with pytest.raises(StorageError, match="there is no such file"):
        take_fingerprint(gone, None)
    assert fingerprints([gone, Input(1, "memory://j/gone", "k")], None) == [None, None]


@dataclass(frozen=True, slots=True)
class _Untagged(Memory):
    """A storage that cannot detect changes."""

    def info(self, url: str) -> Info:
        return replace(Memory.info(self, url), tag=None)


def test_an_input_whose_changes_cannot_be_seen_has_no_fingerprint() -> None:
    remote = Input(0, "memory://j/untagged", "memory://j/untagged")
    _put(remote.url, b"1")
    assert fingerprints([remote], None) != [None]
    assert fingerprints([remote], _Untagged()) == [None]
