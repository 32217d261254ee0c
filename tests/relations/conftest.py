"""Samples for the tests of groups, sorting and joins, and what a plain loop computes from them."""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st

import penstock as ps

EXAMPLES = 300 if os.environ.get("PENSTOCK_FULL") else 6

_random = random.Random(0)
ROWS: list[dict[str, Any]] = [
    {"k": _random.choice("abc"), "x": _random.randrange(100), "y": _random.random()} for _ in range(200)
]

KEYS = [
    st.integers(-3, 3),
    st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf, -2.0]),
    st.sampled_from(["", "a", "b", "ä", "\U0001f600"]),
    st.sampled_from([b"", b"a", b"\xff"]),
    st.booleans(),
]
NUMBERS = [
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-5, 5),
    st.floats(-1e6, 1e6, width=32),
    st.sampled_from([math.nan, 1.0, -2.5, 0.0]),
]


def groups() -> dict[str, list[dict[str, Any]]]:
    """Return ``ROWS`` grouped by ``k``."""
    by_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in ROWS:
        by_key[row["k"]].append(row)
    return dict(sorted(by_key.items()))


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Generate samples whose fields have one type each, and some missing values."""
    kinds = {"k": draw(st.sampled_from(KEYS)), "j": draw(st.sampled_from(KEYS)), "x": draw(st.sampled_from(NUMBERS))}
    fields = {name: draw(st.sampled_from([kind, st.none() | kind])) for name, kind in kinds.items()}
    return draw(st.lists(st.fixed_dictionaries(fields), min_size=1, max_size=30))


def datasets(rows: list[dict[str, Any]]) -> list[ps.Dataset]:
    """Return the same samples as rows, as columns in two batches, and as columns that are all spilled."""
    numbered = [{**row, "n": n} for n, row in enumerate(rows)]
    table = pa.table({name: pa.array([row[name] for row in numbered], from_pandas=False) for name in numbered[0]})
    pieces = pa.concat_tables([table.slice(0, len(rows) // 2), table.slice(len(rows) // 2)])
    return [ps.from_items(numbered), ps.from_arrow(pieces), ps.from_arrow(pieces).on("local", memory=1)]


def same(got: Any, want: Any) -> bool:
    """Return whether values and types are equal; NaN equals itself, floats are compared approximately."""
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[name], want[name]) for name in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, float):
        return type(got) is float and (got == pytest.approx(want, nan_ok=True, rel=1e-9, abs=1e-9))
    return type(got) is type(want) and bool(got == want)


def key_of(row: dict[str, Any], fields: Sequence[str]) -> tuple[Any, ...]:
    return tuple("NaN" if row[f] != row[f] else row[f] for f in fields)


def in_groups(rows: list[dict[str, Any]], fields: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return the samples grouped by their values, with the groups sorted by these."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(key_of(row, fields), []).append(row)
    return sorted(found.values(), key=lambda group: [sort_key(group[0][field]) for field in fields])


def sort_key(value: Any) -> tuple[int, Any]:
    """Return a key that sorts values first, then ``None``, then NaN."""
    return (1, 0) if value is None else (2, 0) if value != value else (0, value)
