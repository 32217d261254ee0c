"""Datasets as text: schema, show and explain."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.testing import CORPUS, numbers


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": 2 * sample["x"]}


def keep(sample: dict[str, Any]) -> bool:
    return True


def test_a_schema_names_types_and_shapes() -> None:
    sample = {"__key__": "a", "raw": b"", "n": 1, "v": np.zeros((2, 3), np.float32), "l": ["a"], "e": [], "d": {"k": 1}}
    assert ps.from_items([sample]).schema() == {
        "__key__": "str",
        "raw": "bytes",
        "n": "int",
        "v": "array<float32>[2, 3]",
        "l": "list<str>",
        "e": "list",
        "d": "{k: int}",
    }
    assert ps.from_items([(1, "a")]).schema() == {"0": "int", "1": "str"}
    assert ps.from_items([1]).schema() == {"item": "int"}


def test_a_schema_names_tensors() -> None:
    torch = import_module("torch")
    assert ps.from_items([{"t": torch.zeros(2)}]).schema() == {"t": "tensor<float32>[2]"}


def test_show_prints_short_lines(capsys: pytest.CaptureFixture[str]) -> None:
    items = [{"raw": bytes(1000), "v": np.zeros((2, 3)), "n": 1}, ("a",), "x" * 100]
    ps.from_items(items).show(3)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("{'raw': b'\\x00")
    assert first.endswith("... (1000 bytes), 'v': array<float64>[2, 3], 'n': 1}")
    assert second == "('a',)"
    assert third.endswith("... (100 str)")


@pytest.mark.parametrize("name", CORPUS)
def test_every_plan_of_the_corpus_can_be_shown(name: str) -> None:
    ds = CORPUS[name]()
    assert repr(ds).startswith("<Dataset\n")
    assert ds.explain().startswith("engine local, seed 0")


def test_explain_says_what_is_fused_and_where_it_runs() -> None:
    ds = numbers((3,)).map(double, workers=2).filter(keep).map(double, workers=(1, 8)).batched(4).map(len)
    text = ds.explain()
    assert "threads, workers 2: read -> map(double) -> filter(keep)" in text
    assert "threads, workers (1, 8): map(double)" in text
    assert "at the consumer: batched(4)" in text
    assert "threads, as many workers as cores: map(len)" in text


def test_explain_says_what_runs_inline_and_in_which_order() -> None:
    text = numbers((3,)).shuffle(5).limit(2).select("x").seed(7).on("serial").explain()
    assert "engine serial, seed 7" in text
    assert "order: shuffle(window=5) -> limit(2)" in text
    assert "inline: read -> select('x')" in text
    assert "fields read: x" in text


def test_explain_says_whether_global_batches_depend_on_the_world() -> None:
    ds = numbers((30,))
    assert "global batches are the same" in ds.batched(2).shard(0, 2, "step").explain()
    assert "global batches are not the same" in ds.filter(keep).batched(2).shard(0, 2, "step").explain()


def test_explain_names_the_stage_that_prevents_a_recut() -> None:
    assert "can be restored under any number of ranks" in numbers((3,)).batched(2).explain()
    assert "if it is served" not in numbers((3,)).batched(2).explain()
    assert "one server at a time sends all batches" in numbers((3,)).filter(bool).batched(2).explain()
    assert "batched(3) prevents this plan" in numbers((3,)).batched(2).batched(3).explain()


def test_explain_shows_what_workers_request() -> None:
    class Model:
        def __call__(self, batch: dict[str, object]) -> dict[str, object]:
            return batch

    ds = ps.read_tar("shards-{00..03}.tar", workers=3).decode(workers=(1, 2), cpus=0.5)
    ds = ds.map_batches(Model, 100, workers=1, gpus=2, memory="1GB").on("ray")
    text = ds.explain()
    assert "actors, workers 3: read" in text
    assert "actors, workers (1, 2), cpus 0.5: decode()" in text
    assert "actors, workers 1, gpus 2, memory 1,000,000,000 bytes, 100 rows in a call: map_batches(Model" in text
