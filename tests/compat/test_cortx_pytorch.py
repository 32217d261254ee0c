"""The programs of cortx_pytorch's own pages, against a real S3 server, with only the import changed."""

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
MANY = 2000 if FULL else 240


class Pictures(torch.utils.data.Dataset[tuple[Image.Image, int]]):
    """A computer vision dataset: the colour of a picture says which one it is."""

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (12, 9), (i % 256, i // 256, 7)), i % 10


def number(image: Image.Image) -> Any:
    red, green, _ = image.getpixel((0, 0))  # type: ignore[misc]
    return torch.tensor(red + 256 * green)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A store with the dataset in it."""
    folder = tmp_path_factory.mktemp("s3")
    (folder / "testbucket").mkdir()
    with s3_server(folder) as port:
        made = make_client(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)
        upload_cv_dataset(
            Pictures(), client=made, bucket="testbucket", base_folder="pictures", maxsize=1e5, maxcount=100, workers=3
        )
        yield made


def numbers_in(loader: Any) -> list[int]:
    return [int(n) for images, labels in loader for n in np.atleast_1d(np.asarray(images))]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than there are cores
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_every_sample_arrives_once_an_epoch_through_workers(client: Any, start: str) -> None:
    dataset = (
        RemoteDataset(client, "testbucket", "pictures")
        .decode("pil")
        .to_tuple("jpg;png", "cls")
        .map_tuple(number, lambda x: x)
        .batched(64)
    )
    slow = start == "spawn"  # to start
    workers = 2 if slow and not FULL else 3
    loader = torch.utils.data.DataLoader(
        dataset, num_workers=workers, batch_size=None, multiprocessing_context=start, persistent_workers=slow
    )
    first, second = numbers_in(loader), numbers_in(loader)
    assert Counter(first) == Counter(second) == Counter(range(MANY))
    assert first != second, "every epoch has an order of its own"
    assert first != sorted(first)


def test_it_reads_here_too_and_labels_are_right(client: Any) -> None:
    dataset = RemoteDataset(client, "testbucket", "pictures").decode("pil").to_tuple("jpg;png", "cls")
    seen = {int(number(image)): label for image, label in dataset}
    assert seen == {i: i % 10 for i in range(MANY)}
    assert "never-to-be-seen" not in repr(client) + repr(dataset._ds)


def test_shards_hold_no_more_than_was_asked_for(client: Any, tmp_path: Path) -> None:
    listed = [one for one in client.list("s3://testbucket/pictures/") if one.url.endswith(".tar")]
    assert len(listed) >= MANY / 100
    assert all(one.size <= 1e5 for one in listed)
