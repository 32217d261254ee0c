"""One pass of a torch loader over a dataset, or over this worker's share of it, with a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from penstock.errors import StateError
from penstock.feed.epochs import Epochs
from penstock.feed.torch_workers import TorchWorker, items_per_fetch
from penstock.feed.worker_split import WorkerShare
from penstock.plan import Plan


class StatefulLoader(Protocol):
    """The methods of a ``Loader`` that a stream uses; ``Loader`` itself imports this module."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class TorchStream(Iterator[Any]):
    """The items of one pass.

    The pass starts when the first item is requested, so that a state can be loaded before.

    Args:
        plan: The plan to run.
        epochs: Counts the passes.
        worker: The worker of a DataLoader that this process is.
        make_loader: Returns the loader of a pass, given its number in the count of epochs, or of a worker's share of
            it. A plan may fix the epoch of all passes.
    """

    def __init__(
        self,
        plan: Plan,
        epochs: Epochs,
        worker: TorchWorker | None,
        make_loader: Callable[[int, WorkerShare | None], StatefulLoader],
    ) -> None:
        self._plan, self._epochs, self._worker, self._make_loader = plan, epochs, worker, make_loader
        self._number = epochs.next(worker)
        self.epoch = self._number if plan.epoch is None else plan.epoch
        self._loader: StatefulLoader | None = None
        self._items: Iterator[Any] | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._run_length: int | None = None

    def __next__(self) -> Any:
        if self._items is None:
            self._items = iter(self._open(items_per_fetch() if self._worker is not None else 1))
        return _writable(next(self._items))

    def _open(self, items_per_batch: int) -> StatefulLoader:
        """Return the loader; a new one is at the position of the loaded state."""
        if self._loader is None:
            share = None if self._worker is None else WorkerShare.of(self._worker, self._plan, items_per_batch)
            if share is not None and self._loaded is not None:
                share = WorkerShare(share.id, share.workers, self._loaded["run"])
            self._run_length = None if share is None else share.run_length
            self._loader = self._make_loader(self._number, share)
            if self._loaded is not None:
                self._loader.load_state_dict(self._loaded["state"])
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of this pass; every item that was yielded counts as delivered."""
        if self._loader is None:
            return dict(self._loaded or {"epoch": self.epoch, **worker_fields(self._worker)})
        fields = {"epoch": self.epoch, **worker_fields(self._worker), "run": self._run_length}
        return {**fields, "state": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a pass of the same worker, of the same number of workers.

        Raises:
            StateError: The state is damaged, of another dataset, or of another number of workers.
        """
        self._check(state)
        self._loader = self._items = None
        self.epoch = self._number = state["epoch"]
        self._loaded = state if "state" in state else None
        if self._plan.epoch is None:
            self._epochs.reach(self.epoch + 1)
        if self._loaded is not None:
            self._open(1)  # so that a state that does not fit is refused here

    def _check(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or not {"epoch", "worker", "workers"} <= state.keys():
            raise StateError(f"{state!r:.80} is not the state of a pass through a DataLoader")
        if type(state["epoch"]) is not int or state["epoch"] < 0 or ("state" in state and "run" not in state):
            raise StateError(f"the state of a pass is damaged: {dict(state)!r:.80}")
        own = worker_fields(self._worker)
        if (state["worker"], state["workers"]) != (own["worker"], own["workers"]):
            raise StateError(
                f"the state belongs to worker {state['worker']} of {state['workers']}, but this is worker "
                f"{own['worker']} of {own['workers']}: keep num_workers, or iterate ds.loader() itself, whose state "
                "does not depend on workers"
            )


def worker_fields(worker: TorchWorker | None) -> dict[str, int]:
    """Return the entries of a state that name its worker; 0 of 0 without workers."""
    return {"worker": 0, "workers": 0} if worker is None else {"worker": worker.id, "workers": worker.workers}


def _writable(item: Any) -> Any:
    """Return the item with writable arrays: torch turns them into tensors, which are always writable."""
    if isinstance(item, np.ndarray):
        return item if item.flags.writeable else item.copy()
    if type(item) is dict:
        return {name: _writable(value) for name, value in item.items()}
    return tuple(_writable(value) for value in item) if type(item) is tuple else item
