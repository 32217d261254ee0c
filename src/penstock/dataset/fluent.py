"""The dataset itself: a value that says what is done to samples, and hands its plan to an engine."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from itertools import islice
from operator import index
from typing import Any, Literal, SupportsIndex

import cloudpickle

from penstock.dataset.chain import Chain
from penstock.dataset.words import brief, explained, type_of
from penstock.engines import Meters, Program, Run, Stats, snapshot
from penstock.errors import PlanError
from penstock.feed import Loader, find_rank
from penstock.packing import Packed, write_shards
from penstock.plan import Cut, Plan, check_choice, check_count, relaxed
from penstock.storage import Storage


class Dataset(Chain):
    """A description of samples and what is done to them; immutable, every method returns a new one.

    Iterating starts the engine: every ``for`` is the next epoch.
    """

    __slots__ = ("__weakref__", "_epochs", "_meters", "_ready")

    def __init__(self, plan: Plan) -> None:
        """Made by the functions that read, and by a dataset's methods."""
        super().__init__(plan)
        self._epochs = 0
        self._ready: Program | None = None
        self._meters = Meters()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (cloudpickle.dumps(self.plan),)  # which takes lambdas and what stands in a main module

    def __iter__(self) -> Iterator[Any]:
        """The samples (or batches) of the next epoch."""
        return self._run(self._next_epoch()).items()

    def _next_epoch(self) -> int:
        if self.plan.epoch is not None:
            return self.plan.epoch
        self._epochs += 1
        return self._epochs - 1

    def _run(self, epoch: int) -> Run:
        program = Program(self.plan)
        if program.stream is not None:
            return self._noted(Run(program, None, epoch, program.front()))
        alone = self.plan.cut is None or self.plan.cut.world == 1
        order = program.order(epoch, counts=not alone)
        return self._noted(Run(program, order, epoch, program.start(order, self.plan.cut)))

    def _noted(self, run: Run) -> Run:
        self._meters = run.meters
        return run

    def _peek(self) -> Iterator[Any]:
        """The samples of the epoch that comes next, without making it the last."""
        return self._run(self._coming()).items()

    def _coming(self) -> int:
        return self._epochs if self.plan.epoch is None else self.plan.epoch

    def _program(self) -> Program:
        """A program for questions that run nothing; kept, since such questions come in numbers."""
        if self._ready is None:
            self._ready = Program(self.plan)
        return self._ready

    def take(self, n: int = 20) -> list[Any]:
        """The first ``n``."""
        check_count("take", n)
        return list(islice(self._peek(), n)) if n else []

    def take_all(self) -> list[Any]:
        """All of them, in memory."""
        return list(self._peek())

    def take_batch(self, n: int = 20) -> Any:
        """The first ``n`` as one batch.

        Raises:
            PlanError: there is nothing.
        """
        for batch in self.batched(n)._run(self._coming()).items():
            return batch
        raise PlanError("the dataset is empty")

    def first(self) -> Any:
        """The first one.

        Raises:
            PlanError: there is nothing.
        """
        if found := self.take(1):
            return found[0]
        raise PlanError("the dataset is empty")

    def show(self, n: int = 20) -> None:
        """Print the first ``n``, shortened."""
        for sample in self.take(n):
            sys.stdout.write(f"{brief(sample)}\n")

    def __len__(self) -> int:
        """How many there are, where that is known without running.

        Raises:
            TypeError: only ``count()`` can tell.
        """
        length = self._length()
        if length is None:
            raise TypeError("the length is not known without running the dataset; use count()")
        return length

    def _length(self) -> int | None:
        return None if self._program().stream is not None else self._program().length(self.plan.cut)

    def __bool__(self) -> bool:
        return True

    def count(self) -> int:
        """How many there are, running the dataset if need be."""
        length = self._length() if self.plan.errors.action == "raise" else None
        if length is None and self._program().endless:
            raise PlanError("the dataset has no end; use limit(n)")
        return sum(1 for _ in self._peek()) if length is None else length

    def schema(self) -> dict[str, str]:
        """The fields of the first sample and their types.

        Raises:
            PlanError: there is nothing, or samples have no fields.
        """
        sample = self.first()
        if isinstance(sample, tuple):
            sample = {str(i): value for i, value in enumerate(sample)}
        if not isinstance(sample, dict):
            sample = {"item": sample}
        return {name: type_of(value) for name, value in sample.items()}

    def __getitem__(self, i: SupportsIndex) -> Any:
        """The sample at place ``i`` of the unshuffled order, through every stage.

        Raises:
            IndexError: there is no such place.
            TypeError: a stage changes the count, so that places mean nothing.
        """
        try:
            wanted = index(i)
        except TypeError:
            raise TypeError(f"ds[i] needs a number, not {type(i).__name__}") from None
        plan = relaxed(self.plan)
        if not plan.counted:
            raise TypeError("ds[i] needs stages that keep the count; filter, flat_map and batched do not")
        if self._ready is None or self._ready.plan != plan:
            self._ready = Program(plan)
        program = self._ready
        epoch = self.plan.epoch or 0
        order = program.order(epoch)
        if order.size < 0:
            raise TypeError("ds[i] needs counts, which these shards do not tell; run `penstock index`")
        start = program.start(order, plan.cut)
        many = sum(max(0, -(-(p[1] - p[0]) // p[2])) for p in start.left)
        place = wanted + many if wanted < 0 else wanted
        if not 0 <= place < many:
            raise IndexError(f"{i} is not a place in a dataset of {many}")
        for item in Run(program, order, epoch, start.only(place)).items():
            return item
        raise IndexError(f"the sample at {i} was skipped")

    def iter_batches(
        self, batch_size: int = 256, format: Literal["numpy"] = "numpy", drop_last: bool = False
    ) -> Iterator[Any]:
        """The samples of the next epoch in batches of columns.

        Raises:
            PlanError: an unknown format.
        """
        check_choice("format", format, ("numpy",))
        batches = self.batched(batch_size, drop_last)
        return batches._run(self._next_epoch()).items()

    def loader(
        self,
        rank: int | None = None,
        world: int | None = None,
        epoch: int = 0,
        cut: Literal["range", "step"] = "range",
        uneven: Literal["keep", "drop", "pad"] | None = None,
    ) -> Loader:
        """Feed one rank, with a state that can be saved after any batch and taken up under any number of ranks.

        Rank and world come from torch.distributed or the environment when not given. ``uneven`` is ``"drop"`` when
        there is more than one rank, else ``"keep"``.

        Raises:
            PlanError: the dataset is cut already and another rank is given, or the plan cannot be cut.
        """
        check_count("epoch", epoch)
        epoch = self.plan.epoch or epoch
        if self.plan.cut is not None:
            if rank is not None or world is not None:
                raise PlanError("the dataset is already cut by shard(); give rank and world in one place")
            return Loader(self.plan, self.plan.cut, epoch)
        rank, world = find_rank(rank, world)
        return Loader(self.plan, Cut(rank, world, cut, uneven or ("drop" if world > 1 else "keep")), epoch)

    def write_tar(
        self,
        url: str,
        max_bytes: float | str = 1e9,
        max_samples: int = 100_000,
        compress: Literal["gz", "zst", "bz2", "xz"] | None = None,
        *,
        trust_pickle: bool = False,
        progress: bool = False,
        storage: Storage | None = None,
    ) -> Packed:
        """Write the samples into tar shards, in order.

        ``url`` is a folder (``shard-000000.tar``, ...), a pattern (``out/train-%06d.tar``), or one ``.tar`` file; a
        path, or a URL that ``storage`` or its scheme knows how to write to.

        Raises:
            DataError: a sample cannot be stored.
            StorageError: the place cannot be written.
        """
        return write_shards(
            self.plan,
            self._coming(),
            url,
            max_bytes=max_bytes,
            max_samples=max_samples,
            compress=compress,
            trust_pickle=trust_pickle,
            progress=progress,
            storage=storage,
        )

    def stats(self) -> Stats:
        """What the last run of this dataset did, or does: rates, where the time goes, and the bottleneck in words."""
        return snapshot(self._meters)

    def explain(self) -> str:
        """The plan as it runs: what is fused, where, and with how many workers."""
        return explained(Program(self.plan))


def _unpickled(plan: bytes) -> Dataset:
    return Dataset(pickle.loads(plan))
