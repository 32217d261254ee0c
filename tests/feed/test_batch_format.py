from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import PlanError
from penstock.feed.batch_format import BatchFormat, map_ahead
from penstock.testing import numbers

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def _ds() -> ps.Dataset:
    return numbers((30, 12, 20)).shuffle(10)


def _labelled() -> ps.Dataset:
    return _ds().map(lambda s: {"image": np.full((2, 2), s["x"], np.uint8), "label": s["x"], "name": str(s["x"])})


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(("name", "kind"), [("torch", torch.Tensor), ("numpy", np.ndarray)])
def test_labels_become_arrays_as_images_do(name: Any, kind: Any, batched: bool) -> None:
    ds = _labelled().batched(4) if batched else _labelled()
    item: Any = next(iter(ds.loader(format=name)))
    assert isinstance(item["image"], kind)
    assert isinstance(item["label"], kind)
    assert tuple(item["image"].shape) == ((4, 2, 2) if batched else (2, 2))
    assert isinstance(item["name"], list if batched else str)


def test_tuples_dicts_and_plain_numbers_are_converted() -> None:
    convert = BatchFormat("torch", dtypes=torch.float64)
    number, inner, text = convert((3, {"a": np.arange(2)}, "text"))
    assert (number.dtype, inner["a"].dtype, text) == (torch.float64, torch.float64, "text")
    assert convert(np.array(["a", "b"])) == ["a", "b"]


@pytest.mark.parametrize(("name", "dtype"), [("torch", torch.float16), ("numpy", np.float16)])
def test_dtypes_apply_to_the_fields_they_name(name: Any, dtype: Any) -> None:
    item = next(iter(_labelled().batched(4).loader(format=name, dtypes={"image": dtype})))
    assert item["image"].dtype == dtype
    assert item["label"].dtype != dtype
    with pytest.raises(PlanError, match=r"dtypes names \['pixels'\]"):
        next(iter(_labelled().loader(format=name, dtypes={"pixels": dtype})))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"device": "cpu"}, "need a format"),
        ({"format": "tensorflow"}, "format"),
        ({"format": "numpy", "device": "cpu"}, "main memory"),
        ({"format": "numpy", "pin_memory": True}, "for format='torch'"),
        pytest.param({"format": "torch", "pin_memory": True}, "no GPU", marks=WITHOUT_GPU),
        pytest.param({"format": "torch", "device": "cuda:1"}, "no GPU", marks=WITHOUT_GPU),
        ({"format": "torch", "dtypes": "float32"}, "torch.dtype"),
        ({"format": "numpy", "dtypes": "nothing"}, "numpy dtype"),
        ({"format": "torch", "prefetch": -1}, "prefetch"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_at_once(options: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        _ds().loader(**options)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_states_ranks_and_ledger_follow_what_is_delivered(name: Any, device: str | None, tmp_path: Path) -> None:
    if name == "numpy":
        device = None  # its arrays are in main memory

    def loader(rank: int) -> Any:
        ds = _ds().filter(lambda sample: sample["x"] % 5 != 4).batched(4)
        return ds.loader(rank, 2, uneven="keep", ledger=tmp_path, format=name, device=device, prefetch=3)

    got: list[int] = []
    for rank in range(2):
        first = loader(rank)
        for number, batch in enumerate(first):
            got += [int(x) for x in batch["x"]]
            if number == 2:
                break
        state = first.state_dict()
        first.close()
        again = loader(rank)
        again.load_state_dict(state)
        got += [int(x) for batch in again for x in batch["x"]]
    assert sorted(got) == [x for x in range(62) if x % 5 != 4]
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert proof.finished
    assert (proof.epochs[0].delivered, proof.epochs[0].passed, proof.epochs[0].again) == (50, 12, 0)


# In a process of its own: once imported, JAX warns about every fork of the process.
JAX = """
import jax, numpy as np, penstock as ps
from penstock.testing import numbers

ds = numbers((30, 12, 20)).shuffle(10).filter(lambda s: s["x"] % 5 != 4).map(lambda s: {**s, "name": str(s["x"])})

def loader(rank):
    options = {"format": "jax", "device": "cpu", "dtypes": {"x": np.float16}}
    return ds.batched(4).loader(rank, 2, uneven="keep", ledger="ledger", **options)

got = []
for rank in range(2):
    first = loader(rank)
    for _, batch in zip(range(2), first):
        assert isinstance(batch["x"], jax.Array) and isinstance(batch["index"], jax.Array)
        assert batch["x"].dtype == np.float16 and batch["index"].dtype != np.float16
        assert isinstance(batch["name"], list)
        got += batch["x"].tolist()
    state = first.state_dict()
    first.close()
    again = loader(rank)
    again.load_state_dict(state)
    got += [x for batch in again for x in batch["x"].tolist()]
for device in ("cpu:99", "cpu:x", "abacus"):
    try:
        next(iter(numbers((3,)).loader(format="jax", device=device)))
    except ps.errors.PlanError as error:
        assert f"device={device!r}: JAX has no such device" in str(error)
    else:
        raise AssertionError(device)
label = next(iter(numbers((3,)).loader(format="jax")))["x"]
assert isinstance(label, jax.Array) and label.shape == ()
proof = ps.ledger("ledger").verify()
assert proof.ok and proof.finished and proof.epochs[0].delivered == 50, proof
assert sorted(got) == [x for x in range(62) if x % 5 != 4]
print("done")
"""


def test_jax_arrays_come_with_state_ranks_and_ledger(tmp_path: Path, warm_python: str) -> None:
    ran = subprocess.run([warm_python, "-c", JAX], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "done", ran.stderr


def test_a_device_needs_the_process_that_trains() -> None:
    loader = _ds().batched(4).loader(format="torch", device="cpu")
    with pytest.raises(PlanError, match="num_workers=0"):
        list(torch.utils.data.DataLoader(loader, batch_size=None, num_workers=1))  # type: ignore[arg-type]


def test_a_thread_converts_ahead_and_ends_with_its_iterator() -> None:
    taken: list[int] = []

    def numbered() -> Any:
        for number in range(10):
            taken.append(number)
            yield number

    ahead = map_ahead(numbered(), lambda number: number * 2, 3)
    assert next(ahead) == 0
    assert next(ahead) == 2
    ahead.close()
    assert 2 <= len(taken) <= 6
    assert not any("penstock prefetch" in thread.name for thread in threading.enumerate())
    assert list(map_ahead(iter(range(4)), str, 2)) == list(map_ahead(iter(range(4)), str, 0)) == ["0", "1", "2", "3"]
