"""The programs of the slides, as printed but for the import, and the names that WebDataset removed."""

from __future__ import annotations

import itertools
import multiprocessing
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as peer
from PIL import Image
from torch.utils.data import DataLoader

import penstock as ps
from penstock.compat import webdataset as wds
from penstock.compat.webdataset import WebDataset
from penstock.compat.webdataset.writer import TarWriter

pytestmark = pytest.mark.filterwarnings("ignore:WebDataset.* is deprecated", "ignore:This DataLoader")


@pytest.fixture
def url(shards: Path) -> str:
    return str(shards / "shard-{000000..000003}.tar")


def augment(image: Image.Image) -> torch.Tensor:
    resized = np.asarray(image.resize((8, 8)), np.float32)
    return torch.from_numpy(resized).permute(2, 0, 1) / 255


def process_sample(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__key__": sample["__key__"], "png": sample["jpg"].resize((16, 16)), "cls": str(sample["cls"])}


def test_extensions_select_images_and_classes(url: str) -> None:
    imagenet = WebDataset(url, extensions="jpg cls")
    image, cls = next(iter(imagenet))
    assert (image.dtype, image.ndim, cls) == (np.float32, 3, 0)
    assert 0 <= image.min() <= image.max() <= 1
    with pytest.raises(NotImplementedError):
        imagenet[0]


def test_decoder_chooses_tensors_or_bytes(url: str) -> None:
    image, cls = next(iter(WebDataset(url, extensions="jpg cls", decoder="torch")))
    assert isinstance(image, torch.Tensor)
    assert image.shape[0] == 3
    image, cls = next(iter(WebDataset(url, extensions="jpg cls", decoder=None)))
    assert (type(image), cls) == (bytes, b"0")


def test_transforms_apply_to_each_element_with_and_without_shuffling(url: str) -> None:
    transforms = [augment, lambda x: x - 1]
    plain = [cls for _, cls in WebDataset(url, extensions="jpg cls", decoder="pil", transforms=transforms)]
    assert plain == list(range(-1, 23))
    imagenet = WebDataset(url, shuffle=100, extensions="jpg cls", decoder="pil", transforms=transforms)
    assert sorted(cls for _, cls in imagenet) == plain


def test_a_loader_makes_batches_in_workers(url: str) -> None:
    imagenet = WebDataset(url, extensions="jpg cls", decoder="pil", transforms=[augment, lambda x: x - 1])
    loader: Any = DataLoader(imagenet, batch_size=16, num_workers=2)
    images, classes = next(iter(loader))
    assert (images.size(), classes.size()) == (torch.Size([12, 3, 8, 8]), torch.Size([12]))


def test_samples_are_processed_and_written(shards: Path, tmp_path: Path) -> None:
    small = str(shards / "shard-000001.tar")
    sink = TarWriter(str(tmp_path / "out1.tar"))
    for sample in WebDataset(small, decoder="pil"):
        sink.write(process_sample(sample))
    sink.close()
    with multiprocessing.get_context("fork").Pool(2) as pool, TarWriter(str(tmp_path / "out2.tar")) as out:
        for sample in pool.imap_unordered(process_sample, WebDataset(small, decoder="pil")):
            out.write(sample)
        pool.close()  # leaving the pool sends SIGTERM, which a handler of Ray in this process may catch
        pool.join()
    written = [{s["__key__"]: s["cls"] for s in ps.read_tar(str(tmp_path / f"out{n}.tar"))} for n in (1, 2)]
    assert written[0] == written[1] == {f"s/{number:04d}": str(number).encode() for number in range(6, 12)}


def test_missing_fields_are_none_and_other_classes_bytes(tmp_path: Path) -> None:
    with TarWriter(str(tmp_path / "a.tar")) as sink:
        sink.write({"__key__": "a", "cls": "cat", "txt": "t"})
    assert list(WebDataset(str(tmp_path / "a.tar"), extensions="cls jpg txt")) == [(b"cat", None, "t")]


def test_an_unknown_argument_is_refused(url: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'extension'"):
        WebDataset(url, extension="jpg")


def test_removed_names_work_and_say_what_to_write(url: str, shards: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"write wds\.WebDataset"):
        ds = wds.Dataset(url, length=24)
    assert len(ds) == 24
    with pytest.warns(DeprecationWarning, match="with_epoch"):
        resized = wds.ResizedDataset(ds.to_tuple("__key__"), 10)
    keys = [key for _ in range(3) for (key,) in resized]
    assert keys == [f"s/{number % 24:04d}" for number in range(30)]
    with pytest.warns(DeprecationWarning, match="with_epoch"):
        assert len(wds.ChoppedDataset(ds, 7)) == 7
    with pytest.warns(DeprecationWarning, match="SimpleShardList"):
        shard_list = wds.PytorchShardList(url)
    assert sorted(item["url"] for item in shard_list) == sorted(shard_list.urls)
    with pytest.warns(DeprecationWarning, match="with_epoch"):
        equal = wds.WebDataset(url).batched(2, collation_fn=None).ddp_equalize(30)
    assert len(equal) == len(list(equal)) == 30
    cached = wds.DataPipeline(wds.SimpleShardList(url), wds.cached_tarfile_to_samples(cache_dir=str(shards)))
    with pytest.warns(DeprecationWarning, match="cache_dir"):
        assert len(list(cached)) == 24


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves its last shard open
def test_written_shards_are_read_by_webdataset_and_by_penstock(tmp_path: Path) -> None:
    samples = [{"__key__": f"f/{n:03d}", "txt": f"é{n}".encode(), "bin": bytes(n * 100)} for n in range(25)]
    for name, options in (("a-%d.tar", {}), ("b-%d.tgz", {}), ("c-%d.tar", {"compress": "xz", "format": "GNU_FORMAT"})):
        with wds.ShardWriter(str(tmp_path / name), maxcount=10, verbose=0, encoder=False, **options) as sink:
            for sample in samples:
                sink.write(sample)
        urls = [str(tmp_path / name) % shard for shard in range(3)]
        for read in (peer.WebDataset(urls, shardshuffle=False), ps.read_tar(urls), wds.WebDataset(urls)):
            kept = [{field: s[field] for field in ("__key__", "txt", "bin")} for s in read]
            assert kept == samples
    with tarfile.open(tmp_path / "a-0.tar") as tar:
        assert not any(member.pax_headers for member in tar)


@pytest.mark.filterwarnings("ignore:.* is deprecated")
def test_arguments_of_the_first_versions_have_their_meaning(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(wds.WebDataset(url, length=7)) == 7
    resized = wds.ResizedDataset(wds.WebDataset(url), 5, nominal=50)
    assert (len(resized), len(list(resized))) == (50, 5)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="fewer batches than ranks"):
        wds.WebDataset(url).ddp_equalize(1)

    def of_ranks(epoch: int) -> list[list[str]]:
        monkeypatch.setenv("WDS_EPOCH", str(epoch))
        shares = []
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            shares.append(sorted(item["url"] for item in wds.PytorchShardList(url, True, False)))
        return shares

    epochs = [of_ranks(epoch) for epoch in range(8)]
    assert all(sorted(itertools.chain(*shares)) == wds.SimpleShardList(url).urls for shares in epochs)
    assert len({str(shares) for shares in epochs}) > 1, "ranks change shards by epoch"
    monkeypatch.delenv("WDS_EPOCH")
    with pytest.raises(ValueError, match="as WDS_EPOCH"):
        list(wds.PytorchShardList(url, epoch_shuffle=True))
    shard_list = wds.PytorchShardList(url, split_by_node=False)
    assert [list(shard_list) != list(shard_list) for _ in range(3)].count(True) > 0
    assert [sorted(item["url"] for item in shard_list) for _ in range(2)] == [wds.SimpleShardList(url).urls] * 2
