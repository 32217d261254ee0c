"""The classes of torch that pipelines are built on, with stand-ins where torch is not installed."""

from typing import TYPE_CHECKING, Any

try:
    from torch import Tensor as TorchTensor
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ModuleNotFoundError:
    if not TYPE_CHECKING:

        class IterableDataset:
            __class_getitem__ = classmethod(lambda cls, item: cls)

        class DataLoader:
            def __init__(self, *args: Any, **options: Any) -> None:
                raise ModuleNotFoundError("DataLoader and WebLoader need torch: pip install 'penstock[torch]'")

        class TorchTensor: ...

        get_worker_info = bool


__all__ = ["DataLoader", "IterableDataset", "TorchTensor", "get_worker_info"]
