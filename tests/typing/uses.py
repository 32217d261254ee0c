"""Uses of the public names as type checkers see them: nothing here runs.

mypy and basedpyright check this file. Where a use is wrong, its line carries the error that each of them must report;
both report an ignore comment that ignores nothing, so a mistake that slips through fails the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, assert_type

import numpy as np
from ray.data import ActorPoolStrategy

import penstock as ps
from penstock import vision
from penstock.errors import PlanError


def sources() -> None:
    assert_type(ps.read_tar("train-{0000..0147}.tar"), ps.Dataset)
    assert_type(ps.read_tar(["a.tar", "b.tar"], workers=(1, 4), cache=ps.Cache("dir", max_bytes="2GB")), ps.Dataset)
    assert_type(ps.read_parquet("table", columns=["label"]), ps.Dataset)
    assert_type(ps.read_csv("a.csv", delimiter="\t", types={"zip": "string"}), ps.Dataset)
    assert_type(ps.from_items([{"x": 1}]), ps.Dataset)
    assert_type(ps.from_huggingface({"train": []}, split="train"), ps.Dataset)
    assert_type(ps.mix([ps.from_items([1]), ps.from_items([2])], weights=[0.7, 0.3], stop="all"), ps.Dataset)
    ps.read_tarr("a.tar")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    ps.read_tar(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.read_tar("a.tar", worker=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ps.read_tar("a.tar", storage="s3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.read_images("photos", mode="rgb")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.read_images("photos", labels="folders")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.mix([ps.from_items([1])], stop="never")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


class Model:
    def __init__(self, a: int) -> None: ...

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def stages(ds: ps.Dataset, fn: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    assert_type(ds.map(fn, workers=2, on="processes", retries=3, timeout_s=1.5, gpus=0.5, memory="2GB"), ps.Dataset)
    assert_type(ds.filter(ps.col("label") == 3).filter(lambda sample: bool(sample)), ps.Dataset)
    assert_type(ds.decode("rgb8", jpg=vision.RandomResizedCrop(224, flip=True), workers=(1, 8)), ps.Dataset)
    assert_type(ds.map_batches(fn, batch_size=64, fn_kwargs={"a": 1}).batched(64).shuffle(1000, seed=3), ps.Dataset)
    assert_type(ds.train_test_split(0.2, by="user"), tuple[ps.Dataset, ps.Dataset])
    assert_type(ds.union(ds).zip(ds, suffix="_b").join(ds, on="key", how="left"), ps.Dataset)
    assert_type(ds.groupby("label").count(), ps.Dataset)
    assert_type(ds.split(4), list[ps.Dataset])
    assert_type(ds.map(Model, fn_args=(1,), fn_kwargs={"a": 1}).flat_map(Model, fn_constructor_args=[2]), ps.Dataset)
    assert_type(ds.filter(Model, concurrency=(1, 4), num_cpus=2, num_gpus=0.5), ps.Dataset)
    assert_type(ds.map_batches(Model, fn_constructor_kwargs={"a": 1}, compute=ActorPoolStrategy(size=2)), ps.Dataset)
    ds.map(fn, wokers=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ds.map(fn, concurrency="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.map(fn, compute=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.map(fn, fn_args=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.map(fn, on="thread")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.map("fn")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.filter(fn, worker=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ds.batched("64")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.shuffel()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    ds.union(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.join(ds, on="key", how="outr")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.shard(0, 2, "steps")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.split(4, equals=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.on_error("ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def engines(ds: ps.Dataset) -> None:
    assert_type(ds.on("local", cpus=8, memory="8GB", ordered=False, report=True), ps.Dataset)
    assert_type(ds.on("ray", address="auto"), ps.Dataset)
    assert_type(ds.on("serial"), ps.Dataset)
    ds.on("rya")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.on("local", cpu=2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.on("local", ordered="no")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def consuming(ds: ps.Dataset) -> None:
    assert_type(ds.take(3), list[Any])
    assert_type(len(ds) + ds.count(), int)
    assert_type(ds.schema(), dict[str, str])
    assert_type(ds["label"], ps.Dataset)
    assert_type(ds.iter_batches(64, format="numpy"), Iterator[Any])
    assert_type(ds.loader(rank=0, world=2, cut="step", ledger="runs/ledger"), ps.Loader)
    loader = ds.loader()
    loader.load_state_dict(loader.state_dict())
    ds.take("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.iter_batches(64, format="jax")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds.loader(uneven="pads")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ds[1.5]  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def serving(ds: ps.Dataset) -> None:
    with ps.serve(ds, "grpc://127.0.0.1:0", token=None, ready="8MB") as server:
        feed = ps.connect([server.address], rank=0, world=2, cut="step", format="torch", ledger="runs/ledger")
        assert_type(feed.servers, list[str])
        loader: ps.Loader = feed
        loader.load_state_dict(states=[feed.state_dict()])
    ps.serve([1, 2])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.connect("grpc://a:1", uneven="pads")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def writing(ds: ps.Dataset) -> None:
    assert_type(ps.pack("photos", "packed", max_bytes="100MB", shuffle=True), ps.Packed)
    assert_type(ds.write_tar("out", max_bytes=1e9, compress="zst"), ps.Packed)
    assert_type(ds.write_parquet("out", compression="zstd"), ps.Packed)
    ds.write_tar("out", compress="rar")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.pack("photos", "packed", engine="rya")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.pack("photos", "packed", fromat="tar")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def errors(problem: PlanError) -> None:
    assert_type(problem, ps.errors.PlanError)
    raise ps.errors.PlanEror("x")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def images(sample: bytes, rng: np.random.Generator) -> None:
    vision.Resize(256)
    vision.Resise(256)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    vision.RandomResizedCrop(224, flips=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
