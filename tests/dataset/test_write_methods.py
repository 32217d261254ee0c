"""An interrupted run of write_tar or write_parquet is resumed: a rerun writes what is missing."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.storage import open_storage

SAMPLES = 1000
KILLED_AT = 700

# A slow model that can kill its process at a certain sample.
INFERENCE = f"""
import os, signal, sys, time
import numpy as np
import penstock as ps

out = sys.argv[1]

class Predictor:
    def __init__(self):
        self.note("constructed")

    def __call__(self, batch):
        if sys.argv[3] == "kill" and batch["n"].max() >= {KILLED_AT}:
            kind = os.path.splitext(out)[1] or os.path.basename(out)
            while sum(name.endswith(kind) for *_, names in os.walk(out) for name in names) < 5:  # by other threads
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        self.note(f"{{len(batch['n'])}}")
        return {{"twice.npy": np.stack([batch["n"]] * 2, 1)}}

    def note(self, what):
        with open(sys.argv[2], "a") as file:
            file.write(what + "\\n")

items = [{{"n": number}} for number in range({SAMPLES})]
predicted = ps.from_items(items).map_batches(Predictor, batch_size=50, workers=2)
if out.endswith("tar"):
    predicted.write_tar(out, max_samples=100)
else:
    predicted.rename(twice="twice.npy").write_parquet(out, max_samples=100)
"""


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_rerun_of_killed_inference_predicts_only_missing_samples(kind: str, tmp_path: Path, warm_python: str) -> None:
    def run(kill: str) -> list[str]:
        log = tmp_path / f"{kill}.log"
        call = [warm_python, "-c", INFERENCE, str(tmp_path / kind), str(log), kill]
        assert (subprocess.run(call).returncode == 0) is (kill == "no")
        return log.read_text().split()

    run("kill")
    again = run("no")
    assert again.count("constructed") == 2  # once in every worker
    assert sum(int(line) for line in again if line != "constructed") < SAMPLES - KILLED_AT // 3
    read: Any = ps.read_tar if kind == "tar" else ps.read_parquet
    field = "twice.npy" if kind == "tar" else "twice"
    found = [sample[field].tolist() for sample in read(str(tmp_path / kind)).decode()]
    assert found == [[number, number] for number in range(SAMPLES)]
    assert len(list((tmp_path / kind).glob(f"*.{kind}"))) == 10


@pytest.mark.parametrize("old", [{"resume": True}, {"append": True}], ids=str)
def test_the_old_parameters_are_gone(old: dict[str, bool], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=next(iter(old))):
        ps.from_items([{"cls": 1}]).write_tar(tmp_path, **old)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["write_tar", "write_parquet", "write_csv", "write_json", "write_tfrecords"])
def test_an_unknown_mode_is_refused_before_anything_is_written(method: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="mode='over'"):
        getattr(ps.from_items([{"cls": 1}]), method)(tmp_path / "out", mode="over")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize("method", ["write_tar", "write_parquet", "write_csv", "write_json", "write_tfrecords"])
def test_modes_mean_the_same_for_every_writer(method: str, where: str, tmp_path: Path) -> None:
    url = str(tmp_path / "out") if where == "disk" else f"memory://modes/{method}"
    read: Any = getattr(ps, method.replace("write", "read"))

    def write(count: int, **options: Any) -> Any:
        return getattr(ps.from_items([{"cls": n} for n in range(count)]), method)(url, 3_000, **options)

    def numbers() -> list[int]:
        return [int(sample["cls"]) for sample in read(url)]

    many, fewer = (60, 40) if method == "write_tar" else (400, 300)  # each file of a tar has one or two of them
    first = write(many)
    assert write(many) == first  # complete: returned as it is
    for other in ({"count": many + 1}, {"count": many, "version": "2"}):
        with pytest.raises(PlanError, match="mode='append' adds to what is there, mode='replace' replaces it"):
            write(**other)
    assert numbers() == [*range(many)]
    second = write(fewer, mode="replace")
    assert numbers() == [*range(fewer)]
    assert not {*first.shards} & {*second.shards}
    added = write(5, mode="append")
    assert numbers() == [*range(fewer), *range(5)]
    assert write(5, mode="append").shards != added.shards
    assert numbers() == [*range(fewer), *range(5), *range(5)]
    names = [one.url.rpartition("/")[2] for one in open_storage(url).list(url)]
    assert not [name for name in names if "journal" in name or "lock" in name]


def test_edited_code_is_another_run(tmp_path: Path) -> None:
    def source(scale: int) -> ps.Dataset:
        return ps.from_items([{"n": n} for n in range(40)]).map(lambda s: {"n": s["n"] * scale})

    source(2).write_json(tmp_path / "a.jsonl")
    assert source(2).write_json(tmp_path / "a.jsonl").samples == 40
    with pytest.raises(PlanError, match="mode='replace'"):
        source(3).write_json(tmp_path / "a.jsonl")


@pytest.mark.parametrize("argument", ["resume", "append", "replace"])
def test_other_words_for_the_mode_are_answered_with_the_mode(argument: str, tmp_path: Path) -> None:
    ds = ps.from_items([{"n": 1}])
    names = ["write_tar", "write_parquet", "write_csv", "write_json", "write_tfrecords"]
    writes: list[Any] = [*(getattr(ds, name) for name in names), partial(ps.pack, ds)]
    for write in writes:
        with pytest.raises(TypeError, match=rf"has no argument '{argument}'.* mode='append' adds .* mode='replace'"):
            write(tmp_path / "out", **{argument: True})
    assert not (tmp_path / "out").exists()
