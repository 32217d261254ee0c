"""A plan says what can be recut, and ranks that must be equal are equal."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.dataset import Dataset, read_json, read_tar, read_text
from penstock.engines import Program
from penstock.errors import PlanError
from penstock.plan import col
from penstock.testing import numbers

UNEVEN: tuple[Literal["drop", "pad"], ...] = ("drop", "pad")


def f(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize(
    ("ds", "stage"),
    [
        (numbers((9,)).map(f).flat_map(f).shuffle(3).batched(2), None),
        (numbers((9,)).batched(2).map(f).filter(f).flat_map(f), None),
        (numbers((9,)).flat_map(f).shuffle(3).map(f).batched(2).map(f), None),
        (numbers((9,)).batched(2).map(f).batched(3), "batched(3)"),
        (numbers((9,)).batched(2).shuffle(3), "shuffle(window=3)"),
        (numbers((9,)).flat_map(f).shuffle(3).map(f).flat_map(f).shuffle(4), "shuffle(window=4)"),
        (numbers((9,)).filter(f).limit(2), "limit(2)"),
        (numbers((9,)).batched_by(len, 3), "batched_by(len, 3)"),
    ],
)
def test_a_plan_names_the_stage_that_keeps_it_from_being_recut(ds: Dataset, stage: str | None) -> None:
    problem = Program(ds.plan).recut_problem
    assert problem is None if stage is None else problem is not None and problem.startswith(stage)


def test_only_a_group_that_can_be_delivered_in_part_and_recut_goes_to_other_ranks() -> None:
    copies = numbers((9,)).flat_map(f)
    assert Program(copies.shuffle(3).map(f).plan).window_level == 1
    assert Program(copies.shuffle(3).batched(2).batched(2).plan).window_level is None
    assert Program(copies.plan).window_level is None
    assert Program(copies.batched(2).unbatched().plan).window_level == 1
    assert Program(copies.batched(2).map(f).plan).window_level is None


def test_equal_ranks_stay_equal_after_a_limit_per_rank() -> None:
    for uneven in UNEVEN:
        parts = [numbers((11,)).shard(rank, 2, uneven=uneven) for rank in range(2)]
        assert len({len(list(part.limit(3))) for part in parts}) == 1
        assert len({len(list(part.skip(2))) for part in parts}) == 1
        assert len({len(list(part.skip(1).limit(99))) for part in parts}) == 1
    assert [s["x"] for s in numbers((11,)).shard(0, 2, uneven="pad").limit(3)] == [0, 1, 2]
    assert [s.get("__pad__") for s in numbers((3,)).shard(0, 2, uneven="pad").limit(2)] == [None, True]


def test_ranks_cannot_be_equal_without_counts() -> None:
    with pytest.raises(PlanError, match="needs the counts of the shards"):
        list(numbers((3, 4), hidden=True).shard(0, 2, uneven="drop"))


def tar_of(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.mark.parametrize(
    ("read", "empty", "content"),
    [
        (read_tar, tar_of(), tar_of(a_text=b"a")),
        (read_json, b"", b'{"text": "a"}\n'),
        (read_text, b"", b"a\n"),
    ],
)
def test_a_shard_without_samples_hides_no_misspelt_field(
    read: Callable[[str], Dataset], empty: bytes, content: bytes, tmp_path: Path
) -> None:
    for name, data in {"a": empty, "b": content, "c": empty}.items():
        (tmp_path / name).write_bytes(data)
    ds = read(f"{tmp_path}/?")
    assert len(ds.select("text").take_all()) == 1
    for misspelt in (ds.drop("texd"), ds.filter(col("texd") == "a")):
        with pytest.raises(PlanError, match="no field 'texd'; the fields are text"):
            misspelt.take_all()
