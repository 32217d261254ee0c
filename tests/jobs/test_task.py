from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.jobs import Out
from penstock.jobs.inputs import Input, take_fingerprint
from penstock.jobs.task import ProcessStage, check_function
from penstock.landing.output_sink import Outcome
from penstock.plan import Context
from penstock.storage import Memory

PACKAGE = str(Path(ps.__file__).parent)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Outcome]:
    """Run a function on an input file; ``retries`` and other arguments go to the stage."""
    (tmp_path / "in.txt").write_text("word")
    job_input = Input(3, str(tmp_path / "in.txt"), "in.txt")

    def call(fn: Any, **arguments: Any) -> Outcome:
        stage = ProcessStage(fn, str(tmp_path / "drafts"), str(tmp_path / "scratch"), **arguments)
        return stage.run_with_retries(job_input, stage.make_call())

    return call


def test_an_outcome_has_outputs_in_a_draft_and_rows(run: Callable[..., Outcome], tmp_path: Path) -> None:
    def copy(path: Path, out: Out) -> dict[str, Any]:
        out.path("a/copy.txt").write_text(path.read_text())
        return {"letters": 4}

    outcome = run(copy)
    assert (outcome.error, outcome.tries, outcome.outputs) == (None, 1, (("a/copy.txt", 4),))
    assert outcome.rows == '[{"letters":4}]'
    assert outcome.draft is not None
    assert Path(outcome.draft, "a/copy.txt").read_text() == "word"
    assert outcome.fingerprint == take_fingerprint(Input(3, str(tmp_path / "in.txt"), outcome.key), None)


def test_a_failure_has_a_line_and_a_traceback_of_user_code_and_no_draft(
    run: Callable[..., Outcome], tmp_path: Path
) -> None:
    def fail(path: Path, out: Out) -> None:
        out.path("x").write_text("")
        raise ValueError("two\nlines")

    outcome = run(fail, retries=2)
    assert (outcome.error, outcome.tries, outcome.draft) == ("ValueError: two lines", 3, None)
    assert "in fail\n" in outcome.traceback
    assert PACKAGE not in outcome.traceback
    assert list((tmp_path / "drafts").iterdir()) == []


def test_an_error_that_would_happen_again_is_not_retried(run: Callable[..., Outcome]) -> None:
    calls = []

    def wrong(path: Path, out: Out) -> int:
        calls.append(path)
        return 3

    outcome = run(wrong, retries=5)
    assert (len(calls), outcome.tries) == (1, 6)  # 6: as if all retries had failed


def test_a_full_disk_is_marked_and_not_retried(run: Callable[..., Outcome]) -> None:
    def full(path: Path, out: Out) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    outcome = run(full, retries=5)
    assert (outcome.unwritable, outcome.tries) == (True, 1)


def test_a_protected_name_is_refused(run: Callable[..., Outcome]) -> None:
    def overwrite(path: Path, out: Out) -> None:
        out.path("in.txt").write_text("")

    outcome = run(overwrite, protected=(("in.txt", "the input 'in.txt'"),))
    assert outcome.error == "the output 'in.txt' would replace the input 'in.txt'; choose another name or folder"


def test_a_long_traceback_is_shortened_in_the_middle(run: Callable[..., Outcome]) -> None:
    def fail(path: Path) -> None:
        raise ValueError("x" * 50_000)

    outcome = run(fail)
    assert outcome.error is not None
    assert len(outcome.error) < 400
    assert len(outcome.traceback) < 21_000
    assert "\n...\n" in outcome.traceback


def test_a_class_is_constructed_once_per_worker(tmp_path: Path) -> None:
    class Model:
        constructed = 0

        def __init__(self, device: Any) -> None:
            Model.constructed += 1
            self.device = device

        def __call__(self, path: Path) -> dict[str, Any]:
            return {"device": self.device}

    stage = ProcessStage(Model, str(tmp_path / "drafts"), str(tmp_path / "scratch"))
    (tmp_path / "in.txt").write_text("")
    context = Context(0, device="gpu 1")
    for number in range(2):
        outcome = stage.function(context)(Input(number, str(tmp_path / "in.txt"), "in.txt"))
        assert outcome.rows == '[{"device":"gpu 1"}]'
    assert Model.constructed == 1


def test_a_remote_input_is_downloaded_under_its_own_name(tmp_path: Path) -> None:
    with Memory().put("memory://task/word.txt") as upload:
        upload.write(b"word")
        upload.commit()
    stage = ProcessStage(lambda path: {"name": path.name}, str(tmp_path / "drafts"), str(tmp_path / "scratch"))
    job_input = Input(0, "memory://task/word.txt", "memory://task/word.txt")
    assert stage.run_with_retries(job_input, stage.make_call()).rows == '[{"name":"word.txt"}]'
    assert list((tmp_path / "scratch").iterdir()) == []


class NotCallable:
    pass


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (3, "process needs a function"),
        (NotCallable, "NotCallable is a class without __call__"),
        (lambda: None, r"cannot be called with \(path, out\)"),
        (lambda a, b, c: None, r"cannot be called with \(path, out\)"),
    ],
)
def test_a_function_that_does_not_take_a_path_is_refused(fn: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        check_function(fn)


@pytest.mark.parametrize("fn", [print, lambda path: None, lambda path, out, device: None, lambda *args: None])
def test_a_function_that_takes_a_path_is_accepted(fn: Any) -> None:
    check_function(fn)
