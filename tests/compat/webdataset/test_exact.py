"""A pipeline as a dataset: the same samples, an exact order, resume; and what a pipeline's own state promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.compat import webdataset as wds
from penstock.errors import PlanError, StateError


@pytest.fixture
def url(shards: Path) -> str:
    return str(shards / "shard-{000000..000003}.tar")


def third_dropped(sample: dict[str, Any]) -> Any:
    return {"x": sample["cls"]} if sample["cls"] % 3 else None


def fails_on_four(sample: tuple[Any, ...]) -> Any:
    if sample[1] == 4:
        raise ValueError("four")
    return (int(sample[0].sum()), sample[1])


def fails_on_dict(sample: dict[str, Any]) -> Any:
    return fails_on_four((np.zeros(1), sample["cls"])) and sample


def test_the_dataset_has_the_samples_of_the_pipeline(url: str) -> None:
    raw = wds.WebDataset(url, shardshuffle=False)
    pipelines = [
        raw.decode("rgb8").to_tuple("jpg;png", "cls").map(fails_on_four, handler=wds.ignore_and_continue),
        raw.decode().map(third_dropped),
        raw.decode(only="cls").select(lambda s: s["cls"] > 5).rename(label="cls").map_dict(label=str),
        raw.to_tuple("cls", "txt").map_tuple(int, None).batched(5, partial=False),
        raw.to_tuple("cls").batched(5).unbatched().slice(3, 9),
        raw.to_tuple("__key__").listed(7),
        raw.to_tuple("cls").slice(3, None),
        raw.to_tuple("cls").slice(None),
        raw.to_tuple("cls").slice(2, 12, 1).slice(4),
        raw.shuffle(1).to_tuple("cls").compose(wds.shuffle(0), wds.detshuffle(1)),
        wds.WebDataset(url, shardshuffle=1).to_tuple("txt"),
        raw.decode().compose(wds.map(fails_on_dict, wds.ignore_and_continue)).to_tuple("cls"),
        wds.DataPipeline(wds.SimpleShardList(url), wds.split_by_worker, wds.tarfile_to_samples(), wds.to_tuple("cls")),
    ]
    for pipeline in pipelines:
        with_names = [_without_path(sample) for sample in pipeline]
        ds = pipeline.exact()
        assert isinstance(ds, ps.Dataset)
        assert [_without_path(sample) for sample in ds] == with_names
        assert with_names


def _without_path(sample: Any) -> Any:
    if isinstance(sample, dict):
        return {name: value for name, value in sample.items() if name != "__local_path__"}
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in sample]


def test_a_shuffled_pipeline_resumes_after_any_batch(url: str) -> None:
    pipeline = wds.WebDataset(url, shardshuffle=100, seed=3).shuffle(1000).decode().to_tuple("cls").batched(5)
    ds = pipeline.exact()
    loader = ds.loader()
    batches = [batch[0].tolist() for batch in loader]
    numbers = [number for batch in batches for number in batch]
    assert sorted(numbers) == list(range(24)) != numbers
    again = ds.loader()
    stream = iter(again)
    next(stream)
    state = again.state_dict()
    rest = ds.loader()
    rest.load_state_dict(state)
    assert [batch[0].tolist() for batch in rest] == batches[1:]


def whole_stream(source: Iterator[Any]) -> Iterator[Any]:
    yield from source


class OwnIteration(wds.DataPipeline):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return iter([])


def shards_then(*stages: Any) -> Any:
    """Return what makes a pipeline of the same shards with other stages."""
    return lambda ds: wds.DataPipeline(wds.SimpleShardList(ds.pipeline[0].urls), *stages)


grouped = wds.pipelinefilter(wds.tariterators.group_by_keys)
expanded = wds.pipelinefilter(wds.tariterators.tar_file_expander)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (shards_then(), "reads shards"),
        (shards_then(wds.batched(2)), "reads shards"),
        (shards_then(wds.cache.StreamingOpen(), expanded()), "reads shards"),
        (shards_then(expanded(), grouped()), "reads shards"),
        (shards_then(wds.slice(1), wds.tarfile_to_samples()), "'islice' .* a stage of shards"),
        (shards_then(wds.select(bool), wds.tarfile_to_samples()), "'select' .* a stage of shards"),
        (shards_then(wds.tarfile_to_samples(wds.ignore_and_continue)), "leave out handler=ignore_and_continue"),
        (shards_then(wds.tarfile_to_samples(wds.reraise_exception, len)), "leave out select_files=len"),
        (shards_then(wds.cache.StreamingOpen(), expanded(), grouped(suffixes={"cls"})), r"suffixes=\{'cls'\}"),
        (lambda ds: wds.WebDataset(ds.pipeline[0].urls, handler=wds.warn_and_continue), r"\.on_error\('skip'\)"),
        (lambda ds: ds.compose(whole_stream), "'whole_stream'"),
        (lambda ds: ds.compose(wds.filters.Cached()), "'Cached'"),
        (lambda ds: ds.with_epoch(10), r"with_epoch\(10\)"),
        (lambda ds: OwnIteration(*ds.pipeline), "'OwnIteration'"),
        (lambda ds: wds.WebDataset(ds.pipeline[0].urls, resampled=True), "'ResampledShards'"),
        (lambda ds: wds.WebDataset(ds.pipeline[0].urls, select_files=bool), "select_files"),
        (lambda ds: wds.WebDataset(ds.pipeline[0].urls, handler=wds.warn_and_stop), "warn_and_stop"),
    ],
)
def test_a_stage_without_a_counterpart_is_named(change: Any, named: str, url: str) -> None:
    with pytest.raises(PlanError, match=named):
        change(wds.WebDataset(url)).exact()


def test_a_handler_that_wants_to_stop_is_an_error_in_the_dataset(url: str) -> None:
    ds = wds.WebDataset(url).decode("rgb8").to_tuple("jpg", "cls").map(fails_on_four, handler=wds.ignore_and_stop)
    with pytest.raises(ps.errors.StageError, match="four"):
        list(ds.exact())


def test_a_state_holds_the_epochs_of_stages_that_count_them(url: str) -> None:
    def pipeline() -> Any:
        return wds.WebDataset(url, shardshuffle=4, detshuffle=True, seed=1).to_tuple("__key__")

    ds = pipeline()
    list(ds)
    state = ds.state_dict()
    other = pipeline()
    other.load_state_dict(state)
    assert list(other) == list(ds)
    with pytest.raises(StateError, match="other stages"):
        pipeline().batched(2).load_state_dict(state)


def test_a_pipeline_without_epochs_refuses_to_save(url: str) -> None:
    with pytest.raises(StateError, match=r"\.exact\(\)\.loader\(\)"):
        wds.WebDataset(url, shardshuffle=False).shuffle(10).state_dict()
