"""The programs in the documentation of cortx_pytorch, with another import, against a real S3 server."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image

from penstock.compat.cortx_pytorch import RemoteDataset, make_client, upload_cv_dataset
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

FULL = os.environ.get("PENSTOCK_FULL") == "1"
SAMPLES = 2000 if FULL else 240


class Images(torch.utils.data.Dataset[tuple[Image.Image, int]]):
    """A computer vision dataset; the color of an image encodes its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (12, 9), (i % 256, i // 256, 7)), i % 10


def number_of(image: Image.Image) -> Any:
    red, green, _ = image.getpixel((0, 0))  # type: ignore[misc]
    return torch.tensor(red + 256 * green)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An S3 store that holds the uploaded dataset."""
    folder = tmp_path_factory.mktemp("s3")
    (folder / "testbucket").mkdir()
    with s3_server(folder) as port:
        store = make_client(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)
        upload_cv_dataset(
            Images(),
            client=store,
            bucket="testbucket",
            base_folder="pictures",
            maxsize=1e5,
            maxcount=100,
            workers=3,
            batch_size=64,
        )
        yield store


def numbers_in(loader: Any) -> list[int]:
    return [int(n) for images, labels in loader for n in np.atleast_1d(np.asarray(images))]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than there are cores
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_every_sample_arrives_once_per_epoch_through_workers(client: Any, start: str) -> None:
    dataset = (
        RemoteDataset(client, "testbucket", "pictures")
        .decode("pil")
        .to_tuple("jpg;png", "cls")
        .map_tuple(number_of, lambda x: x)
        .batched(64)
    )
    slow_start = start == "spawn"
    workers = 3 if FULL else 1 if slow_start else 2
    loader = torch.utils.data.DataLoader(
        dataset, num_workers=workers, batch_size=None, multiprocessing_context=start, persistent_workers=slow_start
    )
    first, second = numbers_in(loader), numbers_in(loader)
    assert Counter(first) == Counter(second) == Counter(range(SAMPLES))
    assert first != second, "every epoch must have its own order"
    assert first != sorted(first)


def test_the_dataset_is_read_in_this_process_with_the_right_labels(client: Any) -> None:
    dataset = RemoteDataset(client, "testbucket", "pictures").decode("pil").to_tuple("jpg;png", "cls")
    labels = {int(number_of(image)): label for image, label in dataset}
    assert labels == {i: i % 10 for i in range(SAMPLES)}
    assert "never-to-be-seen" not in repr(client) + repr(dataset._ds)


def test_an_unshuffled_dataset_comes_in_the_order_of_its_shards(client: Any) -> None:
    shards = [sample["__url__"] for sample in RemoteDataset(client, "testbucket", "pictures", shuffle=False)]
    assert shards == sorted(shards)


def test_shards_respect_the_maximum_size_and_count(client: Any, tmp_path: Path) -> None:
    shards = [info for info in client.list("s3://testbucket/pictures/") if info.url.endswith(".tar")]
    assert len(shards) >= SAMPLES / 100
    assert all(info.size <= 1e5 for info in shards)
