"""The source behind groups and other relations: a plan that runs to its end when the result is first read."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engines import Program, start_run
from penstock.engines.lineage import empty_block
from penstock.errors import PlanError
from penstock.formats.tables.source import TableSource
from penstock.order import I64
from penstock.plan import Columns, Plan, Scope, Select, Source
from penstock.relations.keys import columns_of
from penstock.relations.store import StoreReader

Rows = tuple[Sequence[Any], I64 | None]  # samples, and the numbers of those that form the result (None: all of them)


class Summary(Protocol):
    """Computes rows from all samples of a plan."""

    def __call__(self, runs: Iterator[Sequence[Any]], plan: Plan) -> Rows:
        """Return rows, computed from runs of samples; ``plan`` says how much memory and how many threads to use."""

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        """Return the features of the rows, given the features of the samples."""

    def describe(self) -> str:
        """Return the method call as the user wrote it."""


@dataclass(frozen=True, slots=True)
class SummarySource(Source):
    """A source that runs another plan completely when it is opened, and reads the rows that a summary computes."""

    plan: Plan
    summary: Summary

    random_access = True
    computed = True

    def open(self) -> StoreReader:
        """Run the plan.

        Raises:
            MissingExtra: duckdb or pyarrow is not installed.
            PlanError: The plan has no end, or the values of a field have no one type.
            StorageError: The temporary file cannot be written.
        """
        program = Program(self.plan)
        program.check_finite()
        with closing(runs_of(self.plan, program)) as runs:
            items, order = self.summary(runs, self.plan)
        return StoreReader(items, order, self.summary.typed(_features(program)))

    def describe(self) -> str:
        return f"{self.plan.source.describe()} ... {self.summary.describe()}"


def _features(program: Program) -> dict[str, Any]:
    """Return the features of the samples; empty if the sources declare different ones."""
    try:
        return program.features()
    except PlanError:
        return {}


def runs_of(plan: Plan, program: Program | None = None) -> Generator[Sequence[Any], None, None]:
    """Yield the samples of a plan in runs of consecutive samples."""
    with closing(start_run(plan, plan.epoch or 0, program).runs()) as runs:
        yield from (run for run in runs if len(run))


def summarized(plan: Plan, summary: Summary) -> Plan:
    """Return a plan that reads a summary of all samples of ``plan``, with the same engine, seed and error policy.

    Raises:
        PlanError: The plan is cut for several ranks.
    """
    if plan.cut is not None and plan.cut.world > 1:
        raise PlanError(
            f"{summary.describe()} needs the whole stream, but the dataset is cut for {plan.cut.world} ranks"
        )
    return Plan(SummarySource(plan, summary), (), plan.seed, None, None, plan.errors, plan.engine)


def select_fields(plan: Plan, verb: str, *names: str) -> Plan:
    """Return the plan reduced to the fields of an operation; a plan of batches or other items is returned as it is."""
    return plan.then(Select(tuple(dict.fromkeys(names)), verb)) if plan.commutes else plan


def no_samples(program: Program) -> Sequence[Any]:
    """Return what a plan without samples yields: columns without rows, if its source is a table in memory."""
    leaf = program.arrangement.leaves[0]
    if not isinstance(leaf, TableSource):
        return []
    block = empty_block().with_items(columns_of(leaf.table.value.schema.empty_table()))
    for placed in program.arrangement.body:
        if placed.stage.scope is not Scope.EACH or not isinstance(block.items, Columns):
            return []
        block = placed.stage.run(block, program.context(placed, 0))
    return block.items
