from __future__ import annotations

import multiprocessing
import pickle

import pytest

from penstock.feed import Epochs, TorchWorker


def test_every_pass_is_the_next_epoch() -> None:
    epochs = Epochs(3)
    assert [epochs.coming(), epochs.next(), epochs.next(), epochs.coming()] == [3, 3, 4, 5]


def test_a_count_that_is_shared_goes_on() -> None:
    epochs = Epochs()
    epochs.next()
    epochs.share()
    assert [epochs.next(), epochs.coming()] == [1, 2]


def test_workers_that_begin_a_pass_together_have_its_epoch() -> None:
    epochs = Epochs()
    epochs.share()
    assert [epochs.next(TorchWorker(id, 3, 77)) for id in (2, 0, 1)] == [0, 0, 0]
    assert [epochs.next(TorchWorker(id, 3, 78)) for id in (0, 1, 2)] == [1, 1, 1]
    assert epochs.coming() == 2


def test_a_worker_that_comes_again_begins_another_pass() -> None:
    epochs = Epochs()
    epochs.share()
    assert [epochs.next(TorchWorker(id, 2, 77)) for id in (0, 1, 1, 0, 0, 1)] == [0, 0, 1, 1, 2, 2]


def test_passes_that_are_begun_at_the_same_time_are_told_apart() -> None:
    epochs = Epochs()
    epochs.share()
    order = [(0, 7), (0, 8), (1, 7), (1, 8)]
    assert [epochs.next(TorchWorker(id, 2, name)) for id, name in order] == [0, 1, 0, 1]


def test_a_pass_that_not_all_workers_came_to_does_not_shift_the_next() -> None:
    epochs = Epochs()
    epochs.share()
    epochs.next(TorchWorker(0, 2, 7))
    assert [epochs.next(TorchWorker(id, 2, 8)) for id in (1, 0)] == [1, 1]


def test_the_next_epoch_can_be_set_and_reached() -> None:
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
    here = multiprocessing.get_context(start)
    processes = [here.Process(target=Epochs.next, args=(epochs, TorchWorker(id, 2, 7))) for id in range(2)]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert epochs.coming() == 1


def test_a_count_that_is_kept_elsewhere_begins_anew() -> None:
    epochs = Epochs()
    epochs.share()
    epochs.next()
    assert pickle.loads(pickle.dumps(epochs)).coming() == 0
