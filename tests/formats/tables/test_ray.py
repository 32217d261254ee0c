"""Ray datasets as a source, and samples as blocks of a Ray dataset."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock.errors import DataError, EngineError, PlanError
from penstock.formats.tables.ray import RayBlockBuilder, RayReader

FULL = os.environ.get("PENSTOCK_FULL") == "1"

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\..*"),  # Ray uses its own deprecated names
]


def make_rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "n": i,
            "half": i / 2,
            "text": None if i % 5 == 0 else f"number {i}",
            "raw": bytes([i % 256]),
            "image": np.full((2, 3), i, np.int16),
            "ragged": np.arange(i % 4 + 1, dtype=np.float32),
        }
        for i in range(count)
    ]


def is_same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return list(left) == list(right) and all(is_same(left[name], right[name]) for name in left)
    if isinstance(left, np.ndarray):
        return bool(left.dtype == right.dtype and left.shape == right.shape and (left == right).all())
    return type(left) is type(right) and bool(left == right)


def test_rows_of_a_ray_dataset_are_samples() -> None:
    import ray

    rows = make_rows(20)
    ds = ps.from_ray(ray.data.from_items(rows, override_num_blocks=3))
    assert len(ds) == 20  # the rows of its blocks are known
    found = ds.take_all()
    assert all(is_same(row, sample) for row, sample in zip(rows, found, strict=True))
    assert all(sample[name].flags.writeable for sample in found for name in ("image", "ragged"))
    assert is_same(ds[13], rows[13])
    assert sorted(sample["n"] for sample in ds.shuffle(seed=1).select("n")) == list(range(20))
    assert ds.select("n", "image").take_batch(4)["image"].shape == (4, 2, 3)


if FULL:  # starting actors takes long

    def test_a_pickled_dataset_is_read_by_reference_in_ray_tasks() -> None:
        import ray

        @ray.remote
        def total(part: ps.Dataset) -> int:
            return sum(int(batch["id"].sum()) for batch in part.iter_batches(batch_size=8))

        ds = ps.from_ray(ray.data.range(101, override_num_blocks=4))
        parts = ds.streaming_split(2)
        assert sum(ray.get([total.remote(part) for part in parts])) == sum(range(101))
        assert len(pickle.dumps(ds)) < 5_000
        assert pickle.loads(pickle.dumps(ds)).count() == 101


def test_a_state_resumes_in_the_middle_of_a_block() -> None:
    import ray

    ds = ps.from_ray(ray.data.range(40, override_num_blocks=3)).shuffle(seed=2).batched(7)
    want = [batch["id"].tolist() for batch in ds.loader()]
    loader = ds.loader()
    steps = iter(loader)
    assert [next(steps)["id"].tolist() for _ in range(2)] == want[:2]
    state = loader.state_dict()
    loader.close()
    again = ds.loader()
    again.load_state_dict(state)
    assert [batch["id"].tolist() for batch in again] == want[2:]


def test_a_forked_process_is_refused() -> None:
    import ray

    source: Any = ps.from_ray(ray.data.range(3)).plan.source
    reader: RayReader = source.open()
    reader._pid += 1
    with pytest.raises(EngineError, match=r"a forked process, .* cannot use the Ray connection of its parent"):
        reader.rows(0)


def test_only_ray_datasets_are_accepted() -> None:
    with pytest.raises(PlanError, match=r"from_ray needs a ray.data.Dataset, not list"):
        ps.from_ray([1, 2])


def test_arrays_and_images_become_tensors() -> None:
    import torch

    samples = [
        {"photo": Image.new("RGB", (4, 3)), "tensor": torch.ones(2, 2), "one": np.float32(i), "raw": b"x", "n": i}
        for i in range(3)
    ]
    block = RayBlockBuilder().block(samples)
    kinds = {name: str(kind) for name, kind in zip(block.schema.names, block.schema.types, strict=True)}
    assert "shape=(3, 4, 3), dtype=uint8" in kinds["photo"]
    assert "shape=(2, 2), dtype=float" in kinds["tensor"]
    assert (kinds["one"], kinds["raw"], kinds["n"]) == ("float", "binary", "int64")
    assert RayBlockBuilder().block([(1, "a"), (2, "b")]).to_pydict() == {"0": [1, 2], "1": ["a", "b"]}
    assert RayBlockBuilder().block([5]).to_pydict() == {"item": [5]}


@pytest.mark.parametrize("other", [np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2), np.float32)])
def test_arrays_that_ray_would_convert_are_refused(other: Any) -> None:
    builder = RayBlockBuilder()
    builder.block([{"image": np.zeros((2, 2), np.uint8)}])
    with pytest.raises(DataError, match=r"field 'image' is an array of uint8 of 2 dimensions .*key: b"):
        builder.block([{"__key__": "b", "image": other}])
