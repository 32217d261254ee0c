"""Datasets of torch's own class."""

from __future__ import annotations

import pickle
<<<<<<< HEAD
from collections.abc import Callable, Iterator, Mapping
=======
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
>>>>>>> tools
from functools import partial
from typing import Any

import cloudpickle

from penstock.engines import closed_at_exit
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
            PlanError: The epoch is not a whole number from 0, or the epoch of the dataset is fixed.
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
<<<<<<< HEAD
    return Loader(plan, plan.cut or Cut(0, 1), epoch, share=share, one_epoch=True)
=======
    return Loader(plan, plan.cut or Cut(0, 1), epoch, share=share)


@dataclass(frozen=True, slots=True)
class TensorConverter:
    """Turns the numbers and arrays of a batch into tensors; other values stay as they are.

    Raises:
        PlanError: ``dtypes`` is neither a dtype nor a dict of dtypes.
    """

    device: str | torch.device | None = None
    dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        given = self.dtypes.values() if isinstance(self.dtypes, Mapping) else [self.dtypes]
        if wrong := [dtype for dtype in given if not (dtype is None or isinstance(dtype, torch.dtype))]:
            raise PlanError(f"dtypes={wrong[0]!r}: give a torch.dtype, or a dict of torch dtypes by field")

    def __call__(self, batch: Any) -> Any:
        """Return the batch with tensors.

        Raises:
            PlanError: ``dtypes`` names a field that the batch does not have.
        """
        if isinstance(batch, dict):
            unknown = self.dtypes.keys() - batch.keys() if isinstance(self.dtypes, Mapping) else set()
            if unknown:
                raise PlanError(f"dtypes names {sorted(unknown)!r}, but a batch has only {sorted(batch)!r}")
            return {name: self._convert(value, name) for name, value in batch.items()}
        if isinstance(batch, tuple):
            return tuple(self._convert(value) for value in batch)
        return self._convert(batch)

    def _convert(self, value: Any, name: str | None = None) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biufc":
                return value.tolist()
            # A tensor is always writable; an array over the bytes of a shard is not.
            value = torch.from_numpy(value if value.flags.writeable else value.copy())
        if not isinstance(value, torch.Tensor):
            return value
        dtype = self.dtypes.get(name or "") if isinstance(self.dtypes, Mapping) else self.dtypes
        if dtype is not None:
            value = value.to(dtype)
        if self.pin_memory and not value.is_cuda:
            value = value.pin_memory()
        return value if self.device is None else value.to(self.device, non_blocking=self.pin_memory)


def map_prefetched(batches: Iterator[Any], convert: Callable[[Any], Any], prefetch: int) -> Iterator[Any]:
    """Apply ``convert`` to the batches, in a thread that has up to ``prefetch`` results ready; 0: without a thread."""
    if not prefetch:
        return map(convert, batches)
    return _map_in_thread(batches, convert, prefetch)


@closed_at_exit
def _map_in_thread(batches: Iterator[Any], convert: Callable[[Any], Any], prefetch: int) -> Generator[Any, None, None]:
    end = object()

    def step() -> Any:
        batch = next(batches, end)
        return end if batch is end else convert(batch)

    with ThreadPoolExecutor(1, "penstock prefetch") as thread:
        pending: deque[Future[Any]] = deque(thread.submit(step) for _ in range(prefetch))
        try:
            while (batch := pending.popleft().result()) is not end:
                pending.append(thread.submit(step))
                yield batch
        finally:
            for future in pending:
                future.cancel()
>>>>>>> tools
