from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageError
from penstock.jobs.commit_outputs import OutputCommitter
from penstock.jobs.inputs import Input
from penstock.jobs.journal import LocalJournal
from penstock.jobs.output_folder import LocalOutputFolder
from penstock.jobs.task import Outcome

A, B = Input(0, "a", "a"), Input(1, "b", "b")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[LocalJournal]:
    journal = LocalJournal(str(tmp_path / "out"), "f")
    yield journal
    journal.close()


@pytest.fixture
def committer(tmp_path: Path, journal: LocalJournal) -> OutputCommitter:
    return OutputCommitter(journal, LocalOutputFolder(str(tmp_path / "out")), [A, B])


def outcome(tmp_path: Path, job_input: Input, *names: str) -> Outcome:
    """A successful outcome with a draft that holds files of these names."""
    draft = tmp_path / f"draft-{job_input.key}"
    draft.mkdir(exist_ok=True)
    for name in names:
        (draft / name).write_text(job_input.key)
    return Outcome(job_input, (1, 2), 1, tuple((name, 1) for name in names), str(draft))


def outputs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "out").iterdir() if path.name[0] != ".")


def test_outputs_are_published_and_recorded(tmp_path: Path, journal: LocalJournal, committer: OutputCommitter) -> None:
    committer.commit(outcome(tmp_path, A, "x", "y"))
    assert outputs(tmp_path) == ["x", "y"]
    assert journal.records["a"].done
    assert committer.failures() == ()
    committer.commit(outcome(tmp_path, A, "y"))  # processed again, with fewer outputs
    assert outputs(tmp_path) == ["y"]


def test_a_failure_removes_earlier_outputs(tmp_path: Path, journal: LocalJournal, committer: OutputCommitter) -> None:
    committer.commit(outcome(tmp_path, A, "x"))
    committer.commit(Outcome(A, (1, 3), 2, error="ValueError: no", traceback="..."))
    assert outputs(tmp_path) == []
    assert not journal.records["a"].done
    (failure,) = committer.failures()
    assert (failure.input, failure.error, failure.traceback, failure.tries) == ("a", "ValueError: no", "...", 2)


def test_failures_are_in_the_order_of_the_inputs(committer: OutputCommitter) -> None:
    committer.commit_lost(B, "the worker died")
    committer.commit_lost(A, "the worker took too long")
    assert [(failure.input, failure.tries) for failure in committer.failures()] == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("first", [A, B], ids=["a first", "b first"])
def test_two_inputs_that_write_the_same_name_both_lose_it(
    first: Input, tmp_path: Path, journal: LocalJournal, committer: OutputCommitter
) -> None:
    for job_input in (first, B if first is A else A):
        committer.commit(outcome(tmp_path, job_input, "same", f"own-{job_input.key}"))
    assert outputs(tmp_path) == []
    assert journal.owners == {}
    assert {failure.error for failure in committer.failures()} == {
        "'a' and 'b' both write 'same', so neither is published; make the name depend on the input"
    }


def test_a_full_disk_stops_the_run_and_removes_the_draft(tmp_path: Path, committer: OutputCommitter) -> None:
    committer.commit(outcome(tmp_path, A, "x"))
    full = outcome(tmp_path, B, "y")
    with pytest.raises(StorageError, match="No space left; finished inputs are kept"):
        committer.commit(Outcome(B, None, 1, full.outputs, full.draft, error="No space left", unwritable=True))
    assert outputs(tmp_path) == ["x"]
    assert not (tmp_path / "draft-b").exists()


def test_an_output_that_cannot_be_published_fails_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: LocalJournal, committer: OutputCommitter
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EISDIR, "Is a directory", "y")

    monkeypatch.setattr("os.replace", refuse)
    committer.commit(outcome(tmp_path, A, "y"))
    assert [failure.error for failure in committer.failures()] == [
        "the outputs cannot be published: Is a directory (y)"
    ]
    assert not journal.records["a"].done
    assert outputs(tmp_path) == []
