"""Where a run stands in its stream of samples: the one codec of positions, and a run that continues from one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from penstock.engines import Program, Run, Start, StartPart
from penstock.errors import StateError
from penstock.plan import Cut, Plan, check_count

Position = dict[str, Any]  # a start of the run, as JSON, and the number of samples between the start and the position
_CHECKPOINT_SAMPLES = 64  # at least, between two starts: computing one costs as much as reading a small sample


def exact_program(plan: Plan, shards: int | None = None) -> Program:
    """Return the program of a plan on an engine that keeps the order.

    Args:
        plan: The plan.
        shards: The number of ranges that are run one by one, on a cluster without passing samples through here.

    Raises:
        PlanError: The plan cannot be cut into ranges.
    """
    options = tuple((name, value) for name, value in plan.engine.options if name != "ordered")
    plan = replace(plan, engine=replace(plan.engine, options=options))
    if shards is None:
        return Program(plan)
    check_count("shards", shards, least=1)
    return Program(plan.shard(Cut(0, shards)), read_in_pool=plan.engine.name == "ray")


class Positions(Protocol):
    """The positions of a run that a sink stores with its checkpoints."""

    def mark(self) -> None:
        """Make the position after the current block an exact one."""

    def position(self, number: int) -> Position | None:
        """Return the position before sample ``number``; None if a run cannot continue there."""


class ResumableRun:
    """The samples that are still to be written, in blocks, and the position before any of them.

    Args:
        program: What runs.
        epoch: The epoch to run.
        position: Where to begin; None for the beginning.
        done: The number of samples before that position that were written.

    Attributes:
        total: The number of samples of the whole run, if it is known.

    Raises:
        StateError: The position is damaged.
    """

    def __init__(self, program: Program, epoch: int, position: Position | None = None, done: int = 0) -> None:
        self._is_stream = program.stream is not None
        order = None if self._is_stream else program.order(epoch)
        start = program.stream_start() if order is None else program.start(order, program.plan.cut)
        self._to_drop = self._skipped_before = 0
        if position is not None:
            try:
                start = start_from_json(position["start"])
                self._to_drop, self._skipped_before = int(position["beyond"]), int(position["skipped"])
            except (KeyError, TypeError, ValueError) as exc:
                raise StateError(f"the journal holds a damaged position ({exc!r})") from exc
        self._seen = done - self._to_drop
        self._run = Run(program, order, epoch, start, tracked=not self._is_stream)
        self._checkpoints = deque([(self._seen, start, self._skipped_before)])
        self.total = None if self._is_stream else program.length(program.plan.cut)

    @property
    def skipped(self) -> int:
        """The number of samples skipped so far."""
        return self._skipped_before + len(self._run.skips_so_far())

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for items in self._run.runs():
            self._seen += len(items)
            dropped = min(self._to_drop, len(items))
            self._to_drop -= dropped
            if rest := len(items) - dropped:
                yield items[dropped:] if dropped else items
            if rest and self._seen >= self._checkpoints[-1][0] + _CHECKPOINT_SAMPLES:
                self.mark()
        self.mark()

    def mark(self) -> None:
        """Make the position after the current block an exact one, where a run begins without dropping samples."""
        if not self._is_stream:
            self._checkpoints.append((self._seen, self._run.here(), self.skipped))

    def position(self, number: int) -> Position | None:
        """Return the position before sample ``number``; positions before it are forgotten. None for a stream."""
        if self._is_stream:
            return None
        while len(self._checkpoints) > 1 and self._checkpoints[1][0] <= number:
            self._checkpoints.popleft()
        before, start, skipped = self._checkpoints[0]
        return {"start": start_to_json(start), "beyond": number - before, "skipped": skipped}

    def close(self) -> None:
        """End the run."""
        self._run.close()


def start_to_json(start: Start) -> dict[str, Any]:
    """Return the start of a run as JSON."""
    return {
        "left": start.left,
        "opens": [[part.pieces, part.n, part.done, part.sub] for part in start.opens],
        "groups": [[level, *at] for level, at in start.groups.items()],
        "seen": [[level, seen] for level, seen in start.seen.items()],
        "quota": start.quota,
        "pad": start.pad,
    }


def start_from_json(obj: Mapping[str, Any]) -> Start:
    """Return the start of a run that :func:`start_to_json` stored.

    Raises:
        KeyError, TypeError, ValueError: The JSON does not describe a start.
    """
    return Start(
        [list(map(int, piece)) for piece in obj["left"]],
        tuple(StartPart(*part) for part in obj["opens"]),
        {int(level): (int(done), int(sub)) for level, done, sub in obj["groups"]},
        {int(level): int(seen) for level, seen in obj["seen"]},
        obj["quota"],
        obj["pad"],
    )
