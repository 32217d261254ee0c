"""Functions and datasets of programs are loaded by name; a wrong name is an error that says what there is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.dataset.programs import load_attribute, load_function
from penstock.errors import PlanError

JOBS = "def upper(path, out): ...\ndef odd(path, out): ...\nnumber = 3\n"


@pytest.fixture(autouse=True)
def _jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("jobs.py").write_text(JOBS)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("jobs", "does not name a function: write MODULE:FUNCTION"),
        ("jobs.py:", "does not name a function: write MODULE:FUNCTION"),
        ("gone.py:f", "there is no file"),
        ("no.such.module:f", "there is no module"),
        ("jobs.py:f", "has no function 'f'; it has upper, odd"),
        ("jobs.py:nothing", "has no function 'nothing'"),
    ],
)
def test_a_name_that_is_not_a_function_is_refused(name: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        load_function(name)


def test_a_name_in_a_file_is_what_the_file_defines() -> None:
    assert load_attribute("jobs.py:number") == 3
    assert load_function("jobs.py:odd").__name__ == "odd"
    with pytest.raises(PlanError, match=r"jobs\.py has no 'nothing'"):
        load_attribute("jobs.py:nothing")
