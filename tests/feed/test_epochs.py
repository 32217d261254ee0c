from __future__ import annotations

import multiprocessing
import pickle

import pytest

from penstock.feed import Epochs, TorchWorker


def test_every_pass_is_the_next_epoch() -> None:
    epochs = Epochs(3)
    assert [epochs.peek(), epochs.next(), epochs.next(), epochs.peek()] == [3, 3, 4, 5]


def test_a_count_continues_when_it_is_shared() -> None:
    epochs = Epochs()
    epochs.next()
    epochs.share()
    assert [epochs.next(), epochs.peek()] == [1, 2]


def test_workers_that_begin_a_pass_together_get_one_epoch() -> None:
    epochs = Epochs()
    epochs.share()
    assert [epochs.next(TorchWorker(id, 3, 77)) for id in (2, 0, 1)] == [0, 0, 0]
    assert [epochs.next(TorchWorker(id, 3, 78)) for id in (0, 1, 2)] == [1, 1, 1]
    assert epochs.peek() == 2


def test_a_worker_that_begins_again_begins_another_pass() -> None:
    epochs = Epochs()
    epochs.share()
    assert [epochs.next(TorchWorker(id, 2, 77)) for id in (0, 1, 1, 0, 0, 1)] == [0, 0, 1, 1, 2, 2]


def test_passes_that_begin_at_the_same_time_are_distinguished() -> None:
    epochs = Epochs()
    epochs.share()
    order = [(0, 7), (0, 8), (1, 7), (1, 8)]
    assert [epochs.next(TorchWorker(id, 2, group)) for id, group in order] == [0, 1, 0, 1]


def test_a_pass_that_some_workers_did_not_begin_does_not_shift_the_next() -> None:
    epochs = Epochs()
    epochs.share()
    epochs.next(TorchWorker(0, 2, 7))
    assert [epochs.next(TorchWorker(id, 2, 8)) for id in (1, 0)] == [1, 1]


def test_the_next_epoch_can_be_set_and_advanced() -> None:
    for share in (False, True):
        epochs = Epochs()
        if share:
            epochs.share()
        epochs.set(5)
        epochs.reach(3)
        assert epochs.next() == 5
        epochs.reach(9)
        assert epochs.next() == 9


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_count_together_however_they_are_started(start: str) -> None:
    epochs = Epochs()
    epochs.share()
    context = multiprocessing.get_context(start)
    processes = [context.Process(target=Epochs.next, args=(epochs, TorchWorker(id, 2, 7))) for id in range(2)]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert epochs.peek() == 1


def test_a_saved_count_starts_at_zero() -> None:
    epochs = Epochs()
    epochs.share()
    epochs.next()
    assert pickle.loads(pickle.dumps(epochs)).peek() == 0
