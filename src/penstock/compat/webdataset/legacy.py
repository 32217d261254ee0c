"""What WebDataset removed and programs still call: the arguments of its first versions, and the classes of 0.1."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any

from penstock.compat.webdataset import autodecode, filters, handlers, shardlists, tariterators, utils
from penstock.compat.webdataset.pytorch import IterableDataset

_ARGUMENTS = ("extensions", "decoder", "transforms", "shuffle", "pipeline", "opener", "errors", "associate")
_SIZES = ("length", "epochs")
_INTEGERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
_IMAGES = ("png", "jpg", "jpeg", "img", "image", "pbm", "pgm", "ppm")


def check_arguments(old: dict[str, Any]) -> None:
    """Refuse arguments that no version had (``TypeError``), and say how to write the others today."""
    if unknown := sorted(set(old) - {*_ARGUMENTS, *_SIZES}):
        raise TypeError(f"WebDataset() got an unexpected keyword argument {unknown[0]!r}")
    advice = "write .decode(...).to_tuple(...).map_tuple(...).shuffle(...) after WebDataset(urls)"
    utils.warn_deprecated(f"WebDataset({', '.join(sorted(old))}=...)", advice, stacklevel=3)


def handler_of(old: dict[str, Any], handler: handlers.Handler) -> handlers.Handler:
    """Return the handler that ``errors`` stands for."""
    named = {True: handler, "warn": handlers.warn_and_continue}
    return named.get(old.get("errors", True), handlers.ignore_and_continue)


def opener_of(old: dict[str, Any], handler: handlers.Handler) -> Any:
    """Return the stage that ``opener`` stands for, if it is given."""
    opened = partial(_opened, old.get("opener"))
    return filters.FilterFunction(tariterators.open_each, opened, handler) if old.get("opener") else None


def _opened(opener: Any, url: str) -> tuple[Any, None]:
    return opener(url), None


def stages(old: dict[str, Any]) -> list[Any]:
    """Return the stages that the old arguments stand for."""
    size, transforms, fields = old.get("shuffle", 0), old.get("transforms"), old.get("extensions")
    found = [filters.shuffle(size)] if size > 1 else []
    if old.get("associate") is not None:
        found.append(filters.associate(old["associate"]))
    decoder = old.get("decoder", "rgb")
    if decoder is not None and decoder is not False:
        found.append(filters.map(_decoder(decoder)))
    if fields is not None:
        words = fields.split() if isinstance(fields, str) else fields
        found.append(filters.to_tuple(*words, missing_is_error=False))
    if transforms is not None:
        found.append(filters.map(partial(_transformed, transforms=transforms)))
    if old.get("pipeline") is not None:
        found.append(old["pipeline"])
    if old.get("epochs", 1) != 1:
        found.append(filters.FilterFunction(_not_repeated, old["epochs"]))
    return found


def _not_repeated(source: Any, epochs: int) -> Any:
    raise TypeError(f"WebDataset(epochs={epochs}) is gone: write .repeat({epochs})")


def _transformed(values: Any, transforms: Any) -> tuple[Any, ...]:
    """Apply the transforms in turn, from the first again where there are fewer than values."""
    fs = [transforms[place % len(transforms)] for place in range(len(values))]
    return tuple([value if f is None else f(value) for f, value in zip(fs, values, strict=True)])


def _decoder(decoder: Any) -> Any:
    if isinstance(decoder, dict):
        extensions = [autodecode.handle_extension(extension, f) for extension, f in decoder.items()]
        return autodecode.Decoder(extensions, pre=[], post=[])
    if callable(decoder):
        return decoder
    images = autodecode.ImageHandler("rgb" if decoder is True else decoder, _IMAGES)
    return autodecode.Decoder([_integer, images, _document])


def _integer(key: str, data: bytes) -> Any:
    """Decode a class; what is not a number stays bytes."""
    if key.rpartition(".")[2].lower() not in _INTEGERS:
        return None
    try:
        return int(data)
    except ValueError:
        return data


def _document(key: str, data: bytes) -> Any:
    return autodecode.msgpack_loads(data) if key.lower().endswith(".msgpack") else None


class with_epoch(IterableDataset[Any]):  # WebDataset's name
    """``length`` samples of a dataset per iteration; the next iteration continues where the last one stopped."""

    def __init__(self, dataset: Any, length: int | None = None, nominal: int | None = None) -> None:
        self.dataset, self.length = dataset, len(dataset) if length is None else length
        self.nominal = self.length if nominal is None else nominal
        self.source: Iterator[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}

    def __len__(self) -> int:
        return self.nominal

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            for _ in range(2):  # at the end of the dataset, from its beginning
                self.source = iter(self.dataset) if self.source is None else self.source
                try:
                    sample = next(self.source)
                    break
                except StopIteration:
                    self.source = None
            else:
                return
            yield sample


class ResizedDataset(with_epoch):
    """Another name of ``with_epoch``, as is ``ChoppedDataset``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        utils.warn_deprecated(type(self).__name__, "write .with_epoch(length).with_length(length)")
        super().__init__(*args, **options)


class ChoppedDataset(ResizedDataset): ...


class PytorchShardList(shardlists.SimpleShardList):
    """The shards of this rank and worker, in another order each epoch."""

    def __init__(
        self,
        urls: Any,
        epoch_shuffle: bool = False,
        shuffle: bool = True,
        split_by_worker: bool = True,
        split_by_node: bool = True,
        verbose: bool = False,
    ) -> None:
        utils.warn_deprecated(type(self).__name__, "write SimpleShardList, split_by_node, split_by_worker, shuffle")
        super().__init__(urls)
        self.epoch, self.shuffle = -1, shuffle
        self.by_worker, self.by_node = split_by_worker, split_by_node

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch - 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.epoch += 1
        items = list(super().__iter__())
        if self.shuffle:
            random.Random(self.epoch).shuffle(items)
        split = shardlists.split_by_node(items) if self.by_node else iter(items)
        return shardlists.split_by_worker(split) if self.by_worker else split


class ShardList(PytorchShardList):
    """The shards of this rank and worker; with ``shuffle``, in another order each epoch."""

    def __init__(self, urls: Any, *, shuffle: bool = False, nodesplitter: Any = True, splitter: Any = True) -> None:
        super().__init__(urls, shuffle=bool(shuffle), split_by_worker=bool(splitter), split_by_node=bool(nodesplitter))


def Dataset(urls: Any, length: int | None = None, **options: Any) -> Any:  # WebDataset's name
    """Return a ``WebDataset``."""
    utils.warn_deprecated("wds.Dataset", "write wds.WebDataset")
    from penstock.compat.webdataset.compat import WebDataset  # it imports this module

    if "shuffle" in options:
        options["shardshuffle"] = options.pop("shuffle")
    dataset = WebDataset(urls, **options)
    return dataset if length is None else dataset.with_length(length, silent=True)


class MockDataset(IterableDataset[Any]):
    """One sample, ``length`` times."""

    def __init__(self, sample: Any, length: int) -> None:
        self.sample, self.length = sample, length

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.sample, self.length)


class with_length(IterableDataset[Any]):  # WebDataset's name
    """A dataset that also says how long it is."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset, self.length = dataset, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __len__(self) -> int:
        return self.length
