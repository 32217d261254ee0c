"""The dataset itself: a value that says what is done to samples, and hands its plan to an engine."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.context import get_spawning_popen
from operator import index
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import cloudpickle

from penstock.codecs.features import feature_of
from penstock.dataset import relations
from penstock.dataset.describe import brief, explained, type_of
from penstock.dataset.write_methods import Writing
from penstock.engines import Meters, Program, Run, Stats, snapshot, start_run
from penstock.errors import DataError, PlanError
from penstock.feed import Epochs, Loader, Stream, WorkerShare, find_rank, this_worker, torch_class, warn_uncut
from penstock.formats import tables as parquet
from penstock.formats.items import ItemsSource
from penstock.plan import ByObject, Columns, Cut, MapFn, Plan, check_choice, check_count, unshuffled

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch

    from penstock.feed.torch import TorchDataset


class Dataset(Writing):
    """A description of samples and what is done to them; immutable, every method returns a new one.

    Iterating starts the engine: every ``for`` is the next epoch.
    """

    __slots__ = ("__weakref__", "_epochs", "_meters", "_ready")

    def __init__(self, plan: Plan) -> None:
        """Made by the functions that read, and by a dataset's methods."""
        super().__init__(plan)
        self._epochs = Epochs()
        self._ready: Program | None = None
        self._meters: Meters | Loader = Meters()

    def __reduce__(self) -> tuple[Any, ...]:
        plan = cloudpickle.dumps(self.plan)  # which takes lambdas and what stands in a main module
        if get_spawning_popen() is None:
            return _unpickled, (plan,)
        warn_uncut(self.plan)  # the process that is being started does not know of ranks
        return _unpickled, (plan, self._epochs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Its own class, which torch may take for one of its datasets."""
        return torch_class(type(self), self._epochs)

    def __iter__(self) -> Iterator[Any]:
        """The samples (or batches) of the next epoch; in a DataLoader's worker its share of them."""
        return self._pass(self.plan)

    def _pass(self, plan: Plan) -> Iterator[Any]:
        """What comes out of ``plan``, this dataset's or one that goes on from it, in the next epoch."""
        warn_uncut(plan)
        worker = this_worker(plan.cut)
        if any(getattr(source, "streams", False) for source in plan.sources()):
            return iter(()) if worker is not None and worker.id else self._noted(Dataset(plan)._run(0)).items()
        if worker is not None or self._epochs.shared:
            return Stream(plan, self._epochs, worker, partial(self._fed, plan))
        epoch = self._epochs.next() if plan.epoch is None else plan.epoch
        return self._noted(Dataset(plan)._run(epoch)).items()

    def _fed(self, plan: Plan, epoch: int, deal: WorkerShare | None) -> Loader:
        self._meters = loader = Loader(plan, plan.cut or Cut(0, 1), epoch, deal=deal)
        return loader

    def _run(self, epoch: int) -> Run:
        return self._noted(start_run(self.plan, epoch))

    def _all(self, plan: Plan) -> Run:
        """A run of the epoch that comes next, to its end.

        Raises:
            PlanError: it has none.
        """
        program = Program(plan)
        program.check_end()
        return self._noted(start_run(plan, self._coming(), program))

    def _noted(self, run: Run) -> Run:
        self._meters = run.meters
        return run

    def _peek(self) -> Iterator[Any]:
        """The samples of the epoch that comes next, without making it the last."""
        return self._run(self._coming()).items()

    def _coming(self) -> int:
        return self._epochs.coming() if self.plan.epoch is None else self.plan.epoch

    def _program(self) -> Program:
        """A program for questions that run nothing; kept, since such questions come in numbers."""
        if self._ready is None:
            self._ready = Program(self.plan)
        return self._ready

    def take(self, n: int = 20) -> list[Any]:
        """The first ``n``."""
        n = check_count("take", n)
        return list(islice(self._peek(), n)) if n else []

    def take_all(self) -> list[Any]:
        """All of them, in memory.

        Raises:
            PlanError: the dataset has no end.
        """
        return list(self._all(self.plan).items())

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
        if length is None:
            self._program().check_end()
        return sum(map(len, self._run(self._coming()).runs())) if length is None else length

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

    def unique(self, field: str) -> list[Any]:
        """The values of a field, each once, in the order they first come.

        Raises:
            DataError: a sample has no such field.
        """
        plan = relations.fields_of(self.plan, field)
        return relations.unique(self._all(plan).runs(), field, relations.memory_of(plan))

    def materialize(self, folder: str | os.PathLike[str] | None = None) -> Dataset:
        """The samples of the coming epoch, run once and kept: in memory, or in Parquet files in a new folder.

        Columns are kept as columns.

        Raises:
            PlanError: the folder holds such files already, or the dataset has no end.
            DataError: a sample cannot be stored in a table.
            StorageError: the folder cannot be written.
        """
        if folder is not None:
            written = Dataset(replace(self.plan, epoch=self._coming())).write_parquet(folder, resume=False)
            if not written.samples:
                return self._kept(ItemsSource(ByObject([])))
            return self._kept(parquet.ParquetSource((os.fspath(folder),)))
        items = relations.gathered([run for run in self._all(self.plan).runs() if len(run)])
        if isinstance(items, Columns):
            return self._kept(parquet.TableSource(ByObject(parquet.table_from(items))))
        return self._kept(ItemsSource(ByObject(items)))

    def _kept(self, source: Any) -> Dataset:
        return Dataset(Plan(source, (), self.plan.seed, engine=self.plan.engine))

    def __getitem__(self, i: SupportsIndex | str) -> Any:
        """The sample at place ``i`` of the unshuffled order, through every stage; or the values of a field, a dataset.

        Raises:
            IndexError: there is no such place.
            TypeError: a stage changes the count, so that places mean nothing.
        """
        if isinstance(i, str):
            return Dataset(relations.fields_of(self.plan, i).then(MapFn(_Column(i))))
        try:
            wanted = index(i)
        except TypeError:
            raise TypeError(f"ds[i] needs a number or the name of a field, not {type(i).__name__}") from None
        plan = unshuffled(self.plan)
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
        if wanted < 0:
            program.check_end()
        place = wanted + many if wanted < 0 else wanted
        if not 0 <= place < many:
            raise IndexError(f"{i} is not a place in a dataset of {many}")
        for item in Run(program, order, epoch, start.only(place)).items():
            return item
        raise IndexError(f"the sample at {i} was skipped")

    def iter_batches(
        self,
        batch_size: int = 256,
        format: Literal["numpy", "torch", "arrow", "pandas"] = "numpy",
        drop_last: bool = False,
    ) -> Iterator[Any]:
        """The samples of the next epoch in batches: dicts of columns, a ``pyarrow.Table`` or ``pandas.DataFrame`` each.

        Of tables, batches are cut without making rows; arrays of numbers are then views that cannot be written to.

        Raises:
            PlanError: an unknown format.
            MissingExtra: it needs a package that is not installed.
        """
        check_choice("format", format, ("numpy", "torch", "arrow", "pandas"))
        if format == "torch":
            return self.iter_torch_batches(batch_size, drop_last=drop_last)
        join = parquet.ArrowBatch(format) if format in ("arrow", "pandas") else None
        return self._pass(self.batched(batch_size, drop_last, join).plan)

    def to_arrow(self) -> pa.Table:
        """All samples as a ``pyarrow.Table`` in memory.

        Raises:
            DataError: they do not have the same fields, or values that do not go together.
            MissingExtra: pyarrow is not installed.
        """
        return parquet.joined_table(self._all(self.plan).runs())

    def to_pandas(self) -> pd.DataFrame:
        """All samples as a ``pandas.DataFrame`` in memory; raises what ``to_arrow`` raises."""
        return parquet.frame(self.to_arrow())

    def to_polars(self) -> Any:
        """All samples as a ``polars.DataFrame`` in memory; it raises what ``to_arrow`` raises."""
        return parquet.polars_frame(self.to_arrow())

    def iter_torch_batches(
        self,
        batch_size: int = 64,
        device: str | torch.device | None = None,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int = 1,
        drop_last: bool = False,
    ) -> Iterator[Any]:
        """The samples of the next epoch in batches of tensors; what is neither number nor array stays a list.

        Args:
            batch_size: Samples a batch.
            device: Where tensors go; they are moved there by a thread, ``prefetch`` batches ahead.
            dtypes: The type of every tensor, or of those of some fields.
            collate_fn: Joins a list of samples to a batch, in place of columns.
            pin_memory: Put tensors where a GPU can fetch them by itself.
            prefetch: Batches to have ready on the device.
            drop_last: Leave out a last batch that is not whole.

        Raises:
            PlanError: an argument out of range.
            MissingExtra: torch is not installed.
        """
        from penstock.feed.torch import Tensors, ahead

        check_count("prefetch", prefetch)
        tensors = Tensors(device, dtypes, pin_memory)
        batches = self._pass(self.batched(batch_size, drop_last, collate_fn).plan)
        return ahead(batches, tensors, prefetch if device is not None else 0)

    def to_torch(self) -> TorchDataset:
        """A ``torch.utils.data.IterableDataset`` of this, with a state and ``set_epoch``.

        Raises:
            MissingExtra: torch is not installed.
        """
        from penstock.feed.torch import TorchDataset

        return TorchDataset(self.plan, self._length)

    def loader(
        self,
        rank: int | None = None,
        world: int | None = None,
        epoch: int = 0,
        cut: Literal["range", "step"] = "range",
        uneven: Literal["keep", "drop", "pad"] | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> Loader:
        """Feed one rank, with a state that can be saved after any batch and taken up under any number of ranks.

        Rank and world come from torch.distributed or the environment when not given. ``uneven`` is ``"drop"`` when
        there is more than one rank, else ``"keep"``; where a stage changes the count, the ranks of a process group
        agree on the end of the epoch, one integer a batch. ``ledger`` is a local folder where the loader writes down
        which samples went into which step; ``ps.ledger`` reads it.

        Raises:
            PlanError: the dataset is cut already and another rank is given, or the plan cannot be cut.
        """
        epoch = self.plan.epoch or check_count("epoch", epoch)
        if self.plan.cut is not None:
            if rank is not None or world is not None:
                raise PlanError("the dataset is already cut by shard(); give rank and world in one place")
            return Loader(self.plan, self.plan.cut, epoch, ledger=ledger)
        within = rank is not None and this_worker() is not None
        rank, world = find_rank(rank, world)
        share = Cut(rank, world, cut, uneven or ("drop" if world > 1 else "keep"), within)
        return Loader(self.plan, share, epoch, ledger=ledger)

    def to_huggingface(
        self, path: str | os.PathLike[str] | None = None, *, features: Mapping[str, Any] | None = None
    ) -> Any:
        """A ``datasets.Dataset`` of the samples, with their features: in memory, or in an Arrow file at ``path``.

        Features that came with the source are kept where the values still are what they say; others are told by the
        first thousand samples, unless ``features`` says what each field is.

        Raises:
            DataError: a sample is not what the features say.
            MissingExtra: the package datasets is not installed.
            PlanError: ``features`` are none.
            StorageError: the file cannot be written.
        """
        given = None if features is None else {name: feature_of(feature) for name, feature in features.items()}
        from penstock.formats.tables.huggingface import collected

        return collected(self._peek(), self._program().features(), given, path)

    def to_ray(self, blocks: int | None = None) -> Any:
        """A ``ray.data.Dataset`` of the coming epoch, in order: a column for each field, arrays as tensors.

        Its read tasks run this plan on stretches of the order: a shard each, or a range of at least 256 samples of
        one; ``blocks`` says how many. A class given to ``map_batches`` is constructed once in every process that reads.
        Where a stage sees several samples there is one task. An ``on_error`` limit holds for each task.

        Raises:
            MissingExtra: ray is not installed.
            PlanError: the dataset has no end.
        """
        from penstock.feed.to_ray import to_ray

        return to_ray(self.plan, self._coming(), blocks)

    def stats(self) -> Stats:
        """What the last run of this dataset did, or does: rates, where the time goes, and the bottleneck in words."""
        return self._meters.stats() if isinstance(self._meters, Loader) else snapshot(self._meters)

    def explain(self) -> str:
        """The plan as it runs: what is fused, where, and with how many workers."""
        return explained(Program(self.plan))


@dataclass(frozen=True, slots=True)
class _Column:
    """The value of a sample's field."""

    field: str

    def __call__(self, sample: Any) -> Any:
        if not isinstance(sample, dict) or self.field not in sample:
            kind = "sample" if isinstance(sample, dict) else type(sample).__name__
            raise DataError(f"ds[{self.field!r}]: a {kind} has no such field")
        return sample[self.field]


def _unpickled(plan: bytes, epochs: Epochs | None = None) -> Dataset:
    dataset = Dataset(pickle.loads(plan))
    dataset._epochs = epochs or dataset._epochs
    return dataset
