"""The laws hold for serial by definition, and a wrong engine breaks them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.plan import Resources, Stage
from penstock.testing import CORPUS, EngineTests, UnorderedEngineTests, fingerprint, numbers, on_resources, outputs
from penstock.testing.plans import noise


class _LosesSamples(EngineTests):
    def on(self, ds: Dataset) -> Dataset:
        return ds.skip(1).on("serial")


class _Reorders(EngineTests):
    def on(self, ds: Dataset) -> Dataset:
        return ds.shuffle(3, seed=7).on("serial")


class _ReordersAsAllowed(UnorderedEngineTests):
    def on(self, ds: Dataset) -> Dataset:
        return ds.shuffle(3, seed=7).on("serial")


def test_an_engine_that_loses_samples_breaks_the_laws() -> None:
    engine = _LosesSamples()
    with pytest.raises(AssertionError):
        engine.test_it_yields_what_serial_yields("read")
    with pytest.raises(AssertionError):
        engine.test_ranks_share_the_epoch("read", "range")


def test_an_engine_that_reorders_breaks_only_the_ordered_law() -> None:
    with pytest.raises(AssertionError):
        _Reorders().test_it_yields_what_serial_yields("read")
    _ReordersAsAllowed().test_it_yields_what_serial_yields("read")


def test_a_fingerprint_distinguishes_types_dtypes_and_shapes() -> None:
    values = [1, 1.0, True, "1", [1], (1,), {"a": 1}, np.array(1), np.array([1]), np.array([1], np.int32)]
    fingerprints = [fingerprint(value) for value in values]
    assert len(set(map(repr, fingerprints))) == len(values)
    assert fingerprint({"a": [np.arange(3)]}) == fingerprint({"a": [np.arange(3)]})
    assert hash(fingerprint({"a": [np.arange(3)]})) is not None


def test_resources_go_to_stages_round_robin() -> None:
    first, second = Resources(workers=1), Resources(workers=2)
    ds = on_resources(numbers([3]).map(noise).map(noise).map(noise), [first, second])
    assert [stage.resources for stage in ds.plan.stages if isinstance(stage, Stage)] == [first, second, first]
    assert outputs(ds.on("serial")) == outputs(numbers([3]).map(noise).map(noise).map(noise).on("serial"))


@pytest.mark.parametrize("name", CORPUS)
def test_a_plan_of_the_corpus_yields_the_same_twice(name: str) -> None:
    assert outputs(CORPUS[name]().epoch(1).on("serial")) == outputs(CORPUS[name]().epoch(1).on("serial"))
