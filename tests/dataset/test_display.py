"""Datasets as text: schema, show and explain; and what a notebook shows of a dataset, a loader and statistics."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import StageError
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


def test_a_dataset_shows_its_plan_length_and_samples(tiny_shards: list[Path]) -> None:
    ds = ps.read_tar([str(path) for path in tiny_shards]).shuffle(seed=1)
    html = ds._repr_html_()
    assert "100 items" in html
    assert html.count("data:image/jpeg;base64,") == 6  # a JPEG and a PNG each
    assert "shuffle(" in html
    assert [sample["__key__"] for sample in ds] == [sample["__key__"] for sample in ds.epoch(0)]  # no epoch was used


def test_text_from_data_is_escaped() -> None:
    html = ps.from_items([{"<script>": "<script>alert(1)</script>"}])._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_a_failing_stage_does_not_break_the_display() -> None:
    ds = ps.from_items([{"x": 0}]).map(lambda sample: 1 / sample["x"])
    assert "No sample can be shown: StageError" in ds._repr_html_()


def test_processes_and_devices_are_not_started_for_a_display() -> None:
    def refuse(sample: Any) -> Any:
        raise AssertionError("it runs")

    ds = ps.from_items([{"x": 5}]).map(refuse, on="processes", workers=1)
    assert ">5<" in ds._repr_html_()


def test_a_missing_shard_does_not_break_the_display(tmp_path: Path) -> None:
    assert "length not known" in ps.read_tar(tmp_path / "none.tar")._repr_html_()


def test_schema_explanation_statistics_and_loader_have_html() -> None:
    ds = ps.from_items([{"x": 1, "y": "<"}] * 10).map(dict)
    assert ds.schema() == {"x": "int", "y": "str"}
    schema: Any = ds.schema()
    assert "<td" in schema._repr_html_()
    text: Any = ds.explain()
    assert text._repr_html_().startswith("<pre>engine local")
    list(ds)
    html = ds.stats()._repr_html_()
    assert "<th>samples/s</th>" in html
    assert "10 delivered" in html
    loader = ds.batched(2).loader(rank=1, world=2)
    assert "rank 1 of 2, epoch 0" in loader._repr_html_()


def test_a_traceback_in_a_notebook_has_the_users_frames_only() -> None:
    def broken(sample: Any) -> Any:
        raise KeyError("nothing")

    with pytest.raises(StageError) as caught:
        ps.from_items([1]).map(broken).take(1)
    lines = caught.value._render_traceback_()
    assert lines[-1].startswith("StageError: KeyError: 'nothing'")
    assert any("in broken" in line for line in lines)
    assert not any("penstock/engines" in line for line in lines)
