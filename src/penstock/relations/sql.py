"""``sql``: a query over the columns of all samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engines import Program
from penstock.errors import PlanError
from penstock.formats.tables import table_from
from penstock.plan import Columns, Plan
from penstock.relations.database import StagedTable, database, memory_of
from penstock.relations.groups import rows_of
from penstock.relations.keys import chunks
from penstock.relations.source import Rows, no_samples
from penstock.relations.store import SampleStore

_RESULT_ROWS = 1 << 17  # that are fetched at a time
_DAY_NS = 24 * 60 * 60 * 10**9


@dataclass(frozen=True, slots=True)
class Queried:
    """The rows of a query over the table ``samples``."""

    query: str

    def __call__(self, runs: Iterator[Sequence[Any]], plan: Plan) -> Rows:
        # One thread: a query without an order gives its rows, and adds floats, in the same order every time.
        with database(plan, "sql", threads=1) as con:
            import duckdb

            samples, store = StagedTable(con, "samples", "sql", times=True), SampleStore(memory_of(plan))
            for items in chunks(runs, memory_of(plan)):
                samples.add(self._checked(table_from(items)))
            if samples.schema is None and isinstance(empty := no_samples(Program(plan)), Columns):
                samples.add(self._checked(table_from(empty)))
            samples.finish()
            if samples.schema is None:
                raise PlanError("sql needs at least one sample: the columns of an empty dataset are not known")
            try:
                statements = con.extract_statements(self.query)
                if [one.expected_result_type for one in statements] != [[duckdb.ExpectedResultType.QUERY_RESULT]]:
                    raise PlanError(f"{self.describe()} is not one query that returns rows, such as a select")
                found = con.sql(self.query)
                self._check_names(found.columns)
                integers = {name for name, kind in zip(found.columns, found.dtypes, strict=True) if kind == "hugeint"}
                for batch in found.to_arrow_reader(_RESULT_ROWS):
                    store.add(rows_of(_with_durations(batch), integers))
            except (duckdb.OutOfMemoryException, duckdb.IOException):
                raise
            except duckdb.Error as exc:
                raise PlanError(f"{self.describe()}: {str(exc).splitlines()[0]}") from exc
        return store.items(), None

    def _checked(self, table: Any) -> Any:
        known: dict[str, str] = {}
        for name in table.schema.names:
            if (other := known.setdefault(name.lower(), name)) != name:
                raise PlanError(f"sql: the fields {other!r} and {name!r} are one name in SQL; rename one of them first")
        return table

    def _check_names(self, names: Sequence[str]) -> None:
        if twice := [name for name in names if names.count(name) > 1]:
            raise PlanError(f"{self.describe()} has two columns {twice[0]!r}: name one of them differently, with 'as'")

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return {}

    def describe(self) -> str:
        return f"sql({self.query!r})"


def _with_durations(batch: Any) -> Any:
    """Return rows of a result as a table, with durations for intervals of days and shorter."""
    import pyarrow as pa

    columns = []
    for column in batch.columns:
        if column.type == pa.month_day_nano_interval():
            values = column.to_pylist()
            if not any(value is not None and value.months for value in values):
                spans = [None if value is None else value.days * _DAY_NS + value.nanoseconds for value in values]
                column = pa.array(spans, pa.int64()).cast(pa.duration("ns"))
        columns.append(column)
    return pa.table(columns, names=batch.schema.names)
