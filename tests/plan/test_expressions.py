from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.plan import Condition, col
from penstock.plan.expressions import Expression, Extent

ROWS: list[dict[str, Any]] = [{"x": x, "s": s} for x in (None, 1, 2, 3) for s in (None, "a", "b")]
CONDITIONS: list[tuple[Condition, Any]] = [
    (col("x") == 2, lambda x, s: x == 2),
    (col("x") != 2, lambda x, s: x is not None and x != 2),
    (col("x") < 2, lambda x, s: x is not None and x < 2),
    (col("x") <= 2, lambda x, s: x is not None and x <= 2),
    (col("x") > 2, lambda x, s: x is not None and x > 2),
    (col("x") >= 2, lambda x, s: x is not None and x >= 2),
    (col("x").isin([1, 3]), lambda x, s: x in (1, 3)),
    (~col("x").isin([1, 3]), lambda x, s: x == 2),
    (col("x") % 2 == 1, lambda x, s: x in (1, 3)),
    (~(col("x") * 2 - 1 < 3), lambda x, s: x in (2, 3)),
    ((col("x") + 1 != 3) & (col("s") == "a"), lambda x, s: x in (1, 3) and s == "a"),
    (col("s") < col("s") + "c", lambda x, s: s is not None),
    (col("s").is_null(), lambda x, s: s is None),
    (~col("s").is_null(), lambda x, s: s is not None),
    (~(col("x") == 2), lambda x, s: x in (1, 3)),
    ((col("x") == 2) & (col("s") == "a"), lambda x, s: x == 2 and s == "a"),
    ((col("x") == 2) | (col("s") == "a"), lambda x, s: x == 2 or s == "a"),
    (~((col("x") == 2) | (col("s") == "a")), lambda x, s: x in (1, 3) and s == "b"),
    (~((col("x") == 2) & (col("s") == "a")), lambda x, s: x in (1, 3) or s == "b"),
]


@pytest.mark.parametrize(
    ("condition", "expected"), CONDITIONS, ids=lambda value: str(value)[:40] if isinstance(value, Condition) else ""
)
def test_a_filter_keeps_the_rows_for_which_the_condition_is_true(condition: Condition, expected: Any) -> None:
    kept = ps.from_items(ROWS).filter(condition).take_all()
    assert kept == [row for row in ROWS if expected(row["x"], row["s"])]


@pytest.mark.parametrize(
    ("condition", "expected"), CONDITIONS, ids=lambda value: str(value)[:40] if isinstance(value, Condition) else ""
)
def test_tables_keep_the_same_rows(condition: Condition, expected: Any) -> None:
    table = pa.Table.from_pylist(ROWS)
    assert ps.from_arrow(table).filter(condition).take_all() == [row for row in ROWS if expected(row["x"], row["s"])]


@pytest.mark.parametrize(
    ("condition", "expected"), CONDITIONS, ids=lambda value: str(value)[:40] if isinstance(value, Condition) else ""
)
def test_a_condition_that_holds_for_a_row_is_possible_for_its_extents(condition: Condition, expected: Any) -> None:
    for row in ROWS:
        extents = {name: Extent(value, value, int(value is None), 1) for name, value in row.items()}
        if expected(row["x"], row["s"]):
            assert condition.possible(extents)
        assert condition.possible(extents) or not expected(row["x"], row["s"])


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_isin_compares_floats_as_equality_does(kind: Any) -> None:
    rows = [{"x": x} for x in (0.0, -0.0, math.nan, 1.0, None)]
    for ds in (ps.from_items(rows), ps.from_arrow(pa.table({"x": pa.array([row["x"] for row in rows], kind)}))):
        assert str(ds.filter(col("x").isin([-0.0, math.nan])).take_all()) == "[{'x': 0.0}, {'x': -0.0}]"
        assert str(ds.filter(~col("x").isin([0, np.float32("nan")])).take_all()) == "[{'x': nan}, {'x': 1.0}]"


