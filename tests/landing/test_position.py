"""A position is stored as JSON and restored exactly, and a run continues from any of them."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

import penstock as ps
from penstock.engines import Start, StartPart
from penstock.errors import StateError
from penstock.landing.position import ResumableRun, exact_program, start_from_json, start_to_json


def test_a_start_is_read_as_it_was_written() -> None:
    start = Start([[3, 9, 1, 0]], (StartPart([[0, 3, 1, 0]], 3, 1, 0),), {1: (2, 0)}, {2: 5}, 7, [0, 1, 1, 0])
    assert start_from_json(json.loads(json.dumps(start_to_json(start)))) == start


@pytest.mark.parametrize("start", [{}, {"left": 3}, {"left": [["x"]]}], ids=str)
def test_a_damaged_position_is_refused(start: dict[str, Any]) -> None:
    program = exact_program(ps.from_items([{"n": 1}]).plan)
    with pytest.raises(StateError, match="damaged position"):
        ResumableRun(program, 0, {"start": start, "beyond": 0, "skipped": 0})


@pytest.mark.parametrize("late", [False, True])
def test_a_run_continues_from_the_position_before_any_sample(late: bool) -> None:
    ds = ps.from_items([{"n": n} for n in range(500)]).shuffle().filter(lambda s: s["n"] % 7)
    ds = ds.flat_map(lambda s: [s, {"n": -s["n"]}]) if late else ds
    program = exact_program(ds.plan)
    with closing(ResumableRun(program, 0)) as run:
        whole = [item for items in run for item in items]
    for number in (0, 1, 63, 64, 200, 333, len(whole)):
        samples = ResumableRun(program, 0)
        seen, position = 0, None
        with closing(samples):
            for items in samples:
                if seen <= number < seen + len(items):
                    position = samples.position(number)
                    break
                seen += len(items)
            else:
                position = samples.position(number)
        position = json.loads(json.dumps(position))
        with closing(ResumableRun(program, 0, position, number)) as rest:
            assert [item for items in rest for item in items] == whole[number:]
