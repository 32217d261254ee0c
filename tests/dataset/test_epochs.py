"""Epochs: every ``for`` is the next one, queries do not count, and the seed determines all random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.testing import numbers, outputs


def _xs(ds: Any) -> list[int]:
    return [int(sample["x"]) for sample in ds]


def _noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise": int(rng.integers(1 << 40))}


def _fresh() -> ps.Dataset:
    return numbers((40, 30)).shuffle().map(_noise)


def test_every_for_is_the_next_epoch() -> None:
    ds = _fresh()
    epochs = [outputs(ds) for _ in range(3)]
    assert epochs == [outputs(ds.epoch(k)) for k in range(3)]
    assert len({tuple(_xs(_fresh().epoch(k))) for k in range(3)}) == 3


def test_an_abandoned_epoch_counts() -> None:
    ds = _fresh()
    next(iter(ds))
    assert outputs(ds) == outputs(_fresh().epoch(1))


def test_iter_batches_is_the_next_epoch() -> None:
    ds = numbers((40, 30)).shuffle()
    first = np.concatenate([batch["x"] for batch in ds.iter_batches(16)]).tolist()
    second = np.concatenate([batch["x"] for batch in ds.iter_batches(16)]).tolist()
    assert [first, second] == [_xs(ds.epoch(0)), _xs(ds.epoch(1))]
    assert _xs(ds) == _xs(ds.epoch(2))


def test_queries_do_not_advance_the_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ds = numbers((40, 30)).shuffle().map(lambda s: {"x.cls": s["x"]}).rename(cls="x.cls")
    ds.take(3)
    ds.take_all()
    ds.take_batch(3)
    ds.first()
    ds.show(2)
    ds.count()
    len(ds)
    ds.schema()
    ds[3]
    ds.explain()
    ds.write_tar(str(tmp_path / "out"))
    capsys.readouterr()
    assert [s["cls"] for s in ds] == [s["cls"] for s in ds.epoch(0)]


def test_queries_use_the_upcoming_epoch() -> None:
    ds = _fresh()
    list(ds)
    want = _xs(_fresh().epoch(1))
    assert _xs(ds.take(5)) == want[:5]
    assert ds.take_batch(5)["x"].tolist() == want[:5]
    assert _xs(ds.take_all()) == want
    assert _xs([ds.first()]) == want[:1]


def test_a_fixed_epoch_does_not_advance() -> None:
    ds = _fresh().epoch(4)
    assert outputs(ds) == outputs(ds)
    assert outputs(ds) != outputs(_fresh().epoch(3))


def test_a_derived_dataset_begins_at_epoch_0() -> None:
    ds = _fresh()
    list(ds)
    assert _xs(ds.limit(70)) == _xs(_fresh().epoch(0))


@pytest.mark.parametrize("epoch", [-1, 1.5, None, "one", True])
def test_an_epoch_is_a_number(epoch: Any) -> None:
    with pytest.raises(PlanError, match="epoch="):
        _fresh().epoch(epoch)


def test_the_seed_determines_order_and_randomness() -> None:
    assert outputs(_fresh().seed(1).epoch(0)) == outputs(_fresh().seed(1).epoch(0))
    assert _xs(_fresh().seed(1).epoch(0)) != _xs(_fresh().epoch(0))
    plain = numbers((9,)).map(_noise)
    assert outputs(plain.seed(1).epoch(0)) != outputs(plain.seed(2).epoch(0))
    assert outputs(plain.epoch(0)) == outputs(plain.seed(0).epoch(0))


def test_the_seed_of_shuffle_is_that_of_the_run() -> None:
    assert numbers((9,)).shuffle(seed=5) == numbers((9,)).seed(5).shuffle()


@pytest.mark.parametrize("seed", [1.5, "x", True, None])
def test_a_seed_is_an_integer(seed: Any) -> None:
    with pytest.raises(PlanError, match="seed="):
        numbers((9,)).seed(seed)


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_a_seed_may_be_any_integer(seed: int) -> None:
    assert sorted(_xs(numbers((9,)).seed(seed).shuffle())) == list(range(9))


def test_random_numbers_are_the_same_on_every_engine() -> None:
    want = outputs(_fresh().epoch(2).on("serial"))
    parallel = numbers((40, 30)).shuffle().map(_noise, workers=4).epoch(2)
    assert outputs(parallel) == want
    assert outputs(parallel.on("local", cpus=1)) == want
    assert sorted(outputs(parallel.on("local", ordered=False))) == sorted(want)


def test_random_numbers_do_not_depend_on_the_position() -> None:
    plain = {s["x"]: s["noise"] for s in numbers((40, 30)).map(_noise).epoch(0)}
    cut = numbers((40, 30)).shuffle().map(_noise).shard(1, 3, "step").epoch(0)
    assert {s["x"]: s["noise"] for s in cut}.items() <= plain.items()


def test_two_stages_draw_different_numbers() -> None:
    sample = numbers((1,)).map(_noise).map(lambda s: {**s, "first": s["noise"]}).map(_noise).first()
    assert sample["noise"] != sample["first"]


def test_every_pass_of_a_repeat_is_a_separate_epoch() -> None:
    ds = numbers((20, 10)).shuffle().map(_noise)
    for epoch in range(2):
        passes = [sample for i in range(3) for sample in outputs(ds.epoch(3 * epoch + i))]
        assert outputs(ds.repeat(3).epoch(epoch)) == passes


def test_repeat_without_a_number_has_no_end() -> None:
    once = numbers((3,)).shuffle()
    ds = once.repeat()
    assert _xs(ds.take(7)) == [x for k in range(3) for x in _xs(once.epoch(k))][:7]
    with pytest.raises(TypeError, match="length"):
        len(ds)


@pytest.mark.parametrize("times", [0, -1, 1.5, True])
def test_a_number_of_passes_is_checked(times: Any) -> None:
    with pytest.raises(PlanError, match="repeat="):
        numbers((3,)).repeat(times)


def test_repeat_cannot_come_after_batches() -> None:
    with pytest.raises(PlanError, match="repeat"):
        numbers((3,)).batched(2).repeat(2)
