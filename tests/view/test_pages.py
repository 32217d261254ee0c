"""The pages of samples, stages, balance, shards, a ledger and a run, as values."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.codecs.markup import joined_markup
from penstock.engines.run_log import LOG_SUFFIX
from penstock.errors import PlanError
from penstock.view.balance_pages import balance_page, measure_balance
from penstock.view.browser import Browser
from penstock.view.layout import bars, link, page
from penstock.view.ledger_pages import LedgerView
from penstock.view.run_pages import RunView, line_chart
from penstock.view.sample_pages import Query, sample_page, samples_page
from penstock.view.shard_pages import VerifyTask, shards_page, verify_panel
from penstock.view.stage_pages import StageViewer, stages_page

DEADLINE_S = 120.0


def text_of(content: list[Any]) -> str:
    return str(joined_markup(content))


@pytest.fixture(scope="module")
def browser(tiny_shards: list[Path]) -> Browser:
    """The samples in ``tiny_shards``."""
    return Browser(ps.read_tar([str(path) for path in tiny_shards]))


def test_a_page_links_to_its_neighbours(browser: Browser) -> None:
    browser.count_shards()
    middle = text_of(samples_page(browser, Query(at=40, count=20)))
    assert 'href="/samples?at=20&amp;n=20" rel="prev"' in middle
    assert 'href="/samples?at=60&amp;n=20" rel="next"' in middle
    assert "Page 3 of 5" in middle
    last = text_of(samples_page(browser, Query(at=80, count=20)))
    assert 'rel="next"' not in last
    assert "No sample here" in text_of(samples_page(browser, Query(at=1000, count=20)))


def test_a_search_continues_on_the_next_page(browser: Browser) -> None:
    first = text_of(samples_page(browser, Query(where="cls == 1", count=5)))
    assert 'href="/samples?at=14&amp;n=5&amp;where=cls+%3D%3D+1" rel="next"' in first
    assert "5 found" in first


@pytest.mark.parametrize(
    ("given", "query"),
    [
        ({}, Query()),
        ({"n": "5000"}, Query(count=200)),
        ({"n": "10", "page": "3"}, Query(at=20, count=10)),
        ({"seed": " 7 ", "at": "5"}, Query(at=5, seed=7)),
        ({"where": " a == 1 "}, Query(where="a == 1")),
    ],
)
def test_an_address_is_read(given: dict[str, str], query: Query) -> None:
    assert Query.of(given) == query


def test_a_sample_page_says_where_the_sample_is_and_how_it_was_decoded(browser: Browser) -> None:
    shown = text_of(sample_page(browser, 30, stages=True))
    for text in ("train-0001.tar", "Number in the shard", "decoded as image", "48 x 32 JPEG", "/stages?at=30"):
        assert text in shown
    with pytest.raises(PlanError, match="there is no sample 1,000"):
        sample_page(browser, 1000, stages=False)


def test_a_sample_that_cannot_be_read_has_a_reason(tmp_path: Path) -> None:
    with ps.TarWriter(tmp_path / "a.tar") as writer:
        for number in range(3):
            writer.write({"__key__": f"{number}", "txt": b"x" * 600})
    content = bytearray((tmp_path / "a.tar").read_bytes())
    content[1536 + 100 : 1536 + 200] = bytes(100)  # the second header
    (tmp_path / "a.tar").write_bytes(content)
    damaged = Browser(ps.read_tar(tmp_path / "a.tar"))
    shown = text_of(samples_page(damaged, Query()))
    assert 'class="error"' in shown
    assert 'class="error"' in text_of(sample_page(damaged, 1, stages=False))


def _noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise": float(rng.random())}


def test_stages_give_what_training_gets(tiny_shards: list[Path]) -> None:
    ds = ps.read_tar([str(path) for path in tiny_shards]).shuffle(seed=3).decode("rgb8").map(_noisy)
    viewer = StageViewer(ds.batched(4))
    for epoch in (0, 1):
        training = list(ds.epoch(epoch))
        for position in (0, 7, 99):
            outputs = viewer.outputs(position, epoch, stored=False)
            assert [output.stage.partition("(")[0] for output in outputs] == ["as stored", "decode", "map"]
            (last,) = outputs[-1].outputs
            assert last["__key__"] == training[position]["__key__"]
            assert last["noise"] == training[position]["noise"]
            assert np.array_equal(last["jpg"], training[position]["jpg"])
    stored = viewer.outputs(5, 0, stored=True)
    assert stored[0].outputs[0]["__key__"] == "000005"
    with pytest.raises(PlanError, match="there is no position 100"):
        viewer.outputs(100, 0, stored=False)
    assert "batched(4) joins samples" in text_of(stages_page(viewer, 0, 0, False))


def test_stages_show_removed_samples_several_outputs_and_failures() -> None:
    items = ps.from_items([{"x": number} for number in range(6)])
    removed = StageViewer(items.filter(lambda sample: sample["x"] > 2))
    assert "removed the sample" in text_of(stages_page(removed, 0, 0, False))
    several = StageViewer(items.flat_map(lambda sample: [sample] * 3))
    assert "output 2" in text_of(stages_page(several, 0, 0, False))
    failing = StageViewer(items.map(lambda sample: 1 / sample["x"]).map(str))
    shown = failing.outputs(0, 0, stored=False)
    assert shown[-1].problem == "ZeroDivisionError: division by zero"
    assert len(shown) == 2


def test_balance_counts_labels_and_sizes(
    tiny_shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.view.balance_pages._SECONDS", 60)
    browser = Browser(ps.read_tar([str(path) for path in tiny_shards]))  # a new one: no other page has counted shards
    shown = text_of(balance_page(browser, measure_balance(browser)))
    assert "and 100 of 100 samples" in shown
    assert "jpg: longer side, pixels" in shown
    ps.read_tar([reader.url(n) for reader in browser.readers for n in range(4)]).write_tar(tmp_path / "packed")
    indexed = Browser(ps.read_tar(tmp_path / "packed"))
    balance = measure_balance(indexed)
    assert balance.labels["cls"] == {0: 34, 1: 33, 2: 33}
    assert balance.indexed["cls"] == 100
    assert balance.field_bytes["cls"] == 100
    assert "where=cls+%3D%3D+1" in text_of(balance_page(indexed, balance))


def test_a_verification_finds_damage_once_started(tmp_path: Path) -> None:
    ps.from_items([{"__key__": f"{n}", "txt": b"x" * 5000} for n in range(20)]).write_tar(tmp_path, max_samples=10)
    broken = tmp_path / "shard-000001.tar"
    content = bytearray(broken.read_bytes())
    content[9000] ^= 1
    broken.write_bytes(content)
    browser, task = Browser(ps.read_tar(tmp_path)), VerifyTask([str(tmp_path)])
    assert "Verify all shards" in text_of(shards_page(browser, task, 0))
    task.start()
    deadline = time.monotonic() + DEADLINE_S
    while task.running and time.monotonic() < deadline:
        time.sleep(0.02)
    shown = text_of(shards_page(browser, task, 0))
    assert "2 of 2 verified" in shown
    assert "<strong>damaged</strong>" in shown
    assert "good" in shown
    task.stop()
    assert "SHA-256" in verify_panel(task)
    nothing = VerifyTask([str(tmp_path / "nothing")])
    nothing.start()
    while nothing.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "there is no such" in verify_panel(nothing) or 'class="error"' in verify_panel(nothing)
    stopped = VerifyTask([str(tmp_path)])
    stopped.stop()
    stopped.start()
    assert "No problems found" not in verify_panel(stopped)


def test_a_ledger_shows_steps_and_what_is_wrong(tmp_path: Path, tiny_shards: list[Path]) -> None:
    ds = ps.read_tar([str(path) for path in tiny_shards]).shuffle().batched(10)
    for rank in range(2):
        for _ in ds.loader(rank=rank, world=2, uneven="keep", ledger=tmp_path / "ledger"):
            pass
    browser = Browser(ps.read_tar([str(path) for path in tiny_shards]))
    view = LedgerView(str(tmp_path / "ledger"), browser)
    assert "every sample came exactly once" in text_of(view.overview())
    step = text_of(view.step(2, None))
    assert step.count('class="card"') == 20
    assert "Rank 1" in step
    assert "train-0000.tar[" in text_of(LedgerView(str(tmp_path / "ledger"), None).step(0, 0))
    with pytest.raises(PlanError, match="has no such step"):
        view.step(1000, None)
    for path in sorted((tmp_path / "ledger").glob("*"))[:]:
        if path.suffix not in (".json",):
            path.write_bytes(path.read_bytes()[:-200])
            break
    assert "cut off" in text_of(view.overview()) or "not finished" in text_of(view.overview())


def _log(folder: Path, rank: int, seconds: int, *, running: bool, items: int) -> None:
    begin = {"run": 0, "time": 1000.0, "kind": "begin", "host": "far", "rank": rank, "world": 2, "epoch": 1, "pid": 1}
    lines = [begin]
    for second in range(1, seconds + 1):
        segment = {"name": 'map("x")', "on": "threads", "workers": 2, "busy": 0.5, "starved": 0.3, "blocked": 0.1}
        line = {"run": 0, "time": 1000.0 + second, "kind": "stats", "segments": [{**segment, "queue_fill": 3}]}
        line |= {"items": items * second, "seconds": float(second), "running": running or second < seconds}
        lines.append({**line, "bottleneck": "map is <busy>", "memory": 5_000_000, "consumer": 0.25})
    (folder / f"rank-{rank}{LOG_SUFFIX}").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_drawn_and_measured(tmp_path: Path) -> None:
    _log(tmp_path, 0, 10, running=False, items=100)
    _log(tmp_path, 1, 5, running=True, items=50)
    view = RunView(str(tmp_path))
    shown = text_of(view.content())
    assert "2 of 2 ranks, 1 ended, 1 silent" in shown
    assert "Rank 1: no news" in shown
    assert "map is &lt;busy&gt;" in shown
    assert "Items per second; now rank 0 100, rank 1 50" in shown
    assert "busy 50%, starved 30%, blocked 10%" in shown
    metrics = view.metrics()
    assert 'penstock_items_total{rank="0",world="2",epoch="1",host="far"} 1000' in metrics
    assert 'stage="map(\\"x\\")"} 0.5' in metrics
    assert all(line.startswith(("#", "penstock_")) for line in metrics.splitlines())


def test_metrics_are_exact_and_tell_stages_of_one_name_apart(tmp_path: Path) -> None:
    begin = {"run": 0, "time": 1000.0, "kind": "begin", "host": "far", "rank": 0, "world": 1, "epoch": 0, "pid": 1}
    line = {"run": 0, "time": 1001.0, "kind": "stats", "items": 123_456_789, "memory": 5_000_001, "running": False}
    segments = [{"name": "map(f)", "busy": busy} for busy in (0.25, 0.5)]
    lines = [begin, {**line, "segments": segments}]
    (tmp_path / f"rank-0{LOG_SUFFIX}").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = dict(line.rsplit(" ", 1) for line in RunView(str(tmp_path)).metrics().splitlines() if line[0] != "#")
    labels = 'rank="0",world="1",epoch="0",host="far"'
    assert samples[f"penstock_items_total{{{labels}}}"] == "123456789"
    assert samples[f"penstock_memory_bytes{{{labels}}}"] == "5000001"
    busy = [samples[f'penstock_stage_busy{{{labels},segment="{place}",stage="map(f)"}}'] for place in range(2)]
    assert busy == ["0.25", "0.5"]


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    assert "No run has written here yet" in text_of(RunView(str(tmp_path / "nothing")).content())


def test_elements_are_well_formed() -> None:
    assert link("/samples", at=None, where="a b") == "/samples?where=a+b"
    assert 'width="50.00"' in bars([("a", 2, "2", None), ("b", 1, "1", "/x")], "label")
    assert "no values yet" in line_chart("empty", [("a", [])])
    whole = page("T", "<", here="/a", sections=[("/a", "A"), ("/b", "B")])
    assert whole.startswith("<!doctype html><html")
    assert '<a href="/a" aria-current="page">A</a>' in whole
