"""A job on Ray has the same results as in local processes; the engine has its own tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import penstock as ps
from penstock.jobs import Out

FULL = os.environ.get("PENSTOCK_FULL") == "1"

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

pytestmark = [pytest.mark.usefixtures("shared_ray"), pytest.mark.xdist_group("ray")]


def work(path: Path, out: Out) -> Iterator[dict[str, Any]]:
    number = int(path.stem)
    out.path(f"{number % 3}/{number}").write_text(path.read_text())
    yield {"source": path, "own": out.input}
    if number == 3:
        os._exit(3)
    if number % 4 == 1:
        raise ValueError(f"{number} fails")


if FULL:  # the engine has its own tests

    def test_ray_writes_what_processes_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("in").mkdir()
        for number in range(9):
            Path(f"in/{number}.txt").write_text(str(number))
        ray = ps.process("in/*.txt", work, "ray", "ray.parquet", 2, retries=1, engine="ray")
        local = ps.process("in/*.txt", work, "local", "local.parquet", 2, retries=1)
        assert ray.take_all() == local.take_all()
        assert len(ray) == 6
        assert Path("ray.parquet").read_bytes() == Path("local.parquet").read_bytes()
        failed = [
            [(failure.input, failure.traceback, failure.tries) for failure in meta.failures] for meta in (ray, local)
        ]
        assert failed[0] == failed[1]
        assert [failure.error for failure in ray.failures][::2] == ["ValueError: 1 fails", "ValueError: 5 fails"]
        assert "worker process ended" in ray.failures[1].error
        files = [sorted(str(path.relative_to(out)) for path in Path(out).rglob("*")) for out in ("ray", "local")]
        assert files[0] == files[1]
        assert ps.process([f"in/{n}.txt" for n in (0, 2, 4)], work, "ray", workers=2, engine="ray").worked == 0
