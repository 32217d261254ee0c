from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.plan import (
    ByObject,
    Cut,
    EngineOptions,
    Fields,
    OnError,
    Resources,
    name_of,
    size_in_bytes,
    takes_parameter,
)
from penstock.plan.values import available_cores


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1), (1e9, 10**9), (1.5, 1), ("500MB", 5 * 10**8), ("500 mb", 5 * 10**8), ("1.5GB", 15 * 10**8),
        ("2KB", 2000), ("3tb", 3 * 10**12), ("10b", 10), ("77", 77), ("1e3", 1000), ("1e3kb", 10**6),
    ],
)  # fmt: skip
def test_sizes_are_numbers_or_text_in_powers_of_1000(value: float | str, expected: int) -> None:
    assert size_in_bytes("max_bytes", value) == expected


@pytest.mark.parametrize(
    "value",
    [0, -1, True, None, "", "MB", "1.2.3MB", "5XB", "five", "-5MB", "0MB", "k", float("nan"), float("inf")],
)
def test_an_invalid_size_is_refused_with_the_name_of_the_argument(value: Any) -> None:
    with pytest.raises(PlanError, match="max_bytes="):
        size_in_bytes("max_bytes", value)


@pytest.mark.parametrize("workers", [None, 1, 8, (1, 8), (2, 2)])
def test_workers_are_a_number_or_a_range(workers: Any) -> None:
    assert Resources(workers).workers == workers


@pytest.mark.parametrize(
    "arguments",
    [
        {"workers": 0}, {"workers": -1}, {"workers": True}, {"workers": "4"}, {"workers": (2, 1)},
        {"workers": (1, 2, 3)}, {"workers": (0, 2)}, {"workers": 1.5}, {"on": "gpu"}, {"cpus": 0}, {"cpus": "all"},
        {"gpus": -1}, {"gpus": "one"}, {"retries": -1}, {"retries": 1.5}, {"timeout_s": 0}, {"timeout_s": "1m"},
    ],
    ids=str,
)  # fmt: skip
def test_resources_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(arguments))}="):
        Resources(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rank": 2, "world": 2}, {"rank": -1, "world": 2}, {"rank": 0, "world": 0}, {"rank": 0.0, "world": 1},
        {"rank": 0, "world": 1, "kind": "hash"}, {"rank": 0, "world": 1, "uneven": "cut"},
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_cut_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Cut(**arguments)


@pytest.mark.parametrize("limit", [-1, True, "10%", float("nan")])
def test_the_limit_of_skips_is_a_number_or_a_share(limit: Any) -> None:
    with pytest.raises(PlanError, match="limit="):
        OnError("skip", limit)
    assert OnError("skip", 0.1).limit == 0.1


def test_an_unknown_policy_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(PlanError, match="'raise', 'skip'"):
        OnError("ignore")  # type: ignore[arg-type]


def test_all_fields_are_wanted_by_default() -> None:
    everything = Fields()
    assert everything.wants("jpg")
    assert everything.wants("__key__")
    assert not everything.without(["jpg"]).wants("jpg")
    assert everything.without(["jpg"]).with_(["jpg"]).wants("jpg")
    assert not everything.without(["__url__"]).wants("__url__")


def test_selected_fields_include_those_in_double_underscores() -> None:
    chosen = Fields(frozenset({"jpg"}))
    assert [chosen.wants(name) for name in ("jpg", "cls", "__key__")] == [True, False, True]
    bare = Fields(frozenset({"jpg", "__key__"}), meta=False)
    assert [bare.wants(name) for name in ("jpg", "__key__", "__url__")] == [True, True, False]
    assert [chosen.with_(["cls"]).wants("cls"), chosen.without(["jpg"]).wants("jpg")] == [True, False]


def test_parameters_are_found_by_name() -> None:
    class Call:
        def __call__(self, item: object, rng: object) -> None: ...

    assert takes_parameter(Call(), "rng")
    assert takes_parameter(partial(lambda item, rng: None, 1), "rng")
    assert not takes_parameter(len, "rng")
    assert not takes_parameter(int, "rng")


def test_functions_are_named_for_messages() -> None:
    assert name_of(len) == "len"
    assert name_of(partial(len)) == "partial(len)"
    assert name_of(EngineOptions()) == "EngineOptions"


def test_a_value_held_by_object_equals_only_itself() -> None:
    one = ByObject([1])
    assert one == one
    assert one != ByObject([1])
    assert repr(one) == "[1]"


def test_engine_options_are_looked_up_by_name() -> None:
    options = EngineOptions("local", (("cpus", 3),))
    assert (options.get("cpus"), options.get("memory", 5)) == (3, 5)


def test_counts_may_be_numpy_integers_and_become_ints() -> None:
    two: Any = np.int64(2)
    ds = ps.from_items(range(8)).seed(two).shuffle(two).batched(two)
    loader = ds.loader(0, two)
    next(iter(loader))
    assert json.loads(json.dumps(loader.state_dict()))["world"] == 2
    assert len(ps.from_items(range(8)).repeat(two).skip(two).limit(two).take(two)) == 2
    invalid: list[Any] = [np.float64(2), np.bool_(True), True, -1]
    for value in invalid:
        with pytest.raises(PlanError, match="whole number"):
            ps.from_items(range(8)).limit(value)


def test_cores_are_counted_on_systems_without_affinities(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert available_cores() == (os.cpu_count() or 1)
