from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.dataset.programs import load_function
from penstock.errors import PlanError

Proc = Callable[..., tuple[dict[str, dict[str, bytes]], str]]

FUNCTIONS = """
def twice(sample):
    return [{"__key__": f"{sample['__key__']}-{i}", "txt": sample["txt"]} for i in range(2)]

def without_k7(sample):
    return None if sample["__key__"] == "d/k7" else sample

def fails(sample):
    if sample["__key__"] == "d/k2":
        raise ValueError("broken")
    return sample

def number(sample):
    return 3

constant = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of functions in the current folder; a module is imported only once, so it is unique."""
    name = f"functions_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_a_function_returns_one_sample_several_or_none(module: str, small_shard: str, proc: Proc) -> None:
    samples, _ = proc("--python", f"{module}:twice", small_shard)
    assert list(samples)[:3] == ["d/k0-0", "d/k0-1", "d/k1-0"]
    samples, _ = proc("--python", f"{module}.py:without_k7", small_shard)
    assert list(samples) == [f"d/k{number}" for number in range(7)]
    _, error = proc("--python", f"{module}:number", small_shard, code=1)
    assert "returned a value of type int: return a sample (a dict), several samples, or None" in error
    _, error = proc("--python", f"{module}:none", small_shard, code=1)
    assert "has no function 'none'" in error


def test_a_failing_sample_ends_the_run_or_is_kept_or_skipped(module: str, small_shard: str, proc: Proc) -> None:
    _, error = proc("--python", f"{module}:fails", small_shard, code=1)
    assert "broken" in error
    samples, error = proc("--python", f"{module}:fails", "-e", "keep", small_shard)
    assert len(samples) == 8
    assert "penstock: kept unchanged: 'd/k2'" in error
    assert "ValueError: broken" in error
    samples, _ = proc("--python", f"{module}:fails", "-e", "skip", small_shard)
    assert len(samples) == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}", "does not name a function: write MODULE:FUNCTION"),
        ("{}:", "does not name a function"),
        ("{}:none", "has no function 'none'; it has "),
        ("{}:constant", "has no function 'constant'"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
    ],
)
def test_a_name_that_is_not_a_function_is_refused(name: str, message: str, module: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_function(name.format(module))


def test_a_function_gets_decoded_samples_in_processes(small_shard: str, tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "functions9.py").write_text(
        "import os\n\ndef plus(sample):\n"
        "    return {**sample, 'n.txt': str(sample['cls'] + 1), 'p.txt': str(os.getpid())}\n"
    )
    words = [warm_python, "-m", "penstock", "proc", "--python", "functions9:plus", "--decode", "rgb8", "-p", "2"]
    subprocess.run([*words, small_shard, "-o", "out.tar"], cwd=tmp_path, check=True)
    rows = ps.read_tar(str(tmp_path / "out.tar")).take_all()
    assert [row["n.txt"] for row in rows] == [b"%d" % (number + 1) for number in range(8)]
    assert {row["p.txt"] for row in rows} != {str(os.getpid()).encode()}


def test_a_module_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_module_of_a_test.py").write_text("def f(:\n")
    with pytest.raises(PlanError, match=r"broken_module_of_a_test failed: SyntaxError: .*line 1\)"):
        load_function("broken_module_of_a_test:f")
