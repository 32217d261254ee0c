"""What a pipeline says of itself: its length, its state, and the names that programs look up."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import webdataset
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import Stateful, StatefulDataLoader

from penstock.compat import webdataset as wds
from penstock.errors import StateError


@pytest.fixture
def url(shards: Path) -> str:
    return str(shards / "shard-{000000..000003}.tar")


def test_a_pipeline_has_a_length_only_if_it_was_given_one(url: str) -> None:
    for library in (webdataset, wds):
        ds = library.WebDataset(url, shardshuffle=False)
        assert not hasattr(ds, "__len__")
        with pytest.raises(TypeError):
            len(ds)
        with_length = ds.with_length(7, silent=True)
        assert hasattr(with_length, "__len__")
        assert len(with_length) == 7
    assert len(pickle.loads(pickle.dumps(wds.WebDataset(url).with_length(7, silent=True)))) == 7


def test_epochs_that_workers_count_are_not_saved_as_those_of_this_process(url: str) -> None:
    ds = wds.WebDataset(url, shardshuffle=4, detshuffle=True, seed=1).to_tuple("__key__")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader: Any = DataLoader(ds, batch_size=None, num_workers=2, persistent_workers=True)
        assert [len(list(loader)) for _ in range(2)] == [24, 24]
    with pytest.raises(StateError, match="workers of a DataLoader count"):
        ds.state_dict()
    list(ds)
    assert set(ds.state_dict()["epochs"].values()) == {0}
    loader = wds.WebLoader(ds, batch_size=None).compose(wds.detshuffle(3))
    list(loader)
    with pytest.raises(StateError, match="workers of a DataLoader count"):
        loader.state_dict()


def test_trainers_find_no_state_where_a_pipeline_has_none(url: str) -> None:
    counted = wds.WebDataset(url, shardshuffle=4, detshuffle=True, seed=1)
    for pipeline in (wds.WebDataset(url), counted, wds.WebLoader(counted, batch_size=None), wds.FluidWrapper(counted)):
        assert not hasattr(pipeline, "state_dict")
        assert not isinstance(pipeline, Stateful)
    with pytest.raises(AttributeError, match="'WebDataset' has no attribute 'stat_dict'"):
        counted.stat_dict  # noqa: B018
    next(iter(counted))
    assert hasattr(counted, "state_dict")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(("workers", "options"), [(0, {}), (2, {"shardshuffle": 4, "detshuffle": True, "seed": 1})])
def test_the_loader_of_torchdata_resumes_by_skipping_what_was_read(workers: int, options: Any, url: str) -> None:
    def loader() -> Any:
        return StatefulDataLoader(wds.WebDataset(url, **options).to_tuple("__key__"), None, num_workers=workers)

    stream = iter(before := loader())
    seen = [next(stream) for _ in range(5)]
    after = loader()
    after.load_state_dict(before.state_dict())
    assert [*seen, *after] == list(loader())


class Marked(wds.Decoder):  # type: ignore[misc]
    def decode(self, sample: Any) -> Any:
        return {**super().decode(sample), "marked": True}


def test_a_decoder_may_replace_how_a_sample_is_decoded() -> None:
    assert Marked([])({"cls": b"3"}) == {"cls": 3, "marked": True}
    with pytest.raises(AssertionError, match="samples with named fields"):
        wds.Decoder([])((b"3",))


@pytest.mark.parametrize("extensions", [".npy", "npy", "seg.npy", ".seg.npy", "NPY a.npy", "seg"])
def test_extensions_with_and_without_a_leading_dot_match_as_in_webdataset(extensions: str) -> None:
    keys = [".npy", ".seg.npy", ".x.seg.npy", ".NPY", "npy", ".npz"]
    found = [[library.handle_extension(extensions, len)(key, b"abc") for key in keys] for library in (webdataset, wds)]
    assert found[0] == found[1]


def test_programs_that_do_not_know_the_mark_at_the_end_of_a_shard_skip_it(url: str) -> None:
    def grouped(members: Any) -> Any:
        for member in members:
            name, _ = member["fname"], member["data"]
            if wds.tariterators.base_plus_ext(name)[0] is not None:
                yield name

    files = wds.pipelinefilter(wds.tariterators.tar_file_expander)
    ds = wds.DataPipeline(wds.SimpleShardList(url), wds.cache.StreamingOpen(), files())
    assert len(list(ds.compose(grouped))) == 24 * 6
    assert [member for member in ds if not member] == [{}] * 4


@pytest.mark.parametrize("skip_meta", ["default", None, "s/000[0-3]"])
def test_members_of_an_open_file_are_read_as_by_webdataset(skip_meta: Any, shards: Path) -> None:
    options = {} if skip_meta == "default" else {"skip_meta": skip_meta}
    for name in ("shard-000000.tar", "packed.tgz"):
        data = (shards / name).read_bytes()
        found = [
            list(library.tariterators.tar_file_iterator(io.BytesIO(data), **options, select_files=lambda n: "js" in n))
            for library in (webdataset, wds)
        ]
        assert found[0] == found[1] != []
    with open(shards / "shard-000000.tar", "rb") as file:
        assert len(list(wds.tariterators.tar_file_iterator(file))) == 36


def test_names_that_public_programs_use_are_there(url: str) -> None:
    assert wds.tariterators.meta_prefix == wds.tariterators.meta_suffix == "__"
    assert isinstance(wds.map_dict, wds.filters.RestCurried)
    assert wds.map_dict.__name__ == webdataset.map_dict.__name__
    assert pickle.loads(pickle.dumps(wds.shuffle))(3).args == (3,)
    handlers = dict(wds.writer.default_handlers)
    wds.writer.add_handlers(handlers, "a b", len)
    assert (handlers["a"], handlers["b"]) == (len, len)
    mock = wds.MockDataset({"a": 1}, 3)
    assert isinstance(mock, wds.MockDataset)
    assert list(mock) == list(mock) == [{"a": 1}] * 3
    assert list(wds.FluidWrapper([{"a": 1}, {"a": 2}]).to_tuple("a")) == [(1,), (2,)]


def test_samples_of_the_wrong_kind_are_errors() -> None:
    def run(data: Any, stage: Any) -> Any:
        return list(wds.DataPipeline([data], stage))

    for sample, stage in (({"a": 1}, wds.map_tuple), ((1,), wds.map_dict)):
        with pytest.raises(AssertionError, match="map_dict takes dicts, map_tuple takes tuples"):
            run([sample], stage(handler=wds.ignore_and_continue))
    for wrong in ((1, 2), "ab"):
        with pytest.raises(AssertionError, match="unlisted takes lists"):
            run([wrong], wds.filters.unlisted())
    with pytest.raises(AssertionError, match="2 functions for 1 values"):
        wds.transform_with([1], [str, str])
    with pytest.raises(AssertionError, match=r"rsample\(2\)"):
        run([1], wds.rsample(2))
    with pytest.raises(ValueError, match=r"batched\(0\)"):
        run([(1,)], wds.batched(0))
    for unequal in (([1, 2], [3]), ([1], [2, 3]), {"a": [1], "b": [2, 3]}):
        with pytest.raises(ValueError, match=r"different lengths: \[1, 2\]"):
            run([unequal], wds.unbatched())


@pytest.mark.parametrize("key", [None, 7, b"k"])
def test_a_key_that_is_not_text_is_not_written(key: Any) -> None:
    for library in (webdataset, wds):
        with pytest.raises(ValueError, match="must"):
            library.TarWriter(io.BytesIO()).write({"__key__": key, "cls": 1})
