"""Row groups that statistics rule out change nothing: a plan over columns yields what it yields over rows."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import DataError, PenstockError, PlanError
from penstock.plan.expressions import Condition
from penstock.testing import fingerprint

SEEDS = range(3000 if os.environ.get("PENSTOCK_FULL") == "1" else 60)
Chain = Callable[[ps.Dataset], ps.Dataset]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of 24 rows in row groups of 4; ``i`` and ``s`` ascend, so that statistics rule out many of them."""
    rows = range(24)
    table = pa.table(
        {
            "i": pa.array(rows, pa.int32()),
            "f": pa.array([None if n % 5 == 2 else float("nan") if n == 9 else n / 2 for n in rows]),
            "s": pa.array([f"s{n:02}" for n in rows]),
            "n": pa.array([None if n < 8 else n % 3 for n in rows], pa.int64()),
            "v": pa.array([[n, -n] for n in rows], pa.list_(pa.int64())),
            "plain": pa.array([f"p{n % 4}" for n in rows]),  # has no statistics
        }
    )
    path = tmp_path_factory.mktemp("pruned") / "t.parquet"
    statistics = ["i", "f", "s", "n", "v.list.element"]
    pq.write_table(table, path, row_group_size=4, write_statistics=statistics)
    return str(path)


def rows_of(path: str) -> ps.Dataset:
    return ps.from_items(list(ps.read_parquet(path)))


def test_a_condition_in_a_branch_of_a_union_drops_the_row_groups_that_it_rules_out(path: str) -> None:
    items = ps.from_items([{"i": 100}, {"i": 101}])
    joined = ps.read_parquet(path).filter(ps.col("i") >= 12).union(items)
    assert [sample["i"] for sample in joined] == [*range(12, 24), 100, 101]
    skipping = joined.on_error("skip")
    assert len(list(skipping)) == 14
    assert sum(segment.skips for segment in skipping.stats().segments) == 0


def test_a_condition_in_a_branch_of_a_mix_drops_the_row_groups_that_it_rules_out(path: str) -> None:
    table = ps.read_parquet(path).filter(ps.col("i") < 4)
    mixed = ps.mix([table, ps.from_items([{"i": 100 + n} for n in range(24)])], weights=[0.5, 0.5], stop="all")
    assert sorted(sample["i"] for sample in mixed) == [*range(4), *range(100, 124)]


@pytest.mark.parametrize(
    "chain",
    [
        lambda ds: ds.select("i").filter(ps.col("f") > 900),
        lambda ds: ds.drop("f").filter(ps.col("f") > 900),
        lambda ds: ds.filter(ps.col("plain") > 3).filter(ps.col("i") > 900),
        lambda ds: ds.filter((ps.col("plain") > 3) & (ps.col("i") > 900)),
        lambda ds: ds.select("i", "none").filter(ps.col("i") > 900),
        lambda ds: ds.filter((ps.col("v") == 3) & (ps.col("i") > 900)),
    ],
)
def test_samples_that_fail_before_a_condition_decides_fail_whatever_the_statistics_say(chain: Chain, path: str) -> None:
    with pytest.raises((DataError, PlanError)):
        list(chain(ps.read_parquet(path)))


def test_a_condition_on_a_column_that_is_not_read_fails_whatever_the_statistics_say(path: str) -> None:
    with pytest.raises(PlanError, match="no field 'f'"):
        list(ps.read_parquet(path, columns=["i"]).filter(ps.col("f") > 900))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_plan_over_columns_yields_what_it_yields_over_rows(seed: int, path: str) -> None:
    chain = random_chain(random.Random(seed))
    columns = outcome(chain(ps.read_parquet(path)))
    if columns == ([], "PlanError"):  # the schema shows, before anything is read, that no row has a field
        with pytest.raises(PlanError, match="no field"):
            list(chain(ps.read_parquet(path)))
    else:
        assert columns == outcome(chain(rows_of(path)))


def outcome(ds: ps.Dataset) -> Any:
    """The samples that a plan yields, how many it skips, and the kind of error that ends it."""
    found = []
    try:
        for sample in ds.on("serial"):
            found.append(fingerprint(nan_as_text(sample)))
    except PenstockError as exc:
        return found, type(exc).__name__
    return found, None


def nan_as_text(value: Any) -> Any:
    """The value with NaN, which differs from itself, as text."""
    if isinstance(value, dict):
        return {name: nan_as_text(inner) for name, inner in value.items()}
    return "nan" if isinstance(value, float) and value != value else value


def random_chain(rng: random.Random) -> Chain:
    """Up to four stages, some in a branch of a union or mix; under skip for some seeds."""
    steps = [random_stage(rng) for _ in range(rng.randint(1, 4))]
    split, kind, skip = rng.randint(0, len(steps)), rng.choice(["plain", "union", "mix", "after"]), rng.random() < 0.4
    order = rng.random() < 0.3

    def chain(ds: ps.Dataset) -> ps.Dataset:
        others = ps.from_items([{"i": 100 + n, "f": n / 2, "s": "x", "n": n, "v": 1, "plain": "y"} for n in range(5)])
        for step in steps[:split]:
            ds = step(ds)
        if kind == "union":
            ds = ds.union(others)
        elif kind == "after":
            ds = others.union(ds)
        elif kind == "mix":
            ds = ps.mix([ds, others], weights=[0.7, 0.3], stop="all")
        for step in steps[split:]:
            ds = step(ds)
        ds = ds.shuffle(all=True, seed=3) if order else ds
        return ds.on_error("skip") if skip else ds

    return chain


def random_stage(rng: random.Random) -> Chain:
    kind = rng.randrange(10)
    names = rng.sample(["i", "f", "s", "n", "v", "plain"], rng.randint(1, 5))
    if kind < 6:
        condition = random_condition(rng, 2)
        return lambda ds: ds.filter(condition)
    if kind == 6:
        return lambda ds: ds.select(*names)
    if kind == 7:
        return lambda ds: ds.drop(*names[:2])
    if kind == 8:
        return lambda ds: ds.rename(other=names[0])
    return lambda ds: ds.with_columns(twice=ps.col(names[0]) * 2)


def random_condition(rng: random.Random, depth: int) -> Condition:
    if depth and rng.random() < 0.4:
        left, right = random_condition(rng, depth - 1), random_condition(rng, depth - 1)
        return rng.choice([left & right, left | right, ~left])
    name = rng.choice(["i", "i", "f", "s", "n", "n", "v", "plain", "other", "twice"])
    value: Any = rng.choice([rng.randint(-2, 26), rng.randint(0, 12) / 2, f"s{rng.randint(0, 26):02}", True])
    if name in "ifn" and rng.random() < 0.8:
        value = rng.randint(-2, 26)
    if name == "s" and rng.random() < 0.8:
        value = f"s{rng.randint(0, 26):02}"
    column = ps.col(name)
    if rng.random() < 0.1:
        return column.is_null()
    if rng.random() < 0.15:
        return column.isin([value, 3, "s05"])
    operators = [column.__eq__, column.__ne__, column.__lt__, column.__le__, column.__gt__, column.__ge__]
    return rng.choice(operators)(value)
