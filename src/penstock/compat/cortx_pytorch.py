"""The names of cortx_pytorch: upload a computer vision dataset to an S3 store, and train from it.

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
    """Return the S3 store at ``url``, accessed with these keys."""
    return S3(endpoint=url, access_key=access_key, secret_key=secret_key)


def upload_cv_dataset(
    ds: Any,
    client: S3,
    bucket: str,
    base_folder: str,
    maxsize: float = 1e8,
    maxcount: int = 100_000,
    workers: int = 30,
    batch_size: int = 256,
    **options: Any,
) -> Packed:
    """Pack a torch dataset of (image, label) into shards, in a random order, and upload each shard when it is complete.

    Args:
        ds: The dataset.
        client: The store, from ``make_client``.
        bucket: The bucket.
        base_folder: The folder in the bucket.
        maxsize: Maximum size of a shard in bytes.
        maxcount: Maximum number of samples in a shard.
        workers: Workers that read and encode.
        batch_size: Not used.
        options: Other arguments of ``penstock.pack``.

    Raises:
        StorageError: The store cannot be written.
        DataError: A sample cannot be read or encoded.
    """
    url = f"s3://{bucket}/{base_folder.strip('/')}"
    return pack(ds, url, max_bytes=maxsize, max_samples=maxcount, workers=workers, storage=client, **options)


class RemoteDataset(IterableDataset[Any]):
    """The samples of an uploaded dataset, shuffled across several shards, in another order each epoch.

    It has the methods of a ``penstock.Dataset`` (``decode``, ``to_tuple``, ``map_tuple``, ``batched``, ...) and goes
    straight into a ``torch.utils.data.DataLoader``, whose workers share the samples. ``shuffle=False`` keeps the order
    of the shards.
    """

    def __init__(self, client: S3, bucket: str, folder: str, shuffle: bool = True) -> None:
        ds = read_tar(f"s3://{bucket}/{folder.strip('/')}/", storage=client)
        self._set_dataset(ds.shuffle() if shuffle else ds)

    def _set_dataset(self, ds: Dataset) -> None:
        self._ds, self._torch = ds, ds.to_torch()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._ds, name)
        return self._wrap(value) if callable(value) else value

    def _wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the dataset that returns a ``RemoteDataset`` instead of a ``Dataset``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if not isinstance(result, Dataset):
                return result
            wrapped = RemoteDataset.__new__(RemoteDataset)
            wrapped._set_dataset(result)
            return wrapped

        return call

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the next epoch; in a DataLoader worker, over the worker's share of it."""
        return iter(self._torch)
