"""Programs with the calls that public programs make of WebDataset; ``wds`` is the library, ``at`` a folder of shards.

A program returns what it would train on. ``SAME_ORDER`` programs yield the same samples in the same order in both
libraries; ``SAME_SAMPLES`` programs shuffle by chance, so only the samples are the same.

``python programs.py LIBRARY SHARDS OUTPUT RANK WORLD`` runs every program on one node, with and without workers.
"""

from __future__ import annotations

import functools
import glob
import importlib
import itertools
import json
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import Value
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset

Program = Callable[[Any, str], Any]
SAME_ORDER: dict[str, Program] = {}
SAME_SAMPLES: dict[str, Program] = {}
SHARDS = "/shard-{000000..000003}.tar"


def same_order(program: Program) -> Program:
    SAME_ORDER[program.__name__] = program
    return program


def same_samples(program: Program) -> Program:
    SAME_SAMPLES[program.__name__] = program
    return program


def log_and_continue(exn: Exception) -> bool:
    return True


@same_order
def raw(wds: Any, at: str) -> Any:
    return wds.WebDataset(at + SHARDS, shardshuffle=False)


@same_order
def raw_pipeline(wds: Any, at: str) -> Any:
    return wds.DataPipeline(wds.SimpleShardList(at + SHARDS), wds.split_by_worker, wds.tarfile_to_samples())


@same_order
def file_urls_and_compression(wds: Any, at: str) -> Any:
    return wds.WebDataset([f"file:{at}/packed.tgz", f"{at}/shard-000000.tar"], shardshuffle=False)


@same_order
def two_patterns_and_a_variable(wds: Any, at: str) -> Any:
    os.environ["WDS_FOLDER"] = at
    return wds.WebDataset("${FOLDER}/shard-000000.tar::${FOLDER}/shard-{000002,000001}.tar", shardshuffle=False)


@same_order
def names_in_every_form(wds: Any, at: str) -> Any:
    return wds.WebDataset(f"{at}/names.tar", shardshuffle=False)


@same_order
def repeated_names_with_a_handler(wds: Any, at: str) -> Any:
    return wds.WebDataset(f"{at}/repeated.tar", shardshuffle=False, handler=log_and_continue)


@same_order
def decoded_by_extension(wds: Any, at: str) -> Any:
    return wds.WebDataset(at + SHARDS, shardshuffle=False).decode()


def _spec(spec: str) -> Program:
    def program(wds: Any, at: str) -> Any:
        return wds.WebDataset(at + SHARDS, shardshuffle=False).decode(spec).to_tuple("jpg;png", "png", "cls")

    program.__name__ = f"decoded_to_{spec}"
    return program


for _name in ("rgb8", "rgb", "l8", "l", "rgba8", "rgba", "torchrgb8", "torchrgb", "torchl", "torch", "pil", "pill"):
    same_order(_spec(_name))


@same_order
def decoded_in_part(wds: Any, at: str) -> Any:
    ds = wds.WebDataset(at + SHARDS, shardshuffle=False)
    return ds.decode("l8", only=["jpg", "cls"]).decode(only="txt", partial=True)


@same_order
def own_decoders(wds: Any, at: str) -> Any:
    def first(key: str, data: bytes) -> Any:
        return ("first", key, len(data)) if key == ".jpg" else None

    handlers = (first, wds.handle_extension("txt npy", len), wds.autodecode.ImageHandler("rgb8", ["png"]))
    return wds.WebDataset(at + SHARDS, shardshuffle=False).decode(*handlers, handler=wds.warn_and_continue)


@same_order
def decompressed_fields(wds: Any, at: str) -> Any:
    return wds.WebDataset(f"{at}/gz.tar", shardshuffle=False).decode()


