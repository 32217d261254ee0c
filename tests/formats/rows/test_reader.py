"""Rows that lie together are read together, once, and memory stays bounded."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import DataError
from penstock.formats.rows import reader as rows
from penstock.formats.rows.lines import CsvLayout
from penstock.formats.rows.reader import in_order, open_rows
from penstock.plan import Fields


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "a.csv").write_text("x\n" + "".join(f"{n}\n" for n in range(20_000)))
    return str(tmp_path / "a.csv")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many rows were asked of the layout at a time, and how often."""
    seen: Counter[int] = Counter()
    real = CsvLayout.read

    def read(self: CsvLayout, file: Any, which: Any, *more: Any) -> Any:
        seen[len(which)] += 1
        return real(self, file, which, *more)

    monkeypatch.setattr(CsvLayout, "read", read)
    return seen


def test_a_window_reads_every_group_once(path: str, reads: Counter[int]) -> None:
    reader = open_rows([path], (".csv",), CsvLayout(), None, None)
    got: list[int] = []
    for begin in range(0, 20_000, 3000):
        window = np.random.default_rng(begin).permutation(np.arange(begin, min(begin + 3000, 20_000)))
        spots = reader.locate(np.zeros(len(window), np.int64), window, Fields())
        for block in range(0, len(window), 100):
            items, bad = spots.take(slice(block, block + 100)).read()
            assert not bad
            got += [item["x"] for item in items]
    assert sorted(got) == list(range(20_000))
    assert reads == {8192: 2, 3616: 1}  # 3 groups, also those in which two windows meet


def test_a_shuffled_epoch_reads_no_row_alone_but_at_its_ends(path: str, reads: Counter[int]) -> None:
    got = [sample["x"] for sample in ps.read_csv(path).shuffle(3000)]
    assert sorted(got) == list(range(20_000))
    assert reads[8192] == 2
    assert reads[3616] == 1
    assert sum(size * times for size, times in reads.items() if size < 3000) < 500


def test_rows_far_from_each_other_are_read_alone(path: str, reads: Counter[int]) -> None:
    assert ps.read_csv(path)[12_345] == {"x": 12_345}
    assert sum(size * times for size, times in reads.items()) == 1


def test_what_is_kept_is_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_KEPT_BYTES", 3 * 8192 * 8)
    reader = open_rows([path], (".csv",), CsvLayout(), None, None)
    every = np.arange(20_000)
    items, bad = reader.locate(np.zeros(20_000, np.int64), every, Fields()).read()
    assert [item["x"] for item in items] == every.tolist()
    assert not bad
    assert len(reader._groups._held) <= 3
    reader.rest()
    assert not reader._groups._held


def test_threads_that_want_one_group_wait_for_the_one_that_reads_it(path: str, reads: Counter[int]) -> None:
    reader = open_rows([path], (".csv",), CsvLayout(), None, None)
    spots = reader.locate(np.zeros(1024, np.int64), np.arange(1024), Fields())
    got: list[Any] = []
    threads = [threading.Thread(target=lambda: got.append(list(spots.read()[0]))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[{"x": n} for n in range(1024)]] * 6
    assert reads == {8192: 1}


def test_answers_are_put_in_the_order_of_their_places() -> None:
    wrong = DataError("no")
    items, bad = in_order([(np.array([2, 0]), (["c", "a"], {1: wrong})), (np.array([1]), (["b"], {}))])
    assert list(items) == ["a", "b", "c"]
    assert bad == {0: wrong}
    assert in_order([]) == ([], {})
