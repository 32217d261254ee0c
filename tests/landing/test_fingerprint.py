"""A fingerprint is the same in every process, and differs where the samples or the code may."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.formats.tar import TarWriter
from penstock.landing.fingerprint import code_digest, fingerprint_of
from penstock.landing.position import exact_program
from penstock.storage import Memory


def stages_of(ds: ps.Dataset, epoch: int = 0) -> str:
    return fingerprint_of(exact_program(ds.plan), epoch).stages


def source_of(ds: ps.Dataset, epoch: int = 0) -> str:
    return fingerprint_of(exact_program(ds.plan), epoch).source


def compiled(code: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(code), scope)
    function: Callable[..., Any] = scope["f"]
    return function


FUNCTION = """
import helper as helper
FACTOR = 2
def g(x): return x + 1
class Model:
    bias = 1
    def __call__(self, x): return x * self.bias
def f(sample, shift=3):
    inner = lambda x: x * FACTOR in {"a", "b", "c"}
    return inner(g(sample)) + shift + Model()(sample)
"""


@pytest.mark.parametrize(
    "edit",
    [
        ("x + 1", "x + 2"),
        ("FACTOR = 2", "FACTOR = 3"),
        ("shift=3", "shift=4"),
        ("bias = 1", "bias = 2"),
        ("x * self.bias", "x / self.bias"),
        ('"c"}', '"d"}'),
        ("+ shift", "- shift"),
    ],
    ids=str,
)
def test_an_edit_anywhere_in_the_code_changes_the_fingerprint(edit: tuple[str, str]) -> None:
    code = FUNCTION.replace("import helper as helper\n", "")
    same = code.replace("def g", "# a comment\n\ndef g")
    assert code_digest(compiled(code)) == code_digest(compiled(same)) != code_digest(compiled(code.replace(*edit)))


def test_a_module_of_the_user_is_covered_and_an_installed_one_is_not(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, numpy, json\nimport helper\nfrom penstock.landing import code_digest\n"
        "def f(x): return helper.g(x), numpy.abs(x), json.dumps(x), {'a', 'b', x}\nprint(code_digest(f))"
    )

    def run(helper: str, seed: str) -> str:
        (tmp_path / "helper.py").write_text(helper)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
        ).stdout

    one = run("def g(x): return 1", "1")
    assert one == run("def g(x): return 1", "2")
    assert one != run("def g(x): return 2", "1")


@dataclass
class Scale:
    by: float

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"n": sample["n"] * self.by}


def test_arguments_closures_and_state_count_and_workers_do_not() -> None:
    ds = ps.from_items([{"n": 1}])
    base = stages_of(ds.map(Scale(2)))
    assert base == stages_of(ds.map(Scale(2), workers=3, retries=2).on("serial"))
    assert base != stages_of(ds.map(Scale(3)))
    assert stages_of(ds.map(partial(max, 1))) != stages_of(ds.map(partial(max, 2)))
    assert stages_of(ds.rename(a="n")) != stages_of(ds.rename(b="n"))
    assert stages_of(ds.map(Scale(2)).on_error("skip")) != base
    numbers, same, other = (np.array(values) for values in ([1, 2], [1, 2], [1, 3]))
    assert code_digest(lambda: numbers) == code_digest(lambda: same) != code_digest(lambda: other)
    assert code_digest(cache(lambda: 1)) == code_digest(cache(lambda: 1)) != code_digest(cache(lambda: 2))
    assert code_digest(deque([1])) == code_digest(deque([2]))  # an object of a library: its content is not seen


def test_the_stamps_of_files_and_the_items_in_memory_count(tmp_path: Path) -> None:
    ps.from_items([{"cls": 1}]).write_tar(tmp_path / "a")
    before = source_of(ps.read_tar(str(tmp_path / "a")))
    assert before == source_of(ps.read_tar(f"{tmp_path}/a/*.tar", workers=2))
    os.utime(tmp_path / "a" / "shard-000000.tar", ns=(1, 1))
    assert before != source_of(ps.read_tar(str(tmp_path / "a")))
    assert source_of(ps.from_items([{"n": 1}])) != source_of(ps.from_items([{"n": 2}]))
    assert source_of(ps.from_items([{"n": 1}]), 1) != source_of(ps.from_items([{"n": 1}]), 2)
    assert source_of(ps.from_items([{"n": 1}]).seed(1)) != source_of(ps.from_items([{"n": 1}]).seed(2))


@pytest.mark.parametrize("pattern", ["a", "a/", "a/*.tar", "?/shard-00000[0-9].tar"])
def test_the_tags_of_remote_files_count_where_they_are_listed(pattern: str) -> None:
    def write(text: str) -> None:
        with Memory().put("memory://tags/a/shard-000000.tar") as upload, io.BytesIO() as file:
            with TarWriter(file) as shard:
                shard.write({"__key__": "k", "txt": text})
            upload.write(file.getvalue())
            upload.commit()

    write("a")
    before = source_of(ps.read_tar(f"memory://tags/{pattern}"))
    assert source_of(ps.read_tar(f"memory://tags/{pattern}")) == before
    write("b")  # the same name, size and count
    assert source_of(ps.read_tar(f"memory://tags/{pattern}")) != before


def test_functions_that_call_themselves_and_each_other_have_a_fingerprint() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert code_digest(even) == code_digest(even) != code_digest(odd)