def test_extents_rule_rows_out() -> None:
    extents = {"x": Extent(5, 9, 0, 10)}
    for impossible in (col("x") < 5, col("x") == 4, col("x") > 9, col("x").is_null(), col("x").isin([1, 12])):
        assert not impossible.possible(extents)
        assert (impossible | (col("y") == 1)).possible(extents)
        assert not (impossible & (col("y") == 1)).possible(extents)
        assert (~impossible).possible(extents)
    assert not (~(col("x") >= 5)).possible(extents)
    assert not (col("x") != 7).possible({"x": Extent(7, 7, 0, 3)})
    assert not (col("x") != 7).possible({"x": Extent(None, None, 3, 3)})


def test_bounds_do_not_rule_out_nan() -> None:
    extents = {"x": Extent(5.0, 5.0, 0, 2)}
    rows = [{"x": 5.0}, {"x": math.nan}]
    for condition in (col("x") != 5.0, ~(col("x") < 7.0), ~(col("x") == 5.0)):
        assert any(condition.holds(row) for row in rows)
        assert condition.possible(extents)


def test_comparing_incompatible_types_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        (col("x") < "a").possible({"x": Extent(1, 2, 0, 2)})


def test_a_condition_is_a_value() -> None:
    assert (col("x") == 3) & (col("s") == "a") == ((col("x") == 3) & (col("s") == "a"))
    assert hash(col("x") % 2 == 1) == hash(col("x") % 2 == 1)
    assert (col("x") % 2 == 1) & (col("x") == 3) != ((col("x") % 3 == 1) & (col("x") == 3))
    ds = ps.from_items(ROWS).filter((col("x") == 3) | ~col("s").isin(["a"]) | (col("x") / 2 > 1))
    assert pickle.loads(pickle.dumps(ds)).plan.stages == ds.plan.stages
    assert "filter(((col('x') == 3) | ~col('s').isin(['a'])) | ((col('x') / 2) > 1))" in repr(ds)


@pytest.mark.parametrize(
    "invalid",
    [
        lambda: col(""),
        lambda: col("x") == None,  # noqa: E711
        lambda: col("x") % 2 == None,  # noqa: E711
        lambda: col("x") == (col("y") == 1),
        lambda: col("x").isin("abc"),
        lambda: col("x").isin([None]),
        lambda: (col("x") == 1) & True,  # type: ignore[operator]
        lambda: bool(col("x") == 1),
        lambda: ps.from_items(ROWS).filter(col("x") == 1, workers=2),
        lambda: ps.from_items(ROWS).filter(3),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_expression_is_refused_when_it_is_created(invalid: Any) -> None:
    with pytest.raises(PlanError):
        invalid()


def test_a_field_that_no_sample_has_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="no field 'y'"):
        ps.from_items(ROWS).filter(col("y") == 1).take_all()


def test_a_filter_reads_the_fields_of_its_condition() -> None:
    ds = ps.from_items(ROWS).filter(col("x") == 3).select("s")
    assert "fields read: s, x" in ds.explain()


@pytest.mark.parametrize(
    "condition",
    [
        *(condition for condition, _ in CONDITIONS),
        (col("x") > 3) & ((col("y") < 1) | ~(col("z") != "a'b")) & ~~col("x").is_null(),
        (col("x") >= float("inf")) | (col("x") <= -1.5) | col("x").isin([1, float("-inf"), b"z"]),
    ],
    ids=repr,
)
def test_the_repr_of_a_condition_is_the_code_that_makes_it(condition: Condition) -> None:
    assert eval(repr(condition), {"col": ps.col}) == condition


@pytest.mark.parametrize(
    "expression",
    [
        -col("x"),
        (col("x") + 1) * 2 - col("y") / 3,
        7 // (col("x") % 5) ** 2,
        1 - (2 * col("y")),
        col("x") * float("inf"),
        2 ** col("x"),
    ],
    ids=repr,
)
def test_the_repr_of_an_expression_is_the_code_that_makes_it(expression: Expression) -> None:
    again = eval(repr(expression), {"col": ps.col})
    assert repr(again) == repr(expression)
    assert again.of({"x": 8, "y": 3.5}) == expression.of({"x": 8, "y": 3.5})
