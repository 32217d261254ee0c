"""A dataset as a torch ``IterableDataset``."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import cloudpickle

from penstock.errors import MissingExtra, PlanError
from penstock.feed.epochs import Epochs
from penstock.feed.loader import Loader
from penstock.feed.torch_isinstance import warn_uncut
from penstock.feed.torch_stream import TorchStream, worker_fields
from penstock.feed.torch_workers import this_worker
from penstock.feed.worker_split import WorkerShare
from penstock.plan import Cut, Plan, check_count

try:
    from torch.utils.data import IterableDataset
except ImportError:
    raise MissingExtra("tensors and DataLoaders", "torch") from None


class TorchDataset(IterableDataset[Any]):
    """An iterable dataset of torch, for DataLoaders and for tools that save its state and set its epoch.

    Every ``for`` over it is the next epoch. The workers of a DataLoader share each epoch, and count epochs together.
    """

    def __init__(self, plan: Plan, length: Callable[[], int | None]) -> None:
        """Use ``Dataset.to_torch`` to create one."""
        self._plan, self._length = plan, length
        self._epochs = Epochs()
        self._epochs.share()
        self._stream: TorchStream | None = None
        self._loaded: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the samples (or batches) of the next epoch, or over the rest of a loaded state's epoch."""
        warn_uncut(self._plan)
        make_loader = partial(_worker_loader, self._plan)
        stream = TorchStream(self._plan, self._epochs, this_worker(self._plan.cut), make_loader)
        if self._loaded is not None:
            stream.load_state_dict(self._loaded)
        self._stream, self._loaded = stream, None
        return stream

    def __len__(self) -> int:
        """Return the number of samples (or batches) of an epoch.

        Raises:
            TypeError: Only a run can tell the number.
        """
        length = self._length()
        if length is None:
            raise TypeError("the length is not known without running the dataset; use count()")
        return length

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the last pass; every item that it yielded counts as delivered."""
        if self._loaded is not None:
            return dict(self._loaded)
        if self._stream is not None:
            return self._stream.state_dict()
        epoch = self._epochs.peek() if self._plan.epoch is None else self._plan.epoch
        return {"epoch": epoch, **worker_fields(this_worker())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass resume from a saved state.

        Raises:
            StateError: Raised by the next pass, if the state does not fit.
        """
        self._loaded, self._stream = dict(state), None

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; a loaded state of this epoch stays loaded.

        Raises:
            PlanError: The epoch is not a whole number of at least 0, or the epoch of the dataset is fixed.
        """
        epoch = check_count("epoch", epoch)
        if self._plan.epoch is not None:
            raise PlanError(f"the epoch is fixed by ds.epoch({self._plan.epoch})")
        if self._loaded is not None and self._loaded.get("epoch") != epoch:
            self._loaded = None
        self._epochs.set(epoch)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_dataset, (cloudpickle.dumps((self._plan, self._length)), self._epochs, self._loaded)


def _unpickle_dataset(arguments: bytes, epochs: Epochs, loaded: Mapping[str, Any] | None) -> TorchDataset:
    dataset = TorchDataset(*pickle.loads(arguments))
    dataset._epochs, dataset._loaded = epochs, loaded
    return dataset


def _worker_loader(plan: Plan, epoch: int, share: WorkerShare | None) -> Loader:
    return Loader(plan, plan.cut or Cut(0, 1), epoch, share=share, one_epoch=True)
