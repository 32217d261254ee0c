"""Neighbouring rows are read together, once, and cached memory is bounded."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import DataError
from penstock.formats.rows import reader as reader_module
from penstock.formats.rows.lines import CsvFormat
from penstock.formats.rows.reader import merge_results, open_rows
from penstock.plan import Fields


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(reader_module, "_GROUP_ROWS", 8192)
    (tmp_path / "a.csv").write_text("x\n" + "".join(f"{n}\n" for n in range(20_000)))
    return str(tmp_path / "a.csv")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the calls of ``CsvFormat.read`` by their number of rows."""
    calls: Counter[int] = Counter()
    original = CsvFormat.read

    def read(self: CsvFormat, file: Any, rows: Any, *args: Any) -> Any:
        calls[len(rows)] += 1
        return original(self, file, rows, *args)

    monkeypatch.setattr(CsvFormat, "read", read)
    return calls


def test_a_window_reads_every_group_once(path: str, reads: Counter[int]) -> None:
    reader = open_rows([path], (".csv",), CsvFormat(), None, None)
    got: list[int] = []
    for begin in range(0, 20_000, 3000):
        window = np.random.default_rng(begin).permutation(np.arange(begin, min(begin + 3000, 20_000)))
        located = reader.locate(np.zeros(len(window), np.int64), window, Fields())
        for block in range(0, len(window), 100):
            items, errors = located.take(slice(block, block + 100)).read()
            assert not errors
            got += [item["x"] for item in items]
    assert sorted(got) == list(range(20_000))
    assert reads == {8192: 2, 3616: 1}  # each of the 3 groups once, also those that two windows share


def test_a_shuffled_epoch_reads_few_rows_alone(path: str, reads: Counter[int]) -> None:
    got = [sample["x"] for sample in ps.read_csv(path).shuffle(3000)]
    assert sorted(got) == list(range(20_000))
    assert reads[8192] == 2
    assert reads[3616] == 1
    assert sum(size * times for size, times in reads.items() if size < 3000) < 500


def test_rows_may_be_larger_than_groups(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_GROUP_BYTES", 3)
    assert sorted(sample["x"] for sample in ps.read_csv(path).shuffle(3000)) == list(range(20_000))


def test_a_single_row_is_read_alone(path: str, reads: Counter[int]) -> None:
    assert ps.read_csv(path)[12_345] == {"x": 12_345}
    assert sum(size * times for size, times in reads.items()) == 1


def test_the_size_of_cached_groups_is_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_CACHED_GROUP_BYTES", 3 * 8192 * 8)
    reader = open_rows([path], (".csv",), CsvFormat(), None, None)
    index = np.arange(20_000)
    items, errors = reader.locate(np.zeros(20_000, np.int64), index, Fields()).read()
    assert [item["x"] for item in items] == index.tolist()
    assert not errors
    assert len(reader._groups._entries) <= 3
    reader.suspend()
    assert not reader._groups._entries


def test_threads_that_need_the_same_group_wait_for_one_read(path: str, reads: Counter[int]) -> None:
    reader = open_rows([path], (".csv",), CsvFormat(), None, None)
    located = reader.locate(np.zeros(1024, np.int64), np.arange(1024), Fields())
    got: list[Any] = []
    threads = [threading.Thread(target=lambda: got.append(list(located.read()[0]))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[{"x": n} for n in range(1024)]] * 6
    assert reads == {8192: 1}


def test_a_thread_reads_its_other_groups_while_one_is_being_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_rows([path], (".csv",), CsvFormat(), None, None)
    located = reader.locate(np.zeros(20_000, np.int64), np.arange(20_000), Fields())
    original, others_are_read = CsvFormat.read, threading.Event()
    others: list[int] = []

    def read(self: CsvFormat, file: Any, rows: Any, *args: Any) -> Any:
        first = int(rows[0])
        if first == 0:
            assert others_are_read.wait(60)  # this group is slow: the other thread reads the other two
        result = original(self, file, rows, *args)
        if first != 0:
            others.append(first)
            if len(others) == 2:
                others_are_read.set()
        return result

    monkeypatch.setattr(CsvFormat, "read", read)
    threads = [threading.Thread(target=located.read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(others) == [8192, 16384]


def test_results_are_merged_in_the_order_of_their_positions() -> None:
    error = DataError("no")
    items, errors = merge_results([(np.array([2, 0]), (["c", "a"], {1: error})), (np.array([1]), (["b"], {}))])
    assert list(items) == ["a", "b", "c"]
    assert errors == {0: error}
    assert merge_results([]) == ([], {})
