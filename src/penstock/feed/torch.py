"""What torch's own loops hold: a dataset of torch's kind, and batches of tensors on their way to a device."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import numpy as np

from penstock.errors import MissingExtra, PlanError
from penstock.feed.epochs import Epochs
from penstock.feed.loader import Loader
from penstock.feed.torch_isinstance import warn_uncut
from penstock.feed.torch_stream import Stream
from penstock.feed.torch_workers import this_worker
from penstock.feed.worker_split import WorkerShare
from penstock.plan import Cut, Plan, check_count

try:
    import torch
    from torch.utils.data import IterableDataset
except ImportError:
    raise MissingExtra("tensors and DataLoaders", "torch") from None


class TorchDataset(IterableDataset[Any]):
    """A dataset as torch knows them: for DataLoaders and for tools that look at its state and set its epoch.

    Every ``for`` over it is the next epoch; the workers of a DataLoader share it, and count epochs together.
    """

    def __init__(self, plan: Plan, length: Callable[[], int | None]) -> None:
        """Made by ``Dataset.to_torch``."""
        self._plan, self._length = plan, length
        self._epochs = Epochs()
        self._epochs.share()
        self._stream: Stream | None = None
        self._loaded: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """The samples (or batches) of the next epoch, or what a loaded state has left of one."""
        warn_uncut(self._plan)
        stream = Stream(self._plan, self._epochs, this_worker(self._plan.cut), partial(_loader, self._plan))
        if self._loaded is not None:
            stream.load_state_dict(self._loaded)
        self._stream, self._loaded = stream, None
        return stream

    def __len__(self) -> int:
        """How many there are, where that is known without running.

        Raises:
            TypeError: it is not.
        """
        length = self._length()
        if length is None:
            raise TypeError("the length is not known without running the dataset; use count()")
        return length

    def state_dict(self) -> dict[str, Any]:
        """Where the last pass stands; what it gave so far counts as delivered."""
        if self._loaded is not None:
            return dict(self._loaded)
        if self._stream is not None:
            return self._stream.state_dict()
        worker = this_worker()
        share = {"worker": 0, "workers": 0} if worker is None else {"worker": worker.id, "workers": worker.many}
        return {"epoch": self._coming(), **share}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next pass go on where a saved one stood.

        Raises:
            StateError: by the next pass, if the state does not fit.
        """
        self._loaded, self._stream = dict(state), None

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next; what a loaded state has left of that very epoch still comes.

        Raises:
            PlanError: not a whole number from 0, or the dataset's epoch is fixed.
        """
        epoch = check_count("epoch", epoch)
        if self._plan.epoch is not None:
            raise PlanError(f"the epoch is fixed by ds.epoch({self._plan.epoch})")
        if self._loaded is not None and self._loaded.get("epoch") != epoch:
            self._loaded = None
        self._epochs.set(epoch)

    def _coming(self) -> int:
        return self._epochs.coming() if self._plan.epoch is None else self._plan.epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (cloudpickle.dumps((self._plan, self._length)), self._epochs, self._loaded)


def _unpickled(made_of: bytes, epochs: Epochs, loaded: Mapping[str, Any] | None) -> TorchDataset:
    dataset = TorchDataset(*pickle.loads(made_of))
    dataset._epochs, dataset._loaded = epochs, loaded
    return dataset


def _loader(plan: Plan, epoch: int, deal: WorkerShare | None) -> Loader:
    return Loader(plan, plan.cut or Cut(0, 1), epoch, deal=deal)


@dataclass(frozen=True, slots=True)
class Tensors:
    """Makes tensors of a batch's numbers and arrays; everything else stays as it is.

    Raises:
        PlanError: ``dtypes`` is neither a dtype nor a dict of dtypes.
    """

    device: str | torch.device | None = None
    dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        given = self.dtypes.values() if isinstance(self.dtypes, Mapping) else [self.dtypes]
        if wrong := [dtype for dtype in given if not (dtype is None or isinstance(dtype, torch.dtype))]:
            raise PlanError(f"dtypes={wrong[0]!r}: give a torch.dtype, or a dict of them by field")

    def __call__(self, batch: Any) -> Any:
        """The batch with tensors in it."""
        if isinstance(batch, dict):
            unknown = self.dtypes.keys() - batch.keys() if isinstance(self.dtypes, Mapping) else set()
            if unknown:
                raise PlanError(f"dtypes names {sorted(unknown)!r}, but a batch has only {sorted(batch)!r}")
            return {name: self._tensor(value, name) for name, value in batch.items()}
        if isinstance(batch, tuple):
            return tuple(self._tensor(value) for value in batch)
        return self._tensor(batch)

    def _tensor(self, value: Any, name: str | None = None) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biufc":
                return value.tolist()
            # A tensor may be written to; an array over a shard's bytes may not.
            value = torch.from_numpy(value if value.flags.writeable else value.copy())
        if not isinstance(value, torch.Tensor):
            return value
        dtype = self.dtypes.get(name or "") if isinstance(self.dtypes, Mapping) else self.dtypes
        if dtype is not None:
            value = value.to(dtype)
        if self.pin_memory and not value.is_cuda:
            value = value.pin_memory()
        return value if self.device is None else value.to(self.device, non_blocking=self.pin_memory)


def ahead(batches: Iterator[Any], make: Callable[[Any], Any], many: int) -> Iterator[Any]:
    """Apply ``make`` to the batches; with ``many`` in a thread, so that so many are ready when they are asked for."""
    if not many:
        return map(make, batches)
    return _ahead(batches, make, many)


def _ahead(batches: Iterator[Any], make: Callable[[Any], Any], many: int) -> Iterator[Any]:
    end = object()

    def step() -> Any:
        batch = next(batches, end)
        return end if batch is end else make(batch)

    with ThreadPoolExecutor(1, "penstock ahead") as thread:
        coming: deque[Future[Any]] = deque(thread.submit(step) for _ in range(many))
        try:
            while (batch := coming.popleft().result()) is not end:
                coming.append(thread.submit(step))
                yield batch
        finally:
            for future in coming:
                future.cancel()
