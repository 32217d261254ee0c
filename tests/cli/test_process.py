from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main

JOBS = """
    def upper(path, out):
        out.path(path.name).write_text(path.read_text().upper())
        return {"letters": len(path.read_text())}

    def odd(path, out):
        if int(path.stem) % 2:
            raise ValueError(f"{path.stem} is odd")
        return upper(path, out)

    nothing = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "in").mkdir()
    for number in range(4):
        (tmp_path / "in" / f"{number}.txt").write_text("x" * number)
    # A name that is unique among the tests, because a module is imported only once.
    (tmp_path / f"jobs_{tmp_path.name}.py").write_text(textwrap.dedent(JOBS))
    (tmp_path / "jobs.py").write_text(textwrap.dedent(JOBS))


def test_files_are_processed_and_summarised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = [
        "process",
        f"jobs_{tmp_path.name}:upper",
        "in/*.txt",
        "--out",
        "up",
        "--metadata",
        "m.csv",
        "--on",
        "threads",
    ]
    assert main(call) == 0
    assert capsys.readouterr().out == "4 of 4 inputs done, 4 rows\n"
    assert ps.read_csv("m.csv")["letters"].take_all() == [0, 1, 2, 3]
    assert Path("up/3.txt").read_text() == "XXX"
    assert main(call) == 0
    assert capsys.readouterr().out == "4 of 4 inputs done (4 in earlier runs), 4 rows\n"


def test_failures_are_listed_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["process", "jobs.py:odd", "in/0.txt", "in/1.txt", "in/3.txt", "gone.txt", "--retries", "0"]
    assert main([*call, "--workers", "2"]) == 1  # in processes, which cannot import the module
    captured = capsys.readouterr()
    assert captured.out == "1 of 4 inputs done, 1 row\n"
    assert "failed: in/1.txt: ValueError: 1 is odd\nfailed: in/3.txt: ValueError: 3 is odd\n" in captured.err
    assert "failed: gone.txt: there is no such file (url: gone.txt)" in captured.err
    assert main([*call, "--json", "--on", "threads"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert {name: printed[name] for name in ("inputs", "done", "worked", "failed", "rows")} == {
        "inputs": 4,
        "done": 1,
        "worked": 3,
        "failed": 3,
        "rows": 1,
    }
    assert "raise ValueError" in printed["failures"][0]["traceback"]


def test_a_trial_prints_rows_or_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["process", "jobs.py:odd", "in", "--only", "1"]) == 0
    assert capsys.readouterr().out == '{"input": "in/0.txt", "letters": 0}\n1 of 1 inputs done, 1 row\n'
    assert main(["process", "jobs.py:odd", "in", "--only", "2"]) == 1
    assert "ValueError: 1 is odd" in capsys.readouterr().err


def test_inputs_may_be_listed_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("list").write_text("in/2.txt\n\nin/0.txt\n")
    assert main(["process", "jobs.py:upper", "@list", "--on", "threads", "--metadata", "m.jsonl"]) == 0
    assert ps.read_json("m.jsonl")["input"].take_all() == ["in/2.txt", "in/0.txt"]
    Path("in/caf\udce9").write_text("")  # bytes that are not UTF-8, as in names from other systems
    Path("list").write_bytes(b"in/caf\xe9\n")
    assert main(["process", "jobs.py:upper", "@list", "--on", "threads"]) == 0
    assert main(["process", "jobs.py:upper", "@gone", "--on", "threads"]) == 1
    assert "penstock: @gone: cannot read the list of inputs: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import no_such_module\n", r"ModuleNotFoundError: No module named 'no_such_module' \(.*broken\.py, line 1\)"),
        ("x = 1\n\ndef f(:\n", r"SyntaxError: invalid syntax \(broken\.py, line 3\)"),
        ("def g():\n    raise ValueError('a\\nb')\ng()\n", r"ValueError: a b \(.*broken\.py, line 2\)"),
    ],
)
@pytest.mark.parametrize("words", ["process broken.py:f in", "process broken:f in", "serve broken.py:f"])
def test_a_module_that_cannot_be_loaded_is_an_error_of_one_line(
    source: str, problem: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("broken.py").write_text(source)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    importlib.invalidate_caches()
    assert main(words.split()) == 1
    assert re.fullmatch(rf"penstock: broken(\.py)? failed: {problem}\n", capsys.readouterr().err)


def test_ctrl_c_exits_with_130_and_leaves_no_partial_files(warm_python: str) -> None:
    Path("slow.py").write_text("import time\ndef slow(path, out):\n    with open(out.path(path.name), 'w') as f:\n")
    with open("slow.py", "a") as file:
        file.write("        f.write('half')\n        f.flush()\n        time.sleep(0.0 if path.stem == '0' else 30)\n")
    call = [warm_python, "-m", "penstock", "process", "slow.py:slow", "in", "--workers", "2"]
    with subprocess.Popen(call, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        deadline = time.monotonic() + 120
        while not os.path.exists("outputs/0.txt") and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (130, "penstock: interrupted\n")
    assert sorted(os.listdir("outputs")) == [".penstock-job", "0.txt"]
    assert os.listdir("outputs/.penstock-job") == ["journal.jsonl"]
