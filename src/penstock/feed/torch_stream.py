"""One pass over a dataset as torch's loaders go through it: this worker's share of it, with a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from penstock.errors import StateError
from penstock.feed.epochs import Epochs
from penstock.feed.torch_workers import TorchWorker, wanted_at_once
from penstock.feed.worker_split import WorkerShare
from penstock.plan import Plan


class Feed(Protocol):
    """What gives the items of a pass and can say where it stands: a loader."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class Stream(Iterator[Any]):
    """The items of one pass; it begins with the first, so that a state can be loaded before.

    Args:
        plan: What is run.
        epochs: What counts the passes.
        worker: The worker of a DataLoader that this process is.
        begin: Makes what gives the items of an epoch, or of a worker's share of it.
    """

    def __init__(
        self, plan: Plan, epochs: Epochs, worker: TorchWorker | None, begin: Callable[[int, WorkerShare | None], Feed]
    ) -> None:
        self._plan, self._epochs, self._worker, self._begin = plan, epochs, worker, begin
        self.epoch = epochs.next(worker) if plan.epoch is None else plan.epoch
        self._feed: Feed | None = None
        self._items: Iterator[Any] | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._run: int | None = None

    def __next__(self) -> Any:
        if self._items is None:
            self._items = iter(self._fed(wanted_at_once() if self._worker is not None else 1))
        return _own(next(self._items))

    def _fed(self, at_once: int) -> Feed:
        """What gives the items, standing where the loaded state says."""
        if self._feed is None:
            deal = None if self._worker is None else WorkerShare.of(self._worker, self._plan, at_once)
            if deal is not None and self._loaded is not None:
                deal = WorkerShare(deal.id, deal.many, self._loaded["run"])
            self._run = None if deal is None else deal.run
            self._feed = self._begin(self.epoch, deal)
            if self._loaded is not None:
                self._feed.load_state_dict(self._loaded["state"])
        return self._feed

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands; what was given so far counts as delivered."""
        if self._feed is None:
            return dict(self._loaded or {"epoch": self.epoch, **self._share()})
        return {"epoch": self.epoch, **self._share(), "run": self._run, "state": self._feed.state_dict()}

    def _share(self) -> dict[str, int]:
        worker = self._worker
        return {"worker": 0, "workers": 0} if worker is None else {"worker": worker.id, "workers": worker.many}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a pass of the same worker of as many workers stood.

        Raises:
            StateError: the state is damaged, of another dataset, or was made with another number of workers.
        """
        self._check(state)
        self._feed = self._items = None
        self.epoch = state["epoch"]
        self._loaded = state if "state" in state else None
        if self._plan.epoch is None:
            self._epochs.reach(self.epoch + 1)
        if self._loaded is not None:
            self._fed(1)  # so that a state that does not fit is refused here

    def _check(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or not {"epoch", "worker", "workers"} <= state.keys():
            raise StateError(f"{state!r:.80} is not the state of a pass through a DataLoader")
        if type(state["epoch"]) is not int or state["epoch"] < 0 or ("state" in state and "run" not in state):
            raise StateError(f"the state of a pass is damaged: {dict(state)!r:.80}")
        own = self._share()
        if (state["worker"], state["workers"]) != (own["worker"], own["workers"]):
            raise StateError(
                f"the state is of worker {state['worker']} of {state['workers']}, this is worker {own['worker']} of "
                f"{own['workers']}: keep num_workers, or iterate ds.loader() itself, whose state fits everywhere"
            )


def _own(item: Any) -> Any:
    """The item with arrays that may be written to: torch makes tensors of them, and knows no others."""
    if isinstance(item, np.ndarray):
        return item if item.flags.writeable else item.copy()
    if type(item) is dict:
        return {name: _own(value) for name, value in item.items()}
    return tuple(_own(value) for value in item) if type(item) is tuple else item