@same_order
def clip_training(wds: Any, at: str) -> Any:
    def has_caption(sample: dict[str, Any]) -> bool:
        return "txt" in sample and ("png" in sample or "jpg" in sample)

    def tokenize(text: str) -> Any:
        return np.frombuffer(text.encode().ljust(8, b"\0"), np.uint8)

    class Detshuffle2(wds.PipelineStage):  # type: ignore[misc]
        def __init__(self, bufsize: int, initial: int, seed: int, epoch: int) -> None:
            self.bufsize, self.initial, self.seed, self.epoch = bufsize, initial, seed, epoch

        def run(self, src: Iterator[Any]) -> Iterator[Any]:
            self.epoch += 1
            rng = random.Random(self.seed + self.epoch)
            shuffled: Iterator[Any] = wds.filters._shuffle(src, self.bufsize, self.initial, rng)
            return shuffled

    return wds.DataPipeline(
        wds.SimpleShardList(at + SHARDS),
        Detshuffle2(bufsize=10, initial=5, seed=3, epoch=-1),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(handler=log_and_continue),
        wds.shuffle(5, initial=2, rng=random.Random(7)),
        wds.select(has_caption),
        wds.decode("pilrgb", handler=log_and_continue),
        wds.rename(image="jpg;png;webp", text="txt"),
        wds.map_dict(image=np.asarray, text=tokenize),
        wds.to_tuple("image", "text"),
        wds.batched(5, partial=False),
    )


@same_order
def clip_training_with_resampled_shards(wds: Any, at: str) -> Any:
    epoch = Value("i", 2)  # shared with the workers, set by the training loop
    failures: list[Exception] = []

    def log_and_count(exn: Exception) -> bool:
        failures.append(exn)
        return True

    class ResampledShards2(wds.pytorch.IterableDataset):  # type: ignore[misc]
        def __init__(self, urls: Any, shards: int, seed: int) -> None:
            self.urls, self.shards, self.seed = wds.shardlists.expand_urls(urls), shards, seed

        def __iter__(self) -> Iterator[Any]:
            rng = random.Random(self.seed + epoch.value + 100 * wds.utils.pytorch_worker_seed())
            for _ in range(self.shards):
                yield {"url": rng.choice(self.urls)}

    ds = wds.DataPipeline(
        ResampledShards2(at + SHARDS, 3, seed=1),
        wds.tarfile_to_samples(handler=log_and_count),
        wds.shuffle(8, initial=4, rng=random.Random(2)),
        wds.decode("pilrgb", handler=log_and_count),
        wds.rename(image="jpg;png", text="txt"),
        wds.map_dict(image=np.asarray, text=len),
        wds.to_tuple("image", "text"),
        wds.batched(4, partial=False),
    )
    ds = ds.with_epoch(5)
    return [*ds, len(failures)]


@same_order
def clip_with_copied_reader(wds: Any, at: str) -> Any:
    group, expand = wds.tariterators.group_by_keys, wds.tariterators.tar_file_expander
    base_plus_ext, valid_sample = wds.tariterators.base_plus_ext, wds.tariterators.valid_sample
    assert callable(group)

    def group_nothrow(data: Any, keys: Any = base_plus_ext, handler: Any = None) -> Iterator[Any]:
        current: Any = None
        for member in data:
            assert isinstance(member, dict)
            if "fname" not in member:
                continue
            prefix, suffix = keys(member["fname"])
            if prefix is None:
                continue
            if current is None or prefix != current["__key__"] or suffix.lower() in current:
                if valid_sample(current):
                    yield current
                current = {"__key__": prefix, "__url__": member["__url__"]}
            current[suffix.lower()] = member["data"]
        if valid_sample(current):
            yield current

    def samples_nothrow(src: Any, handler: Any = log_and_continue) -> Iterator[Any]:
        streams = wds.tariterators.url_opener(src, handler=handler)
        return group_nothrow(expand(streams, handler=handler), handler=handler)

    urls = [f"{at}/shard-000001.tar", f"{at}/repeated.tar"]
    return wds.DataPipeline(wds.SimpleShardList(urls), wds.pipelinefilter(samples_nothrow)())


