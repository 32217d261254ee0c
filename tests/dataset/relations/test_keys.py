"""Values are numbered by equality, as Python compares them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.dataset.relations import key_values


def test_tuples_lists_and_arrays_are_equal_keys() -> None:
    rows = [{"dims": shape} for shape in [(4, 6), [4, 6], np.array([2, 2]), (2, 2, 3)]]
    got = ps.from_items(rows).groupby("dims").count().take_all()
    assert [(list(row["dims"]), row["count"]) for row in got] == [([2, 2], 1), ([2, 2, 3], 1), ([4, 6], 2)]


def test_mixed_values_are_compared_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [{"k": k, "x": x} for k, x in [(1, 1), (1.0, 2.5), ("b", 1), (True, 1), (None, 3)]]
    rows += [{"k": (1, 2), "x": 2**70}, {"k": np.array([1, 2]), "x": 1}]
    for _ in range(2):
        got = ps.from_items(rows).groupby("k").sum("x").take_all()
        assert [(row["k"], row["x_sum"]) for row in got] == [(1, 4.5), ("b", 1), ((1, 2), 2**70 + 1), (None, 3)]
        assert [row["x"] for row in ps.from_items(rows).sort("k")] == [1, 2.5, 1, 1, 2**70, 1, 3]
        assert ps.from_items(rows).unique("k")[:2] == [1, "b"]
        monkeypatch.setattr(key_values, "has_arrow", lambda: False)  # as if pyarrow was not installed
