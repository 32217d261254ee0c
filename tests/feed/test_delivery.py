from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.engines import Program, Run
from penstock.feed.batch_format import BatchFormat
from penstock.feed.delivery import Delivery
from penstock.feed.ledger import LedgerWriter, ResumePoint, session_dataset
from penstock.plan import Cut
from penstock.testing import numbers


def _delivery(ds: ps.Dataset, format: BatchFormat | None, folder: Path | None = None) -> Delivery:
    program = Program(ds.plan)
    order = program.order(0)
    ledger = None if folder is None else LedgerWriter(folder)
    if ledger is not None:
        ledger.begin(session_dataset(program, order), 0, Cut(0, 1), ResumePoint())
    start_run = partial(Run, program, order, 0, program.start(order, None))
    return Delivery(lambda report: start_run(tracked=True, on_delivered=report), format=format, ledger=ledger)


FORMATS = [None, BatchFormat("numpy"), BatchFormat("torch", "cpu", prefetch=4)]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_progress_is_that_after_the_last_delivered_item(format: BatchFormat | None) -> None:
    live = _delivery(numbers((30,)).batched(4), format)
    items = iter(live)
    assert live.here().left == [[0, 30, 1, 0]]
    for done in range(1, 5):
        next(items)
        assert live.here().left == [[4 * done, 30, 1, 0]]
    live.hold_back()
    assert live.here().left == [[12, 30, 1, 0]]
    live.close()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_skips_are_those_before_the_last_delivered_item(format: BatchFormat | None) -> None:
    live = _delivery(numbers((30,), bad=[1, 20]).on_error("skip").on("serial"), format)
    items = iter(live)
    for _ in range(3):
        next(items)
    assert [int(skip.place.key or -1) for skip in live.skips()] == [1]
    assert len(list(items)) == 25
    assert [int(skip.place.key or -1) for skip in live.skips()] == [1, 20]
    live.close()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_ledger_has_what_was_delivered_and_what_gave_no_output(format: BatchFormat | None, tmp_path: Path) -> None:
    def first_half(sample: dict[str, Any]) -> bool:
        return bool(sample["x"] < 15)

    live = _delivery(numbers((30,)).filter(first_half).batched(4), format, tmp_path)
    items = iter(live)
    next(items)
    live.here()
    assert live._ledger is not None
    live._ledger.flush()
    assert ps.ledger(tmp_path).verify().delivered == 4
    list(items)
    live._ledger.flush()
    proof = ps.ledger(tmp_path).verify()
    assert (proof.delivered, proof.epochs[0].passed) == (15, 15)
    live.close()