@same_order
def language_model_tokens(wds: Any, at: str) -> Any:
    def tokens(sample: dict[str, Any]) -> Iterator[Any]:
        yield from np.asarray(sample["npy"]).reshape(-1, 2)

    def packed(source: Any, size: int) -> Iterator[Any]:
        pieces = [piece for sample in source for piece in tokens(sample)]
        for at in range(0, len(pieces) - size + 1, size):
            yield {"tokens": np.concatenate(pieces[at : at + size])}

    return wds.DataPipeline(
        wds.SimpleShardList(at + SHARDS, seed=5),
        wds.tarfile_to_samples(),
        wds.decode(),
        functools.partial(packed, size=3),
        wds.batched(2, collation_fn=lambda batch: np.stack([sample["tokens"] for sample in batch])),
    )


@same_order
def reader_of_a_model_zoo(wds: Any, at: str) -> Any:
    def decode(sample: dict[str, Any], image_key: str = "jpg", target_key: str = "cls") -> dict[str, Any]:
        return {"image": len(sample[image_key]), "target": int(sample[target_key])}

    urls = wds.shardlists.expand_urls(at + SHARDS)
    stages = [wds.SimpleShardList(urls), wds.split_by_worker, wds.tarfile_to_samples(handler=log_and_continue)]
    ds = wds.DataPipeline(*stages, wds.map(functools.partial(decode), handler=wds.reraise_exception))
    return ds.with_epoch(30)


@same_order
def diffusion_training(wds: Any, at: str) -> Any:
    ds = wds.WebDataset(at + SHARDS, shardshuffle=False, nodesplitter=wds.split_by_node)
    ds = ds.decode("rgb", handler=wds.warn_and_continue).rename(image="jpg", caption="txt;text")
    return ds.map(lambda sample: {"image": sample["image"] * 2 - 1, "caption": sample["caption"]}).batched(4)


@same_order
def pairs_of_shards(wds: Any, at: str) -> Any:
    def paired(source: Any) -> Iterator[Any]:
        for sample in source:
            other = sample["__url__"].replace("shard-", "extra-")
            yield sample["__key__"], sample["cls"], [s["cls"] for s in wds.WebDataset(other, shardshuffle=False)][:1]

    return wds.DataPipeline(wds.SimpleShardList(at + SHARDS), wds.split_by_worker, wds.tarfile_to_samples(), paired)


@same_order
def several_archives_per_item(wds: Any, at: str) -> Any:
    def opened(source: Any) -> Iterator[Any]:
        for item in source:
            for url in (item["url"], item["url"].replace("shard-", "extra-")):
                yield {"url": url, "stream": wds.gopen(url)}

    stages = (opened, wds.tariterators.tar_file_expander, wds.tariterators.group_by_keys)
    return wds.DataPipeline(wds.SimpleShardList(at + SHARDS), wds.split_by_worker, *stages)


@same_order
def rows_by_shard_name(wds: Any, at: str) -> Any:
    def with_rows(source: Any) -> Iterator[Any]:
        count: dict[str, int] = {}
        for sample in source:
            url = sample["__url__"]
            count[url] = count.get(url, -1) + 1
            yield {**sample, "row": np.arange(12).reshape(6, 2)[count[url]]}

    return wds.WebDataset(at + SHARDS, shardshuffle=False).compose(with_rows).to_tuple("__key__", "row")


