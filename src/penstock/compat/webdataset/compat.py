"""WebDataset's fluent classes: ``WebDataset``, ``WebLoader``, and the methods that they share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Self
from urllib.parse import urlparse

from penstock.compat.webdataset import autodecode, cache, filters, legacy, shardlists, tariterators, utils
from penstock.compat.webdataset.filters import pipelinefilter
from penstock.compat.webdataset.handlers import Handler, reraise_exception
from penstock.compat.webdataset.pipeline import DataPipeline
from penstock.compat.webdataset.pytorch import DataLoader, IterableDataset


class FluidInterface:
    """Methods that return a pipeline with one more stage; each stands for the function of its name in ``filters``."""

    compose: Any

    def listed(self, batchsize: int, partial: bool = True) -> Any:
        """Join neighbours to lists."""
        return self.compose(filters.batched(batchsize, collation_fn=None, partial=partial))

    def shuffle(self, size: int, **kw: Any) -> Any:
        """Shuffle by a buffer; a size below 1 changes nothing."""
        return self if size < 1 else self.compose(filters.shuffle(size, **kw))

    def decode(self, *args: Any, handler: Handler = reraise_exception, **kw: Any) -> Any:
        """Decode fields by image specs and functions ``f(key, data)``; other arguments are those of ``Decoder``."""
        decoder = autodecode.Decoder(autodecode.field_handlers(args), **kw)
        return self.compose(filters.map(decoder, handler=handler))

    def mcached(self) -> Any:
        """Keep all samples in memory after one pass."""
        return self.compose(filters.Cached())

    def lmdb_cached(self, *args: Any, **kw: Any) -> Any:
        """Keep all samples in an LMDB database after one pass."""
        return self.compose(filters.LMDBCached(*args, **kw))

    def ddp_equalize(self, length: int, with_length: bool = True) -> Any:
        """Yield ``length // world`` items on each rank."""
        utils.warn_deprecated("ddp_equalize", "write .with_epoch(n), n being the items of one rank")
        each: Any = self.compose().with_epoch(length // utils.pytorch_worker_info()[1])
        return each.with_length(each.nsamples, silent=True) if with_length else each

    def then(self, f: Any, *args: Any, **kw: Any) -> Any:
        """Add a stage ``f(source, *args)``."""
        utils.warn_deprecated("then", "write .compose(stage)")
        return self.compose(filters.FilterFunction(f, *args, **kw))

    pipe = then


def _forwarded(name: str) -> Any:
    def method(self: FluidInterface, *args: Any, **kw: Any) -> Any:
        return self.compose(getattr(filters, name)(*args, **kw))

    method.__name__, method.__doc__ = name, f"Add the stage ``filters.{name}``."
    return method


for _name in (
    *("batched", "unbatched", "unlisted", "log_keys", "map", "map_dict", "select", "to_tuple", "map_tuple", "slice"),
    *("rename", "rename_keys", "extract_keys", "xdecode", "associate", "info", "detshuffle", "rsample"),
):
    setattr(FluidInterface, _name, _forwarded(_name))


def check_empty(source: Iterable[Any]) -> Iterator[Any]:
    """Pass samples on; ``ValueError`` if there is none."""
    return shardlists.require_items(
        source,
        "No samples found in dataset; perhaps you have fewer shards than workers.\n"
        "Turn off using empty_check=False in the WebDataset constructor.",
    )


class WebDataset(DataPipeline, FluidInterface):
    """The samples of shards: a pipeline of the stages list, split, shuffle, open, read members, group.

    Args:
        urls: A pattern, a list, a dataset of ``dict(url=...)``, a folder with a slash at its end, or a ``.yaml`` file.
        handler: Decides about shards that cannot be read.
        mode: "resampled" is ``resampled=True``; for a folder, see ``DirectoryShardList``.
        resampled: Take shards at random, with replacement, without end.
        repeat: Not used.
        shardshuffle: The size of the shuffle buffer of shards; True: 100.
        cache_size: The most bytes in ``cache_dir``, where remote shards are kept, named by ``url_to_name``.
        detshuffle: Shuffle shards by seed and epoch.
        nodesplitter: Splits the shards between ranks; the default refuses more than one.
        workersplitter: Splits the shards between the workers of a DataLoader.
        select_files: Returns whether to read a member, by its name; ``rename_files`` returns another name.
        empty_check: Whether a worker without samples is an error.
        seed: Of the shuffle of shards, the same in every epoch.
        old: The arguments of WebDataset's first versions: extensions, decoder, transforms, shuffle, ...
    """

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
        workersplitter: Any = shardlists.split_by_worker,
        select_files: Any = None,
        rename_files: Any = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: Any = None,
        **old: Any,
    ) -> None:
        super().__init__()
        if old:
            legacy.check_arguments(old)
            shardshuffle, empty_check = old.get("shuffle", 0) > 0 and 10_000, False
            handler = legacy.handler_of(old, handler)
        self.seed = os.environ.get("WDS_SEED") if seed is None else seed
        resampled = resampled or mode == "resampled"
        self.append(_source(urls, resampled, mode))
        if not (resampled or isinstance(urls, IterableDataset)):  # each worker then has shards of its own
            self.pipeline += [stage for stage in (nodesplitter, workersplitter) if stage]
        if shardshuffle and not resampled:
            size = 100 if shardshuffle is True else shardshuffle
            by_epoch = filters.detshuffle(size, seed=int(self.seed or 0)) if detshuffle else None
            self.append(by_epoch or filters.shuffle(size, seed=self.seed))
        self.append(legacy.opener_of(old, handler) or _opener(cache_dir, cache_size, url_to_name, verbose, handler))
        expander = pipelinefilter(tariterators.tar_file_expander)
        self.append(expander(handler=handler, select_files=select_files, rename_files=rename_files))
        self.append(pipelinefilter(tariterators.group_by_keys)(handler=handler))
        if empty_check:
            self.append(check_empty)
        if old:
            self.pipeline += legacy.stages(old)
            if old.get("length") is not None:
                self.with_length(old["length"], silent=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _source(urls: Any, resampled: bool, mode: str | None) -> Any:
    """Return the first stage: where the shards come from."""
    urls = os.fspath(urls) if isinstance(urls, os.PathLike) else urls
    if isinstance(urls, IterableDataset):
        return urls
    path = urls if isinstance(urls, str) else ""
    if isinstance(urls, dict) or path.endswith((".yaml", ".yml")):
        return shardlists.MultiShardSample(urls)
    if path.endswith(".json"):
        raise ValueError(f"{urls}: use penstock.compat.wids for an index of shards in JSON")
    if urlparse(path).path.endswith("/"):
        return shardlists.DirectoryShardList(urls, mode=mode or "resample")
    if path or utils.is_iterable(urls):
        return (shardlists.ResampledShards if resampled else shardlists.SimpleShardList)(urls)
    raise ValueError(f"cannot handle urls of type {type(urls)}")


def _opener(cache_dir: Any, cache_size: float, url_to_name: Any, verbose: bool, handler: Handler) -> Any:
    """Return the stage that opens shards, with or without a cache."""
    cache_dir = os.environ.get("WDS_CACHE", cache_dir)
    cache_size = float(os.environ.get("WDS_CACHE_SIZE", cache_size))
    if cache_dir is None or cache_size == 0:
        return cache.StreamingOpen(handler=handler)
    cache_dir = os.path.expanduser(os.fspath(cache_dir))
    if not os.path.exists(cache_dir):
        raise ValueError(f"cache directory {cache_dir} does not exist")
    return cache.file_cache(url_to_name, cache_dir=cache_dir, verbose=verbose, handler=handler, cache_size=cache_size)


class FluidWrapper(DataPipeline, FluidInterface):
    """A pipeline with the fluent interface, over any source."""


class WebLoader(DataPipeline, FluidInterface):
    """A ``DataLoader`` with the fluent interface."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(DataLoader(*args, **kw))
