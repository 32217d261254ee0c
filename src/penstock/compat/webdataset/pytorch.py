"""The classes of torch that pipelines are built on, with stand-ins where torch is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor as TorchTensor
    from torch.utils.data import DataLoader, IterableDataset
else:
    try:
        from torch import Tensor as TorchTensor
        from torch.utils.data import DataLoader, IterableDataset
    except ModuleNotFoundError:

        class IterableDataset:
            def __class_getitem__(cls, item: Any) -> Any:
                return cls

        class DataLoader:
            def __init__(self, *args: Any, **options: Any) -> None:
                raise ModuleNotFoundError("DataLoader and WebLoader need torch: pip install 'penstock[torch]'")

        class TorchTensor: ...


__all__ = ["DataLoader", "IterableDataset", "TorchTensor"]
