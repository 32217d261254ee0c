from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import DataError, PlanError
from penstock.jobs import Out
from penstock.landing.output_sink import JOB_FOLDER, normalize_name


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a/..", "/etc/x", "..", f"{JOB_FOLDER}/journal.jsonl"])
def test_a_name_that_leads_out_of_the_folder_or_to_the_journal_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"leads out of the output folder|reserved for the journal"):
        Out(str(tmp_path), "a").path(name)


@pytest.mark.parametrize("name", ["", ".", "/", "a/", "a\0b", 3, None])
def test_a_value_that_is_not_a_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"out\.path"):
        Out(str(tmp_path), "a").path(name)


@pytest.mark.parametrize("name", ["a b", "ü\n'\"", "-rf", "..a", "a..", "~", "$(x)", "x" * 200, "\udcff"])
def test_hostile_names_are_allowed(name: str, tmp_path: Path) -> None:
    out = Out(str(tmp_path), "a")
    out.path(f"below/{name}").write_bytes(b"12")
    assert out.written() == [(f"below/{name}", 2)]


def test_a_name_is_normalized() -> None:
    assert normalize_name("./a//b/./c") == normalize_name(Path("a/b/c")) == "a/b/c"


def test_every_file_in_the_folder_is_an_output(tmp_path: Path) -> None:
    out = Out(str(tmp_path), "a")
    out.path("pages").mkdir()
    (tmp_path / "pages" / "1").write_text("1")
    out.path("x.wav").with_suffix(".json").write_text("{}")
    out.path("x.wav").write_text("")
    assert out.written() == [("pages/1", 1), ("x.json", 2), ("x.wav", 0)]


def test_a_requested_path_that_is_not_written_is_an_error(tmp_path: Path) -> None:
    out = Out(str(tmp_path), "a")
    out.path("x")
    with pytest.raises(DataError, match=r"requested out\.path\('x'\), but wrote nothing there"):
        out.written()


def test_a_link_is_not_an_output(tmp_path: Path) -> None:
    out = Out(str(tmp_path), "a")
    os.symlink("/etc/passwd", out.path("x"))
    with pytest.raises(DataError, match="'x' is a link or device; write a regular file"):
        out.written()
