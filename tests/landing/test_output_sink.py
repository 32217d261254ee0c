"""Outputs of a job are published once, owned by one input, and never outside of the folder."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PlanError, StateError, StorageError
from penstock.landing.output_sink import JOB_FOLDER, Job, Outcome, OutputFolder, OutputSink, open_outputs
from penstock.storage import Memory


def opened(folder: Path, function: str = "f", **options: Any) -> AbstractContextManager[OutputSink]:
    return open_outputs(str(folder), None, Job(function, "", ["a", "b"]), **options)


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[OutputSink]:
    with opened(tmp_path / "out") as sink:
        yield sink


def outcome(tmp_path: Path, key: str, *names: str, rows: str = "[]") -> Outcome:
    """A successful outcome with a draft that holds files of these names."""
    draft = tmp_path / f"draft-{key}"
    draft.mkdir(exist_ok=True)
    for name in names:
        (draft / name).write_text(key)
    return Outcome(key, (1, 2), 1, tuple((name, 1) for name in names), str(draft), rows)


def outputs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "out").iterdir() if path.name[0] != ".")


def test_outputs_are_published_and_recorded(tmp_path: Path, sink: OutputSink) -> None:
    sink.commit(outcome(tmp_path, "a", "x", "y"))
    assert outputs(tmp_path) == ["x", "y"]
    assert sink.records["a"].done
    assert sink.failures() == ()
    sink.commit(outcome(tmp_path, "a", "y"))  # processed again, with fewer outputs
    assert outputs(tmp_path) == ["y"]


def test_a_failure_removes_earlier_outputs(tmp_path: Path, sink: OutputSink) -> None:
    sink.commit(outcome(tmp_path, "a", "x"))
    sink.commit(Outcome("a", (1, 3), 2, error="ValueError: no", traceback="..."))
    assert outputs(tmp_path) == []
    assert not sink.records["a"].done
    (failure,) = sink.failures()
    assert (failure.input, failure.error, failure.traceback, failure.tries) == ("a", "ValueError: no", "...", 2)


def test_failures_are_in_the_order_of_the_inputs(sink: OutputSink) -> None:
    sink.commit_lost("b", "the worker died")
    sink.commit_lost("a", "the worker took too long")
    assert [(failure.input, failure.tries) for failure in sink.failures()] == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("first", ["a", "b"])
def test_two_inputs_that_write_the_same_name_both_lose_it(first: str, tmp_path: Path, sink: OutputSink) -> None:
    for key in (first, "b" if first == "a" else "a"):
        sink.commit(outcome(tmp_path, key, "same", f"own-{key}"))
    assert outputs(tmp_path) == []
    assert sink.owners == {}
    assert {failure.error for failure in sink.failures()} == {
        "'a' and 'b' both write 'same', so neither is published; make the name depend on the input"
    }


def test_a_full_disk_stops_the_run_and_removes_the_draft(tmp_path: Path, sink: OutputSink) -> None:
    sink.commit(outcome(tmp_path, "a", "x"))
    full = outcome(tmp_path, "b", "y")
    with pytest.raises(StorageError, match="No space left; finished inputs are kept"):
        sink.commit(Outcome("b", None, 1, full.outputs, full.draft, error="No space left", unwritable=True))
    assert outputs(tmp_path) == ["x"]
    assert not (tmp_path / "draft-b").exists()


def test_an_output_that_cannot_be_published_fails_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: OutputSink
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EISDIR, "Is a directory", "y")

    monkeypatch.setattr("os.replace", refuse)
    sink.commit(outcome(tmp_path, "a", "y"))
    assert [failure.error for failure in sink.failures()] == ["the outputs cannot be published: Is a directory (y)"]
    assert not sink.records["a"].done
    assert outputs(tmp_path) == []


def test_outputs_of_an_input_stay_visible_until_their_replacement_is(
    tmp_path: Path, sink: OutputSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink.commit(outcome(tmp_path, "a", "x", "old"))
    os_replace, seen = os.replace, []

    def replace(source: Any, target: Any) -> None:
        seen.append((outputs(tmp_path), sink.records["a"].done))
        os_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    sink.commit(outcome(tmp_path, "a", "x", "y"))
    assert seen == [(["old", "x"], False), (["old", "x"], False)]  # a kill here: the input is not done
    assert outputs(tmp_path) == ["x", "y"]
    assert sink.records["a"].done


def test_the_last_line_of_an_input_is_valid(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as sink:
        sink.commit(outcome(tmp_path, "a", "x", "y", rows='[{"n":1}]'))
        sink.commit_lost("b", "ValueError")
        sink.commit(outcome(tmp_path, "a", "y", rows='[{"n":2}]'))
    with opened(tmp_path / "out") as again:
        assert again.owners == sink.owners == {"y": "a"}
        assert again.records == sink.records
        assert again.rows("a") == [{"n": 2}]
        assert (again.records["a"].done, again.records["b"].done) == (True, False)
        assert again.is_done("a", (1, 2))
        assert not again.is_done("a", (1, 3))
    assert os.listdir(tmp_path / "out" / JOB_FOLDER) == ["journal.jsonl"]


def test_an_input_of_a_trial_owns_its_outputs_but_is_not_done(tmp_path: Path, sink: OutputSink) -> None:
    sink.commit(outcome(tmp_path, "a", "x"), trial=True)
    assert not sink.records["a"].done
    assert sink.owners == {"x": "a"}


def test_damage_is_an_error_and_fresh_removes_what_is_known(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as sink:
        sink.commit(outcome(tmp_path, "a", "x"))
    with (tmp_path / "out" / JOB_FOLDER / "journal.jsonl").open("ab") as file:
        file.write(b"\x00junk\n")
    with (
        pytest.raises(StateError, match=r"the journal cannot be read at byte \d+ \(.*fresh=True"),
        opened(tmp_path / "out"),
    ):
        pass
    with opened(tmp_path / "out", fresh=True) as sink:
        assert (sink.records, outputs(tmp_path)) == ({}, [])


def test_the_journal_of_another_function_or_version_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with (
        pytest.raises(StateError, match="holds the outputs of f, not of g; choose another folder"),
        opened(tmp_path, "g"),
    ):
        pass
    (tmp_path / JOB_FOLDER / "journal.jsonl").write_text('{"v": 1, "function": "f"}\n')
    with pytest.raises(StateError, match="format 1 of another version of Penstock"), opened(tmp_path):
        pass


@pytest.mark.parametrize("name", ["../victim", "/etc/hosts", "a/../../victim", "link/victim", f"{JOB_FOLDER}/x"])
def test_a_crafted_journal_removes_nothing_outside_of_the_folder(name: str, tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    (out / JOB_FOLDER).mkdir(parents=True)
    outside.mkdir()
    for victim in (tmp_path / "victim", outside / "victim"):
        victim.write_text("precious")
    (out / "link").symlink_to(outside)
    lines: list[dict[str, Any]] = [
        {"v": 2, "function": "f"},
        {"key": "a", "done": True, "sign": [1, 2], "outputs": [[name, 8]], "tries": 1, "rows": []},
    ]
    (out / JOB_FOLDER / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not name.startswith("link"):
        with pytest.raises(StateError, match="fresh=True"), opened(out):
            pass
    with opened(out, fresh=True):
        pass
    assert [path.read_text() for path in (tmp_path / "victim", outside / "victim")] == ["precious"] * 2


def test_a_work_folder_or_drafts_that_are_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / JOB_FOLDER).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "two" / JOB_FOLDER).mkdir(parents=True)
    (tmp_path / "two" / JOB_FOLDER / "drafts").symlink_to(tmp_path / "elsewhere")
    for name in ("one", "two"):
        with pytest.raises(PlanError, match="is a link"), opened(tmp_path / name):
            pass
    assert "kept" in os.listdir(tmp_path / "elsewhere")


def test_a_remote_folder_has_the_files_of_its_listing() -> None:
    with Memory().put("memory://folder/out/a/b") as upload:
        upload.write(b"12")
        upload.commit()
    folder = OutputFolder("memory://folder/out", Memory())
    assert folder.holds((("a/b", 2),))
    assert not folder.holds((("a/b", 3),))
    folder.remove(["a/b"])
    assert not OutputFolder("memory://folder/out", Memory()).holds((("a/b", 2),))


def _draft(folder: Path) -> str:
    (folder / ".draft" / "below").mkdir(parents=True)
    (folder / ".draft" / "below" / "a").write_text("12")
    return str(folder / ".draft")


def test_folders_that_become_empty_are_removed_and_created_again(tmp_path: Path) -> None:
    folder = OutputFolder(str(tmp_path), None)
    for _ in range(2):
        folder.publish(_draft(tmp_path), (("below/a", 2),))
        assert os.listdir(tmp_path) == ["below"]
        assert folder.holds((("below/a", 2),))
        assert folder.existing(["below/a", "b"]) == ["below/a"]
        folder.remove(["below/a", "never/was"])
        assert os.listdir(tmp_path) == []


def test_outputs_are_copied_to_a_folder_on_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os_replace = os.replace

    def replace(source: str, target: str) -> None:
        if f"{os.sep}.draft{os.sep}" in str(source):
            raise OSError(errno.EXDEV, "another disk")
        os_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    OutputFolder(str(tmp_path), None).publish(_draft(tmp_path), (("below/a", 2),))
    assert os.listdir(tmp_path / "below") == ["a"]


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_temporary_folders_of_a_killed_run_are_removed_by_the_next(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    url, storage = (str(tmp_path / "out"), None) if where == "disk" else ("memory://jobs/killed", Memory())
    for _ in range(2):  # what a killed run leaves is what it had while it ran
        with open_outputs(url, storage, Job("f", "", ["a"])) as sink:
            assert len(os.listdir(tmp_path / "temporary")) == 1
            os.makedirs(sink.drafts, exist_ok=True)
            left = Path(sink.scratch).name
        assert os.listdir(tmp_path / "temporary") == []
        (tmp_path / "temporary" / left / "drafts").mkdir(parents=True)
    with open_outputs(url, storage, Job("f", "", ["a"])) as sink:
        assert os.listdir(tmp_path / "temporary") == [Path(sink.scratch).name]
    assert os.listdir(tmp_path / "temporary") == []
