"""What a notebook shows of a dataset, a loader and statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import StageError


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
