"""Which shards a pipeline reads: lists in every form, folders, splitters, resampling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset
from torch.utils.data import IterableDataset

from penstock.compat import webdataset as wds

URLS = "a-{0..4}.tar"


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"typo/: no such folder"):
        wds.WebDataset(f"{tmp_path}/typo/")
    with pytest.warns(UserWarning, match=r"waiting for shards, none matches \*\.tar"):
        assert list(wds.shardlists.DirectoryShardList(f"{tmp_path}/", "*.tar", 0, 0.01)) == []


class Urls(IterableDataset[Any]):
    def __init__(self, *urls: Any) -> None:
        self.urls = urls

    def __iter__(self) -> Iterator[Any]:
        return iter(self.urls)


@pytest.mark.parametrize("kind", [list, iter, Urls])
def test_urls_in_any_iterable_are_shared_by_nodes_and_workers(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = ["a", "b", "c", "d"]
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("WORKER", 1), ("NUM_WORKERS", 2)):
        monkeypatch.setenv(name, str(value))
    ds = wds.WebDataset(Urls(*urls) if kind is Urls else kind(urls), nodesplitter=wds.split_by_node)
    assert [item["url"] for item in wds.DataPipeline(*ds.pipeline[:3])] == ["d"]


def test_a_dataset_that_chooses_shards_itself_is_split_only_where_the_program_says_so() -> None:
    def every_second(source: Any) -> Any:
        return list(source)[::2]

    items = [{"url": "a"}, {"url": "b"}, {"url": "c"}]
    assert wds.split_by_worker not in wds.WebDataset(Urls(*items)).pipeline
    ds = wds.WebDataset(Urls(*items), nodesplitter=every_second)
    assert wds.DataPipeline(*ds.pipeline[:2]).iterator1() == items[::2]
    assert wds.WebDataset(wds.SimpleShardList("a")).pipeline[2] is wds.split_by_worker
    with pytest.raises(ValueError, match="needs URLs"):
        wds.WebDataset(Urls(*items), resampled=True)


def test_no_url_is_lost_and_no_epoch_is_counted_by_a_look_at_a_dataset() -> None:
    once = Urls()
    once.urls = iter(["a", "b", "c"])  # type: ignore[assignment]
    assert wds.WebDataset(once).pipeline[0].urls == ["a", "b", "c"]

    class Counting(Urls):
        epoch = -1

        def __iter__(self) -> Iterator[Any]:
            self.epoch += 1
            yield {"url": f"epoch-{self.epoch}"}

    assert list(wds.WebDataset(Counting()).pipeline[0]) == [{"url": "epoch-0"}]


def test_a_nodesplitter_is_used_with_resampling_too() -> None:
    ds = wds.WebDataset(URLS, resampled=True, nodesplitter=wds.split_by_node)
    assert ds.pipeline[1] is wds.split_by_node
    assert wds.single_node_only not in wds.WebDataset(URLS, resampled=True).pipeline


def test_resampled_shards_take_webdatasets_arguments_in_its_order() -> None:
    def drawn(library: Any) -> Any:
        shards = library.ResampledShards(URLS, 6, 3, lambda: 5, True, 100, True)
        return [item["url"] for item in shards], shards.worker_seed()

    assert drawn(wds) == drawn(webdataset)
    assert wds.shardlists.ResampledShardList(URLS).worker_seed() == 0


@pytest.mark.parametrize("urls", [{"url": "a"}, b"a", 3, [Path("a")], [{"url": "a"}]])
def test_shards_that_are_not_urls_are_refused(urls: Any) -> None:
    with pytest.raises(ValueError, match="cannot handle urls of type"):
        wds.WebDataset(urls)
    with pytest.raises(ValueError, match="is empty"):
        wds.WebDataset([])


def test_sources_are_expanded_as_by_webdataset() -> None:
    for source in (URLS, ["a{1..2}"], list("abcd"), tuple("abcd")):
        assert wds.shardlists.expand_source(source, 3) == webdataset.shardlists.expand_source(source, 3)
    assert wds.shardlists.expand_source(iter("abcd"), 3) == ["a", "b", "c"]
