"""The names of cortx_pytorch: upload a computer vision dataset to an S3 store, and train from there.

>>> from penstock.compat.cortx_pytorch import RemoteDataset, make_client, upload_cv_dataset
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from penstock.dataset import Dataset, read_tar
from penstock.packing import Packed, pack
from penstock.storage import S3


def make_client(url: str, access_key: str, secret_key: str) -> S3:
    """The store at ``url`` as somebody with these keys sees it."""
    return S3(endpoint=url, access_key=access_key, secret_key=secret_key)


def upload_cv_dataset(
    ds: Any,
    client: S3,
    bucket: str,
    base_folder: str,
    maxsize: float = 1e8,
    maxcount: int = 100_000,
    workers: int = 30,
    **options: Any,
) -> Packed:
    """Pack a torch dataset of (image, label) into shards, in a random order, and upload them as they are made.

    Args:
        ds: The dataset.
        client: What ``make_client`` gave.
        bucket: The bucket.
        base_folder: The folder in it.
        maxsize: Bytes of a shard, at most.
        maxcount: Samples of a shard, at most.
        workers: Workers that read and encode.
        options: What else ``penstock.pack`` takes.

    Raises:
        StorageError: the store cannot be written.
        DataError: a sample cannot be read or encoded.
    """
    place = f"s3://{bucket}/{base_folder.strip('/')}"
    return pack(ds, place, max_bytes=maxsize, max_samples=maxcount, workers=workers, storage=client, **options)


class RemoteDataset(IterableDataset[Any]):
    """The samples of an uploaded dataset, shuffled: several shards together, another order each epoch.

    It has the methods of a ``penstock.Dataset`` (``decode``, ``to_tuple``, ``map_tuple``, ``batched``, ...) and goes
    straight into a ``torch.utils.data.DataLoader``, whose workers share the samples.
    """

    def __init__(self, client: S3, bucket: str, folder: str) -> None:
        self._hold(read_tar(f"s3://{bucket}/{folder.strip('/')}/", storage=client).shuffle())

    def _hold(self, ds: Dataset) -> None:
        self._ds, self._torch = ds, ds.to_torch()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._ds, name)
        return self._wrapped(found) if callable(found) else found

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            got = method(*args, **kwargs)
            if not isinstance(got, Dataset):
                return got
            other = RemoteDataset.__new__(RemoteDataset)
            other._hold(got)
            return other

        return call

    def __iter__(self) -> Iterator[Any]:
        """The samples or batches of the next epoch; in a DataLoader's worker its share of them."""
        return iter(self._torch)
