"""The source behind groups and sorts: a plan that runs to its end when the result is first read."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.dataset.relations.spill import PiecesReader
from penstock.engines import Program, start_run
from penstock.errors import PlanError
from penstock.plan import Plan, Select, Source, size_in_bytes

_MEMORY_SHARE = 4  # a quarter of the machine's memory, unless the engine's options set a limit


class Summary(Protocol):
    """Computes rows from all samples of a plan."""

    def __call__(self, runs: Iterator[Sequence[Any]], memory: int) -> Sequence[Sequence[Any]]:
        """Return rows in pieces, computed from runs of samples; spills samples beyond ``memory`` bytes."""

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

    def open(self) -> PiecesReader:
        """Run the plan.

        Raises:
            PlanError: The plan has no end.
            StorageError: The temporary file cannot be written.
        """
        program = Program(self.plan)
        program.check_finite()
        with closing(runs_of(self.plan, program)) as runs:
            pieces = self.summary(runs, memory_of(self.plan))
        return PiecesReader(pieces, self.summary.typed(_features(program)))

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
    with closing(start_run(plan, plan.epoch or 0, program).runs()) as runs:  # type: ignore[type-var]
        yield from (run for run in runs if len(run))


def memory_of(plan: Plan) -> int:
    """Return the memory limit in bytes: that of ``on("local", memory=...)``, or a quarter of the machine's memory."""
    limit = plan.engine.get("memory")
    if limit is not None:
        return size_in_bytes("memory", limit)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MEMORY_SHARE


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


def select_fields(plan: Plan, *names: str) -> Plan:
    """Return the plan reduced to these fields; a plan of batches or other items is returned as it is."""
    return plan.then(Select(tuple(dict.fromkeys(names)))) if plan.commutes else plan
