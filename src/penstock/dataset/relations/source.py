"""A source made of everything another plan gives: run to its end when it is first read, within a bound of memory."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.dataset.relations.spill import PiecesReader
from penstock.engines import Program, start_run
from penstock.errors import PlanError
from penstock.plan import Plan, Resources, Select, size_in_bytes

_SHARE = 4  # of the machine's memory, where nobody says


class Summary(Protocol):
    """What is made of all samples of a plan."""

    def __call__(self, runs: Iterator[Sequence[Any]], memory: int) -> Sequence[Sequence[Any]]:
        """Pieces of rows, made of runs of samples; what goes beyond ``memory`` bytes belongs on the disk."""

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        """What is known of the fields of these rows, where ``features`` is known of those of the samples."""

    def describe(self) -> str:
        """The call that asked for it."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A source that runs another plan to its end when it is opened, and gives what a summary makes of it."""

    plan: Plan
    summary: Summary

    random_access = True
    columnar = True

    @property
    def resources(self) -> Resources | None:
        """Its rows are made."""
        return None

    def open(self) -> PiecesReader:
        """Run the plan."""
        program = Program(self.plan)
        program.check_end()
        with closing(runs_of(self.plan, program)) as runs:
            pieces = self.summary(runs, memory_of(self.plan))
        return PiecesReader(pieces, self.summary.typed(_features(program)))

    def describe(self) -> str:
        """The calls that made it."""
        return f"{self.plan.source.describe()} ... {self.summary.describe()}"


def _features(program: Program) -> dict[str, Any]:
    """What is known of the fields; of sources that tell different things, nothing is."""
    try:
        return program.features()
    except PlanError:
        return {}


def runs_of(plan: Plan, program: Program | None = None) -> Generator[Sequence[Any], None, None]:
    """What a plan gives, in runs of neighbours."""
    with closing(start_run(plan, plan.epoch or 0, program).runs()) as runs:  # type: ignore[type-var]
        yield from (run for run in runs if len(run))


def memory_of(plan: Plan) -> int:
    """How many bytes may be held: what ``on("local", memory=...)`` says, or a quarter of the machine's."""
    asked = plan.engine.get("memory")
    if asked is not None:
        return size_in_bytes("memory", asked)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE


def whole(plan: Plan, summary: Summary) -> Plan:
    """The plan of what a summary makes of everything; engine, seed and policy stay.

    Raises:
        PlanError: the plan is one rank's share.
    """
    if plan.cut is not None and plan.cut.world > 1:
        raise PlanError(f"{summary.describe()} needs the whole stream, which is cut for {plan.cut.world} ranks")
    return Plan(Whole(plan, summary), (), plan.seed, None, None, plan.errors, plan.engine)


def fields_of(plan: Plan, *names: str) -> Plan:
    """The plan that reads no more than these fields, where its items are samples."""
    return plan.then(Select(tuple(dict.fromkeys(names)))) if plan.commutes else plan
