"""WebDataset's fluent classes and the methods that they share; at the end, what it removed and programs still call."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, islice
from typing import Any
from urllib.parse import urlparse

from penstock.codecs.text import decode_msgpack
from penstock.compat.webdataset import cache, filters, shardlists, tariterators, utils
from penstock.compat.webdataset.autodecode import Decoder, ImageHandler, handle_extension
from penstock.compat.webdataset.handlers import Handler, reraise_exception
from penstock.compat.webdataset.pipeline import DataPipeline
from penstock.compat.webdataset.pytorch import DataLoader, IterableDataset
from penstock.compat.webdataset.shardlists import split_by_worker

_OLD_INTEGERS, _OLD_IMAGES = "cls cls2 class count index inx id", "png jpg jpeg img image pbm pgm ppm"


class FluidInterface:
    """Methods that return a pipeline with one more stage; each stands for the function of its name in ``filters``."""

    compose: Any

    def listed(self, batchsize: int, partial: bool = True) -> Any:
        return self.compose(filters.batched(batchsize, collation_fn=None, partial=partial))

    def shuffle(self, size: int, **kw: Any) -> Any:
        return self if size < 1 else self.compose(filters.shuffle(size, **kw))

    def ddp_equalize(self, length: int, with_length: bool = True) -> Any:
        utils.warn_deprecated("ddp_equalize", "write .with_epoch(n), n being the items of one rank")
        world = utils.pytorch_worker_info()[1]
        if length < world:
            raise ValueError(f"ddp_equalize({length}): fewer batches than ranks, of which there are {world}")
        each: Any = self.compose().with_epoch(length // world)
        return each.with_length(each.nsamples, silent=True) if with_length else each


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: FluidInterface, *args: Any, **kw: Any) -> Any:
        return self.compose(getattr(filters, name)(*args, **kw))

    method.__name__, method.__doc__ = name, f"Add the stage ``filters.{name}``."
    return method


for _name in (
    *("batched", "unbatched", "unlisted", "map", "map_dict", "select", "to_tuple", "map_tuple", "slice", "rename"),
    *("rename_keys", "extract_keys", "decode", "xdecode", "associate", "detshuffle", "rsample", "mcached"),
):
    setattr(FluidInterface, _name, _forwarded(_name))


class WebDataset(DataPipeline, FluidInterface, AbstractContextManager["WebDataset"]):
    """The samples of shards: of a pattern, a list, a dataset of URLs or ``dict(url=...)``, or a folder with a slash."""

    def __init__(
        self,
        urls: Any,
        handler: Handler = reraise_exception,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool = False,
        shardshuffle: bool | int | None = None,
        cache_size: float = -1,
        cache_dir: Any = None,
        url_to_name: Any = cache.pipe_cleaner,
        detshuffle: bool = False,
        nodesplitter: Any = shardlists.single_node_only,
        workersplitter: Any = split_by_worker,
        select_files: Any = None,
        rename_files: Any = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: Any = None,
        **old: Any,
    ) -> None:
        super().__init__()
        later: list[Any] = [shardlists.non_empty] if empty_check else []
        self.size = old.pop("length", None)
        if old:
            later, shardshuffle = _old_stages(**old), old.get("shuffle", 0) > 0 and 10_000
        self.seed = os.environ.get("WDS_SEED") if seed is None else seed
        resampled = resampled or mode == "resampled"
        self.append(source := _source(urls, resampled, mode))
        own = () if type(source) is shardlists.SimpleShardList else (shardlists.single_node_only, split_by_worker)
        splitters = (nodesplitter, workersplitter)  # but the default ones, where each worker has shards of its own
        self.pipeline += [stage for stage in splitters if stage and stage not in own]
        if shardshuffle and not resampled:
            size = 100 if shardshuffle is True else shardshuffle
            by_epoch = filters.detshuffle(size, seed=int(self.seed or 0)) if detshuffle else None
            self.append(by_epoch or filters.shuffle(size, seed=self.seed))
        self.append(_opener(cache_dir, cache_size, url_to_name, verbose, handler))
        chosen = {"select_files": select_files, "rename_files": rename_files}
        self.append(filters.FilterFunction(tariterators.tar_file_expander, handler=handler, **chosen))
        self.append(filters.FilterFunction(tariterators.group_by_keys, handler=handler))
        self.pipeline += later

    def __exit__(self, *error: Any) -> None:
        self.close()


def _source(urls: Any, resampled: bool, mode: str | None) -> Any:
    own = isinstance(urls, shardlists.ResampledShards | shardlists.DirectoryShardList | shardlists.SimpleShardList)
    if isinstance(urls, IterableDataset) and not own:
        first = [*islice(items := iter(copy.copy(urls)), 1)]  # of a copy, since a dataset may count its epochs
        own = any(isinstance(item, dict) for item in first)
        urls = urls if own else chain(first, items)
    if own and resampled:
        raise ValueError("resampled=True needs URLs, a pattern or a list: this dataset chooses the shards itself")
    if own:
        return urls
    urls = os.fspath(urls) if isinstance(urls, os.PathLike) else urls
    if isinstance(urls, str) and urls.endswith((".json", ".yaml", ".yml")):
        raise ValueError(f"{urls}: use penstock.compat.wids for an index of shards")
    if isinstance(urls, str) and urlparse(urls).path.endswith("/"):
        return shardlists.DirectoryShardList(urls, mode=mode or "resample")
    return (shardlists.ResampledShards if resampled else shardlists.SimpleShardList)(urls)


def _opener(cache_dir: Any, cache_size: float, url_to_name: Any, verbose: bool, handler: Handler) -> Any:
    cache_dir = os.environ.get("WDS_CACHE", cache_dir)
    cache_size = float(os.environ.get("WDS_CACHE_SIZE", cache_size))
    if cache_dir is None or cache_size == 0:
        return cache.StreamingOpen(handler=handler)
    folder = os.path.expanduser(cache_dir)
    if not os.path.exists(folder):
        raise ValueError(f"cache directory {folder} does not exist")
    return cache.FileCache(folder, url_to_name, verbose, handler=handler, cache_size=cache_size)


class FluidWrapper(DataPipeline, FluidInterface):
    def __init__(self, initial: Any) -> None:
        super().__init__([initial])


class WebLoader(DataPipeline, FluidInterface):
    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(DataLoader(*args, **kw))


class MockDataset(DataPipeline):
    def __init__(self, sample: Any, length: int) -> None:
        super().__init__([[sample] * length])


def with_length(dataset: Any, length: int) -> DataPipeline:
    return DataPipeline(dataset).with_length(length, silent=True)


def _old_stages(*, extensions: Any = None, decoder: Any = "rgb", transforms: Any = None, shuffle: int = 0) -> list[Any]:
    """Return the stages that the arguments of the first versions stand for; ``TypeError`` for any other argument."""
    advice = "write .decode(...).to_tuple(...).map_tuple(...).shuffle(...) after WebDataset(urls)"
    utils.warn_deprecated("WebDataset(extensions=..., decoder=..., ...)", advice, stacklevel=3)
    fields = extensions.split() if isinstance(extensions, str) else extensions
    stages: list[Any] = [
        shuffle > 1 and filters.shuffle(shuffle),
        decoder and filters.map(_old_decoder(decoder)),
        fields and filters.to_tuple(*fields, missing_is_error=False),
        transforms and filters.map(partial(_transformed, transforms=transforms)),
    ]
    return [stage for stage in stages if stage]


def _transformed(values: Any, transforms: Any) -> tuple[Any, ...]:
    return tuple(filters.transform_with(values, [transforms[i % len(transforms)] for i in range(len(values))]))


def _old_decoder(decoder: Any) -> Any:
    if isinstance(decoder, dict):
        return Decoder([handle_extension(extension, f) for extension, f in decoder.items()], pre=[], post=[])
    if callable(decoder):
        return decoder
    images = ImageHandler("rgb" if decoder is True else decoder, _OLD_IMAGES.split())
    return Decoder([handle_extension(_OLD_INTEGERS, _integer), images, handle_extension("msgpack", decode_msgpack)])


def _integer(data: bytes) -> Any:
    return int(data) if data.strip().lstrip(b"+-").isdigit() else data


def Dataset(urls: Any, length: int | None = None, shuffle: Any = None, **options: Any) -> Any:  # WebDataset's name
    utils.warn_deprecated("wds.Dataset", "write wds.WebDataset")
    return WebDataset(urls, shardshuffle=shuffle, length=length, **options)


class ResizedDataset(IterableDataset[Any]):
    """``length`` samples per iteration, which continues where the last one stopped; ``len()`` says ``nominal``."""

    def __init__(self, dataset: Any, length: int | None = None, nominal: int | None = None) -> None:
        utils.warn_deprecated("ResizedDataset", "write .with_epoch(length).with_length(length)")
        self.dataset, self.length = dataset, len(dataset) if length is None else length
        self.nominal = self.length if nominal is None else nominal
        self.source: Iterator[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}

    def __len__(self) -> int:
        return self.nominal

    def __iter__(self) -> Iterator[Any]:
        self.source = self.source or iter(DataPipeline(self.dataset).repeat())
        return islice(self.source, self.length)


ChoppedDataset = with_epoch = ResizedDataset


class PytorchShardList(shardlists.SimpleShardList):
    """The shards of this rank and worker, in another order each epoch; ``epoch_shuffle``: others by ``WDS_EPOCH``."""

    def __init__(self, urls: Any, epoch_shuffle: bool = False, shuffle: bool = True, **options: Any) -> None:
        utils.warn_deprecated("PytorchShardList", "write SimpleShardList, split_by_node, split_by_worker, shuffle")
        super().__init__(urls)
        self.epoch, self.epoch_shuffle, self.shuffle, self.options = -1, epoch_shuffle, shuffle, options

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch - 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.epoch += 1
        if self.epoch_shuffle and "WDS_EPOCH" not in os.environ:
            raise ValueError("PytorchShardList(epoch_shuffle=True) needs the epoch in the environment, as WDS_EPOCH")
        self.seed = int(os.environ["WDS_EPOCH"]) if self.epoch_shuffle else None
        items = super().__iter__()
        for name, split in (("split_by_node", shardlists.split_by_node), ("split_by_worker", split_by_worker)):
            items = split(items) if self.options.get(name, True) else items
        found = [*items]
        if self.shuffle:
            random.Random(self.epoch + 17).shuffle(found)
        return iter(found)