@same_order
def own_shard_source(wds: Any, at: str) -> Any:
    class Listed(wds.pytorch.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return iter([{"url": url} for url in sorted(glob.glob(f"{at}/shard-*.tar"), reverse=True)])

    return wds.DataPipeline(Listed(), wds.split_by_node, wds.split_by_worker, wds.tarfile_to_samples())


@same_order
def own_fluent_class(wds: Any, at: str) -> Any:
    class Mine(wds.DataPipeline, wds.compat.FluidInterface):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return (("mine", sample) for sample in super().__iter__())

    ds = Mine(wds.SimpleShardList(at + SHARDS), wds.tarfile_samples)
    return ds.decode("l8").to_tuple("jpg", "cls").map_tuple(np.sum, None)


@same_order
def stages_replaced(wds: Any, at: str) -> Any:
    ds = wds.WebDataset(at + SHARDS, shardshuffle=False).to_tuple("cls").map(lambda sample: ("old", sample))
    ds.pipeline.pop()
    ds.append(lambda source: (("new", sample) for sample in source))
    ds.stage(0).seed = 17
    ds.pipeline[-2] = wds.to_tuple("txt", "cls")
    return ds


@same_order
def streams_opened_by_the_program(wds: Any, at: str) -> Any:
    original = wds.tariterators.url_opener

    def opener(data: Any, handler: Any = None, **options: Any) -> Iterator[Any]:
        for item in data:
            yield {"url": "mine:" + os.path.basename(item["url"]), "stream": open(item["url"], "rb")}  # noqa: SIM115

    wds.tariterators.url_opener = opener
    try:
        return list(wds.DataPipeline(wds.SimpleShardList(at + SHARDS), wds.tarfile_to_samples()))
    finally:
        wds.tariterators.url_opener = original


class InPieces:
    """A stream that returns a few bytes at a time, as a slow pipe does."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.data, self.at = file.read(), 0

    def read(self, size: int) -> bytes:
        self.at += (piece := min(size, 701))
        return self.data[self.at - piece : self.at]


@same_order
def streams_in_small_pieces(wds: Any, at: str) -> Any:
    path = f"{at}/long-{os.getpid()}.tar"
    with wds.TarWriter(path, encoder=False) as sink:
        for number in range(40):
            folder = "f" * (number * 7)
            sink.write({"__key__": f"{folder}/{number}", "bin": bytes([number]) * (number * 97 % 1300), "cls": b"1"})
    streams = [{"url": url, "stream": InPieces(url)} for url in (path, f"{at}/shard-000001.tar")]
    samples = wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander(streams))
    stages = wds.DataPipeline(
        lambda: iter([{"url": path, "stream": InPieces(path)}]),
        wds.pipelinefilter(wds.tariterators.tar_file_expander)(),
        wds.pipelinefilter(wds.tariterators.group_by_keys)(),
    )
    return [{**sample, "__url__": ""} for sample in [*samples, *stages]]


@same_order
def own_scheme(wds: Any, at: str) -> Any:
    wds.gopen_schemes["mine"] = lambda url, mode, bufsize, **_: open(at + url.removeprefix("mine://"), mode)  # noqa: SIM115
    return wds.WebDataset("mine://" + SHARDS, shardshuffle=False).to_tuple("__url__", "cls")


@same_order
def grouping_replaced(wds: Any, at: str) -> Any:
    original = wds.tariterators.group_by_keys

    def by_member(data: Any, handler: Any = None) -> Iterator[Any]:
        return ({"name": member["fname"], "size": len(member["data"])} for member in data if member)

    wds.tariterators.group_by_keys = by_member
    try:
        return list(wds.DataPipeline(wds.SimpleShardList(at + SHARDS), wds.tarfile_to_samples()))
    finally:
        wds.tariterators.group_by_keys = original


@same_order
def members_chosen_and_renamed(wds: Any, at: str) -> Any:
    def rename(name: str) -> str:
        return name.replace(".cls", ".label.txt")

    return wds.WebDataset(
        at + SHARDS, shardshuffle=False, select_files=lambda name: not name.endswith("jpg"), rename_files=rename
    ).decode()


@same_order
def seeded_shuffles(wds: Any, at: str) -> Any:
    ds = wds.WebDataset(at + SHARDS, shardshuffle=3, seed=11).shuffle(6, initial=3, seed=4).to_tuple("__key__")
    return [*ds, *ds]


@same_order
def epochs_of_detshuffle(wds: Any, at: str) -> Any:
    ds = wds.WebDataset(at + SHARDS, shardshuffle=4, detshuffle=True, seed=2)
    ds = ds.compose(wds.detshuffle(8, 4, seed=1)).to_tuple("__key__")
    return [*ds, *ds, *ds]


@same_order
def resampled_shards(wds: Any, at: str) -> Any:
    shards = wds.ResampledShards(at + SHARDS, nshards=5, seed=3, deterministic=True, worker_seed=lambda: 6)
    ds = wds.DataPipeline(shards, wds.tarfile_to_samples(), wds.to_tuple("__key__"))
    return [*ds, *ds.with_epoch(40)]


@same_order
def all_the_renaming(wds: Any, at: str) -> Any:
    ds = wds.WebDataset(at + SHARDS, shardshuffle=False)
    kept = ds.rename(image="jpg;png", label="cls", keep=False)
    keys = ds.rename_keys(("image", "*.jpg"), ("image", "jpg"), label="cls", keep_unselected=True, must_match=False)
    return [*kept, *keys, *ds.extract_keys("jpg;png", "*.cls", duplicate_is_error=False), *ds.to_tuple("txt cls")]


@same_order
def batches_and_back(wds: Any, at: str) -> Any:
    ds = wds.WebDataset(at + SHARDS, shardshuffle=False).decode("rgb8").to_tuple("jpg", "cls", "json")
    dicts = wds.WebDataset(at + SHARDS, shardshuffle=False).decode("rgb8").map(lambda s: {"a": s["cls"], "b": s["jpg"]})
    return [
        *ds.batched(5),
        *ds.batched(5, partial=False).unbatched(),
        *ds.listed(7).unlisted(),
        *dicts.map(lambda s: {"a": s["a"]}).batched(7),
        *ds.slice(3, 9, 2),
        *ds.batched(3, collation_fn=lambda batch: len(batch)),
    ]


@same_order
def samples_dropped_and_failing(wds: Any, at: str) -> Any:
    def odd(sample: dict[str, Any]) -> Any:
        number = int(sample["cls"])
        if number % 3 == 0:
            raise ValueError("a third fails")
        return None if number % 2 else {"number": number}

    ds = wds.WebDataset(at + SHARDS, shardshuffle=False).map(odd, handler=wds.ignore_and_continue)
    stopped = wds.WebDataset(at + SHARDS, shardshuffle=False).map(odd, handler=wds.ignore_and_stop)
    return [*ds, *stopped]


@same_order
def missing_fields_with_a_counting_handler(wds: Any, at: str) -> Any:
    seen: list[str] = []

    def count(exn: Exception) -> bool:
        seen.append(type(exn).__name__)
        return True

    ds = wds.WebDataset([f"{at}/names.tar", f"{at}/shard-000000.tar", f"{at}/gone.tar"], handler=count)
    return [*ds.to_tuple("jpg", "cls", handler=count).map_tuple(len, int, handler=count), seen]


@same_order
def repeated_and_counted(wds: Any, at: str) -> Any:
    ds = wds.WebDataset(at + SHARDS, shardshuffle=False).to_tuple("__key__")
    return [*ds.repeat(2), *ds.with_epoch(7), *ds.repeat(nbatches=50), len(ds.with_length(9, silent=True))]


@same_order
def more_fields_by_key(wds: Any, at: str) -> Any:
    table = {f"s/{number:04d}": {"extra": number} for number in range(0, 24, 2)}
    ds = wds.DataPipeline(wds.SimpleShardList(at + SHARDS), wds.tarfile_to_samples(), wds.associate(table))
    xdecoded = wds.xdecode(cls=lambda stream: int(stream.read()), jpg=False, must_decode=False)
    return [*ds, *ds.compose(xdecoded)]


@same_order
def mixtures(wds: Any, at: str) -> Any:
    one = wds.WebDataset(f"{at}/shard-000000.tar", shardshuffle=False).to_tuple("__key__")
    two = wds.WebDataset(f"{at}/shard-00000{{1,2}}.tar", shardshuffle=False).to_tuple("__key__")
    random.seed(3)
    return [
        *wds.RoundRobin([one, two]),
        *wds.RoundRobin([one, two], longest=True),
        *wds.RandomMix([one, two], probs=[0.3, 0.7]),
        *wds.RandomMix([one, two], longest=True),
        *wds.FluidWrapper(wds.RoundRobin([one, two])).batched(4),
    ]


@same_order
def cached_in_memory(wds: Any, at: str) -> Any:
    ds = wds.WebDataset(at + SHARDS, shardshuffle=False).to_tuple("__key__").mcached()
    return [*ds, *ds]


@same_order
def helpers(wds: Any, at: str) -> Any:
    utils, paths = wds.utils, ("a/b.seg.jpg", "a.b/c.d.e", "/p/22.0/1.1.png", "a/.x.jpg", ".hidden", "noext", "a..b")
    return [
        [wds.tariterators.base_plus_ext(path) for path in (*paths, "d.v1/noext", "a.b//.x", "./a.jpg", "x.")],
        [utils.make_seed(1, 2, 3), utils.pytorch_worker_info(), utils.pytorch_worker_seed(), utils.identity(4)],
        list(itertools.islice(utils.repeatedly([1, 2], nbatches=5), 9)),
        wds.cache.url_to_cache_name("http://h/a/b.tar?x=1"),
        wds.getfirst({"a": 1, "b": 2}, "c;b"),
        wds.transform_with([1, 2, 3], [None, str]),
        wds.shardlists.expand_urls("a{0..2}::b{x,y}"),
        wds.filters.default_collation_fn([(1, "a"), (2.5, "b")]),
        wds.tariterators.valid_sample({"__bad__": True}),
    ]


@same_order
def speech_written_and_read(wds: Any, at: str) -> Any:
    folder = f"{at}/written-{os.getpid()}"
    os.makedirs(folder, exist_ok=True)
    finished: list[str] = []
    with wds.ShardWriter(f"{folder}/a-%03d.tar", maxcount=4, maxsize=1e6, post=finished.append, verbose=0) as sink:
        for number in range(10):
            wave = (np.sin(np.arange(50) * number) * 1000).astype(np.int16)
            image = np.full((3, 4, 3), number * 20, np.uint8)
            sample = {
                "__key__": f"u{number}",
                "npy": wave,
                "txt": "word " * number,
                "json": {"n": number},
                "png": image,
            }
            sink.write({**sample, "cls": number, "ten": [wave], "mp": {"a": [1]}, "seg.txt.gz": "z" * 99, "ppm": image})
    ds = wds.WebDataset(sorted(finished), shardshuffle=False).decode("rgb8")
    return [{**sample, "__url__": "", "__local_path__": ""} for sample in ds]


@same_order
def members_as_they_are_written(wds: Any, at: str) -> Any:
    import tarfile

    path, array = f"{at}/members-{os.getpid()}.tar", np.arange(12, dtype=np.int16).reshape(3, 4)
    pixels = np.linspace(0, 1, 4 * 5 * 3).reshape(4, 5, 3)
    images = dict.fromkeys(("jpg", "jpeg", "png", "ppm", "img", "tiff", "seg.png"), pixels)
    arrays = {"npy": array, "npz": {"a": array, "b": array[0]}, "ten": [array, array[0]], "tb": array}
    tensors = {"pth": {"t": torch.arange(3), "n": [1, "x"]}}
    others = {
        "json": {"x": [1, None]},
        "mp": {"a": [1, b"b"]},
        "pyd": {"p": (1,)},
        "cls": 7,
        "id": "8",
    }
    with wds.TarWriter(path, mtime=7, user="me", keep_meta=True) as sink:
        size = sink.write({"__key__": "a/b", "__note__": "m", **images, **arrays, **tensors, **others})
        sink.write({"__key__": "c" * 120, "txt": "\u00e9", "raw": b"bytes"})
    with tarfile.open(path) as tar:
        found = [(m.name, m.size, m.mode, m.uname, m.mtime, tar.extractfile(m).read()) for m in tar]  # type: ignore[union-attr]
    return [size, *found]


@same_samples
def shuffled_by_chance(wds: Any, at: str) -> Any:
    return wds.WebDataset(at + SHARDS, shardshuffle=100, nodesplitter=wds.split_by_node).shuffle(1000).decode("rgb8")


@same_samples
def pipeline_of_a_loader(wds: Any, at: str) -> Any:
    ds = wds.DataPipeline(
        wds.SimpleShardList(at + SHARDS),
        wds.split_by_node,
        wds.split_by_worker,
        wds.shuffle(10),
        wds.tarfile_to_samples(),
        wds.shuffle(10),
        wds.to_tuple("jpg", "cls"),
        wds.map_tuple(_size, int),
    )
    return wds.WebLoader(ds, batch_size=None, num_workers=0).shuffle(10)


def _size(data: bytes) -> int:
    return len(data)


@same_samples
def part_of_the_samples(wds: Any, at: str) -> Any:
    random.seed(0)
    ds = wds.WebDataset(at + SHARDS, shardshuffle=False)
    return [*ds.rsample(1.0).to_tuple("__key__"), *ds.rsample(0.0), json.dumps(1)]


def comparable(value: Any) -> Any:
    """Return a sample as a value that can be compared, hashed and pickled."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Image.Image):
        return "image", value.mode, value.size, value.tobytes()
    if isinstance(value, dict):
        return "dict", tuple((name, comparable(value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(comparable(item) for item in value)
    return value


def outcome(wds: Any, name: str, at: str) -> Any:
    """Return the samples of a program, in one order where theirs is left to chance; or the name of its error."""
    program = {**SAME_ORDER, **SAME_SAMPLES}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = [comparable(sample) for sample in program(wds, at)]
        except Exception as exc:
            return type(exc).__name__
    return samples if name in SAME_ORDER else sorted(samples, key=repr)


class EveryProgram(IterableDataset[Any]):
    """Runs every program in the process that reads it, and yields each program's name and outcome, pickled."""

    def __init__(self, library: str, at: str) -> None:
        self.library, self.at = library, at

    def __iter__(self) -> Iterator[bytes]:
        wds = importlib.import_module(self.library)
        return (pickle.dumps((name, outcome(wds, name, self.at))) for name in (*SAME_ORDER, *SAME_SAMPLES))


Place = tuple[int, int, int, str | None]  # rank, world size, worker processes and how they start
LOADERS: list[tuple[int, str | None]] = [(0, None), *itertools.product((1, 2, 4), ("fork", "spawn"))]


def outcomes(library: str, at: str, place: Place) -> list[tuple[str, Any]]:
    """Return the outcomes of every program in every worker of one node."""
    rank, world, workers, start = place
    nodes = {"RANK": str(rank), "WORLD_SIZE": str(world)} if world > 1 else {}
    os.environ.update(nodes)
    try:
        loader: Any = DataLoader(
            EveryProgram(library, at), batch_size=None, num_workers=workers, multiprocessing_context=start
        )
        return [pickle.loads(found) for found in loader]
    finally:
        for name in nodes:
            del os.environ[name]


if __name__ == "__main__":
    library, at, output, rank, world = sys.argv[1:]
    results = {loader: outcomes(library, at, (int(rank), int(world), *loader)) for loader in LOADERS}
    Path(output).write_bytes(pickle.dumps(results))
