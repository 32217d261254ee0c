"""``sql``: a query over the columns of all samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import PlanError
from penstock.formats.tables import table_from
from penstock.plan import Plan
from penstock.relations.database import StagedTable, database, memory_of
from penstock.relations.groups import rows_of
from penstock.relations.keys import chunks
from penstock.relations.source import Rows
from penstock.relations.store import SampleStore

_RESULT_ROWS = 1 << 17  # that are fetched at a time


@dataclass(frozen=True, slots=True)
class Queried:
    """The rows of a query over the table ``samples``."""

    query: str

    def __call__(self, runs: Iterator[Sequence[Any]], plan: Plan) -> Rows:
        # One thread: a query without an order gives its rows, and adds floats, in the same order every time.
        with database(plan, "sql", threads=1) as con:
            import duckdb

            samples, store = StagedTable(con, "samples", "sql"), SampleStore(memory_of(plan))
            for items in chunks(runs, memory_of(plan)):
                samples.add(table_from(items))
            samples.finish()
            if samples.schema is None:
                raise PlanError("sql needs at least one sample: the columns of an empty dataset are not known")
            try:
                found = con.sql(self.query)
                if found is None:
                    raise PlanError(f"{self.describe()} is not a query that returns rows, such as a select")
                for batch in found.to_arrow_reader(_RESULT_ROWS):
                    import pyarrow as pa

                    store.add(rows_of(pa.Table.from_batches([batch])))
            except (duckdb.OutOfMemoryException, duckdb.IOException):
                raise
            except duckdb.Error as exc:
                raise PlanError(f"{self.describe()}: {str(exc).splitlines()[0]}") from exc
        return store.items(), None

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return {}

    def describe(self) -> str:
        return f"sql({self.query!r})"
