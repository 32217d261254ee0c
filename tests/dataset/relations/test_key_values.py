"""Values of fields: a missing one is an error that names the field."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import DataError, PenstockError
from tests.dataset.relations.conftest import ROWS


@pytest.mark.parametrize(
    "run", [lambda ds: ds.groupby("z").count().take_all(), lambda ds: ds.sort("z").take(1), lambda ds: ds.unique("z")]
)
def test_a_missing_field_is_named(run: Any) -> None:
    with pytest.raises(PenstockError, match="'z'"):
        run(ps.from_items(ROWS))


@pytest.mark.parametrize("verb", [lambda ds: ds.sort("z"), lambda ds: ds.distinct("z"), lambda ds: ds.join(ds, "z")])
def test_a_missing_column_is_named(verb: Any) -> None:
    with pytest.raises(DataError, match="no field 'z', only 'k'"):
        verb(ps.from_arrow(pa.table({"k": [1]}))).take_all()
