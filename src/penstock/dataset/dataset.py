"""The ``Dataset`` class: a value that describes samples and their stages; an engine runs its plan."""

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
from typing import TYPE_CHECKING, Any, Literal, Never, SupportsIndex, overload

import cloudpickle

from penstock import relations
from penstock.codecs.features import feature_of
from penstock.dataset.display import SHOWN_SAMPLES, Explanation, Schema, dataset_html, explain_plan, short_repr
from penstock.dataset.write_methods import WriteMethods
from penstock.engines import Meters, Program, Run, Stats, snapshot, start_run
from penstock.errors import DataError, PenstockError, PlanError, shows_user_frames
from penstock.feed import (
    BatchFormat,
    Epochs,
    Loader,
    TorchStream,
    WorkerShare,
    find_rank,
    map_ahead,
    this_worker,
    torch_class,
    warn_uncut,
)
from penstock.formats import tables
from penstock.formats.items import ItemsSource
from penstock.plan import ByObject, Columns, Context, Cut, Map, Plan, check_choice, check_count, unshuffled
from penstock.plan.peer_names import check_arguments

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    import ray.data
    import torch

    from penstock.feed.torch import TorchDataset


class Dataset(WriteMethods):
    """A description of samples and the stages that process them; immutable, every method returns a new dataset.

    Iterating starts the engine; every ``for`` loop is the next epoch.
    """

    __slots__ = ("__weakref__", "_epochs", "_meters", "_opened", "_opened_stamp")

    def __init__(self, plan: Plan) -> None:
        """Wrap a plan. Use ``read_tar``, ``from_items`` and the other functions to create a dataset."""
        super().__init__(plan)
        self._epochs = Epochs()
        self._opened: Program | None = None
        self._opened_stamp: object = None
        self._meters: Meters | Loader = Meters(begun=0.0, ended=0.0)

    def __reduce__(self) -> tuple[Any, ...]:
        plan = cloudpickle.dumps(self.plan)  # cloudpickle supports lambdas and functions of the main module
        if get_spawning_popen() is None:
            return _unpickled, (plan,)
        warn_uncut(self.plan)  # the new process does not know its rank
        return _unpickled, (plan, self._epochs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """This class; to torch, also a subclass of its ``IterableDataset``."""
        return torch_class(type(self), self._epochs)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the samples (or batches) of the next epoch; in a DataLoader worker, over that worker's share."""
        return self._epoch_items(self.plan)

    def _epoch_items(self, plan: Plan) -> Iterator[Any]:
        """Iterate over the next epoch of ``plan``: this dataset's plan, or one that adds stages to it."""
        warn_uncut(plan)
        worker = this_worker(plan.cut)
        if any(leaf.streams for leaf in plan.leaves()):
            return iter(()) if worker is not None and worker.id else self._track(Dataset(plan)._run(0)).items()
        if worker is not None or self._epochs.shared:
            return TorchStream(plan, self._epochs, worker, partial(self._worker_loader, plan))
        epoch = self._epochs.next() if plan.epoch is None else plan.epoch
        return self._track(Dataset(plan)._run(epoch)).items()

    def _worker_loader(self, plan: Plan, epoch: int, share: WorkerShare | None) -> Loader:
        self._meters = loader = Loader(plan, plan.cut or Cut(0, 1), epoch, share=share, one_epoch=True)
        return loader

    def _run(self, epoch: int) -> Run:
        return self._track(start_run(self.plan, epoch))

    def _full_run(self, plan: Plan) -> Run:
        """Start a run of the upcoming epoch that will be consumed to its end.

        Raises:
            PlanError: The dataset has no end.
        """
        program = Program(plan)
        program.check_finite()
        return self._track(start_run(plan, self._upcoming_epoch(), program))

    def _track(self, run: Run) -> Run:
        self._meters = run.meters
        return run

    def _peek(self) -> Iterator[Any]:
        """Iterate over the upcoming epoch without counting it as an iteration."""
        return self._run(self._upcoming_epoch()).items()

    def _upcoming_epoch(self) -> int:
        return self._epochs.peek() if self.plan.epoch is None else self.plan.epoch

    def _program(self) -> Program:
        """Return the program of the plan for queries that need no run; it is opened again if its shards change."""
        return self._open(self.plan)

    def _open(self, plan: Plan) -> Program:
        if self._opened is None or self._opened.plan != plan or self._opened.stamp() != self._opened_stamp:
            self._opened = Program(plan)
            self._opened_stamp = self._opened.stamp()
        return self._opened

    @shows_user_frames
    def take(self, n: int = 20) -> list[Any]:
        """Return the first ``n`` samples."""
        n = check_count("take", n)
        return list(islice(self._peek(), n)) if n else []

    @shows_user_frames
    def take_all(self) -> list[Any]:
        """Return all samples, in memory.

        Raises:
            PlanError: The dataset has no end.
        """
        return list(self._full_run(self.plan).items())

    @shows_user_frames
    def take_batch(self, n: int = 20) -> Any:
        """Return the first ``n`` samples as one batch.

        Raises:
            PlanError: The dataset is empty.
        """
        for batch in self.batched(n)._run(self._upcoming_epoch()).items():
            return batch
        raise PlanError("the dataset is empty")

    @shows_user_frames
    def first(self) -> Any:
        """Return the first sample.

        Raises:
            PlanError: The dataset is empty.
        """
        if found := self.take(1):
            return found[0]
        raise PlanError("the dataset is empty")

    @shows_user_frames
    def show(self, n: int = 20) -> None:
        """Print the first ``n`` samples, shortened."""
        for sample in self.take(n):
            sys.stdout.write(f"{short_repr(sample)}\n")

    def __len__(self) -> int:
        """Return the number of samples (or batches), where it is known without running.

        Raises:
            TypeError: The number is not known without running; use ``count()``.
        """
        length = self._length()
        if length is None:
            raise TypeError("the length is not known without running the dataset; use count()")
        return length

    def _length(self) -> int | None:
        program = self._relisted()
        return None if program.stream is not None else program.length(self.plan.cut)

    def _relisted(self) -> Program:
        """Return a program whose shards are listed now, as for a run; a remote one keeps known counts."""
        known = self._opened if self._opened is not None and self._opened.plan == self.plan else None
        if known is not None and known.stream is not None:
            return known
        program = Program(self.plan)
        if (
            known is not None
            and program.stream is None
            and program.remote
            and known.shard_names() == program.shard_names()
        ):
            return known
        self._opened, self._opened_stamp = program, program.stamp()
        return program

    def __bool__(self) -> bool:
        return True

    @shows_user_frames
    def count(self) -> int:
        """Count the samples (or batches), and run the dataset only if necessary.

        Raises:
            PlanError: The dataset has no end.
        """
        length = self._length() if self.plan.errors.action == "raise" else None
        if length is None:
            self._program().check_finite()
        return sum(map(len, self._run(self._upcoming_epoch()).runs())) if length is None else length

    @shows_user_frames
    def schema(self) -> dict[str, str]:
        """Return the fields of the first sample and their types.

        Raises:
            PlanError: The dataset is empty.
        """
        sample = self.first()
        if isinstance(sample, tuple):
            sample = {str(i): value for i, value in enumerate(sample)}
        if not isinstance(sample, dict):
            sample = {"item": sample}
        return Schema({name: relations.type_of(value) for name, value in sample.items()})

    @shows_user_frames
    def unique(self, field: str) -> list[Any]:
        """Return the distinct values of a field, in the order of their first occurrence.

        Raises:
            DataError: A sample does not have the field.
        """
        plan = relations.select_fields(self.plan, "unique", field)
        return relations.unique(self._full_run(plan).runs(), field, plan)

    @shows_user_frames
    def materialize(self, folder: str | os.PathLike[str] | None = None) -> Dataset:
        """Run the upcoming epoch once and return its samples as a dataset, in memory or in Parquet files.

        ``folder`` is a new folder for the files. Columns stay columns.

        Raises:
            PlanError: The folder already holds Parquet files, or the dataset has no end.
            DataError: A sample cannot be stored in a table.
            StorageError: The folder cannot be written.
        """
        if folder is not None:
            written = Dataset(replace(self.plan, epoch=self._upcoming_epoch())).write_parquet(folder)
            if not written.samples:
                return self._read_back(ItemsSource(ByObject([])))
            return self._read_back(tables.ParquetSource((os.fspath(folder),)))
        items = relations.gathered([run for run in self._full_run(self.plan).runs() if len(run)])
        if isinstance(items, Columns):
            return self._read_back(tables.TableSource(ByObject(tables.table_from(items))))
        return self._read_back(ItemsSource(ByObject(items)))

    def _read_back(self, source: Any) -> Dataset:
        """Return a dataset of a source, with the seed and engine of this one."""
        return Dataset(Plan(source, (), self.plan.seed, engine=self.plan.engine))

    @overload
    def __getitem__(self, i: str) -> Dataset: ...
    @overload
    def __getitem__(self, i: SupportsIndex) -> Any: ...
    def __getitem__(self, i: SupportsIndex | str) -> Any:
        """Return the sample at position ``i`` of the unshuffled order, or a dataset of the values of a field.

        Raises:
            IndexError: The position does not exist, or its sample was skipped.
            TypeError: ``i`` is neither an integer nor a name, a stage changes the count, or the counts are not known.
        """
        if isinstance(i, str):
            return Dataset(relations.select_fields(self.plan, f"ds[{i!r}]", i).then(_FieldValue(i)))
        try:
            wanted = index(i)
        except TypeError:
            raise TypeError(f"ds[i] needs an integer or the name of a field, not {type(i).__name__}") from None
        plan = unshuffled(self.plan)
        if not plan.keeps_count:
            raise TypeError("ds[i] needs stages that keep the count; filter, flat_map and batched do not")
        program = self._open(plan)
        epoch = self.plan.epoch or 0
        order = program.order(epoch)
        if order.size < 0:
            raise TypeError("ds[i] needs the counts of the shards, which are not known; run `penstock index`")
        start = program.start(order, plan.cut)
        length = sum(max(0, -(-(p[1] - p[0]) // p[2])) for p in start.left)
        if wanted < 0:
            program.check_finite()
        position = wanted + length if wanted < 0 else wanted
        if not 0 <= position < length:
            raise IndexError(f"{i} is not a position in a dataset of {length} samples")
        for item in Run(program, order, epoch, start.only(position)).items():
            return item
        raise IndexError(f"the sample at {i} was skipped")

    def iter_batches(
        self,
        batch_size: int = 256,
        format: Literal["numpy", "torch", "arrow", "pandas"] = "numpy",
        drop_last: bool = False,
    ) -> Iterator[Any]:
        """Iterate over the next epoch in batches: dicts of columns, ``pyarrow.Table`` or ``pandas.DataFrame``.

        Batches of tables are slices of the columns, not built from rows; their numeric arrays are read-only views.

        Raises:
            PlanError: The format is unknown.
            MissingExtra: The format needs a package that is not installed.
        """
        check_choice("format", format, ("numpy", "torch", "arrow", "pandas"))
        if format == "torch":
            return self.iter_torch_batches(batch_size, drop_last=drop_last)
        join = tables.ArrowBatch(format) if format in ("arrow", "pandas") else None
        return self._epoch_items(self.batched(batch_size, drop_last, join).plan)

    @shows_user_frames
    def to_arrow(self) -> pa.Table:
        """Return all samples as a ``pyarrow.Table`` in memory.

        Raises:
            DataError: Samples differ in their fields, or the values of a field do not fit one type.
            MissingExtra: pyarrow is not installed.
        """
        return tables.joined_table(self._full_run(self.plan).runs())

    @shows_user_frames
    def to_pandas(self) -> pd.DataFrame:
        """Return all samples as a ``pandas.DataFrame`` in memory; raises what ``to_arrow`` raises."""
        return tables.pandas_frame(self.to_arrow())

    @shows_user_frames
    def to_polars(self) -> pl.DataFrame:
        """Return all samples as a ``polars.DataFrame`` in memory; raises what ``to_arrow`` raises."""
        frame: pl.DataFrame = tables.polars_frame(self.to_arrow())
        return frame

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
        """Iterate over the next epoch in batches of tensors; values that are neither numbers nor arrays stay lists.

        Args:
            batch_size: Samples per batch.
            device: Where the tensors go; a thread moves them there, ``prefetch`` batches ahead.
            dtypes: The type of every tensor, or a type by field.
            collate_fn: Joins a list of samples into a batch; by default a batch is a dict of columns.
            pin_memory: Put tensors into pinned memory, from which copies to a GPU are asynchronous.
            prefetch: Batches to keep ready on the device.
            drop_last: Drop the last batch if it is short.

        Raises:
            PlanError: An argument is out of range.
            MissingExtra: torch is not installed.
        """
        convert = BatchFormat("torch", device, dtypes, pin_memory, prefetch)
        batches = self._epoch_items(self.batched(batch_size, drop_last, collate_fn).plan)
        return map_ahead(batches, convert, convert.ahead)

    def to_torch(self) -> TorchDataset:
        """Return the dataset as a ``torch.utils.data.IterableDataset`` with a state and ``set_epoch``.

        Raises:
            MissingExtra: torch is not installed.
        """
        from penstock.feed.torch import TorchDataset

        return TorchDataset(self.plan, self._length)

    def loader(
        self,
        rank: int | None = None,
        world: int | None = None,
        epoch: int | None = None,
        cut: Literal["range", "step"] = "range",
        uneven: Literal["keep", "drop", "pad"] | None = None,
        ledger: str | os.PathLike[str] | None = None,
        format: Literal["numpy", "torch", "jax"] | None = None,
        device: Any = None,
        dtypes: Any = None,
        pin_memory: bool | None = None,
        prefetch: int = 2,
        **unknown: Never,
    ) -> Loader:
        """Return a loader for one rank; its state can be saved after any batch and restored under any number of ranks.

        Args:
            rank: The rank of this process; by default that of torch.distributed, Ray Train or the environment.
            world: The number of ranks; by default found like ``rank``.
            epoch: The first epoch, by default 0; ``ds.epoch(k).loader()`` is epoch k every time.
            cut: ``"range"`` gives each rank a contiguous run of the order, ``"step"`` every world-th position.
            uneven: What to do if the ranks would get different numbers of samples: ``"drop"`` (the default with several
                ranks), ``"pad"`` or ``"keep"``. If a stage changes the count, the ranks of a process group agree on
                the end of the epoch by exchanging one integer per batch.
            ledger: A local folder in which the loader records the samples of every step; ``ps.ledger`` reads it.
            format: The library whose arrays are delivered: numbers and arrays become tensors of torch, or arrays of
                JAX or numpy; by default, items are delivered as the stages return them.
            device: Where they are put, by a thread that works ahead; states, ranks and the ledger follow what is
                delivered.
            dtypes: The type of every array, or a type by field.
            pin_memory: Whether torch copies to the device from pinned memory; by default, if it is a GPU.
            prefetch: Items to keep ready on the device.

        Raises:
            MissingExtra: The library of ``format`` is not installed.
            PlanError: The dataset is already cut and another cut is given, the plan cannot be cut, ``ds.epoch`` fixes
                another epoch, an option does not fit the format, or an argument is unknown.
        """
        check_arguments("loader", unknown, ("rank", "world", "epoch", "cut", "uneven", "ledger", "format", "device"))
        if self.plan.epoch is not None and epoch not in (None, self.plan.epoch):
            raise PlanError(f"loader(epoch={epoch}): ds.epoch({self.plan.epoch}) fixes the epoch; give it in one place")
        first = check_count("epoch", epoch or 0) if self.plan.epoch is None else self.plan.epoch
        if format is None and not (device is None and dtypes is None and pin_memory is None):
            raise PlanError("device=, dtypes= and pin_memory= need a format, such as format='torch'")
        options: dict[str, Any] = {"ledger": ledger}
        options["format"] = None if format is None else BatchFormat(format, device, dtypes, pin_memory, prefetch)
        if self.plan.cut is not None:
            if rank is not None or world is not None:
                raise PlanError("the dataset is already cut by shard(); give rank and world in one place")
            if uneven not in (None, self.plan.cut.uneven) or cut not in ("range", self.plan.cut.kind):
                problem = "the dataset is already cut by shard(); leave out shard(), or these arguments"
                raise PlanError(f"loader(cut={cut!r}, uneven={uneven!r}): {problem}")
            return Loader(self.plan, self.plan.cut, first, **options)
        in_worker = rank is not None and this_worker() is not None
        rank, world = find_rank(rank, world)
        share = Cut(rank, world, cut, uneven or ("drop" if world > 1 else "keep"), in_worker)
        return Loader(self.plan, share, first, **options)

    def to_huggingface(
        self, path: str | os.PathLike[str] | None = None, *, features: Mapping[str, Any] | None = None
    ) -> datasets.Dataset:
        """Return the samples as a ``datasets.Dataset`` with features: in memory, or in an Arrow file at ``path``.

        Features of the source are kept if the values still fit them; the others are inferred from the first thousand
        samples, unless ``features`` gives a feature for each field.

        Raises:
            DataError: A sample does not fit the features.
            MissingExtra: The package datasets is not installed.
            PlanError: ``features`` holds something that is not a feature, or the dataset has no end.
            StorageError: The file cannot be written.
        """
        given = None if features is None else {name: feature_of(feature) for name, feature in features.items()}
        from penstock.formats.tables.huggingface import to_huggingface_dataset

        return to_huggingface_dataset(self._full_run(self.plan).items(), self._program().features(), given, path)

    def to_ray(self, blocks: int | None = None) -> ray.data.Dataset:
        """Return the upcoming epoch as a ``ray.data.Dataset``, in order: a column per field, arrays as tensors.

        Each read task runs this plan on a range of the order: one shard, or at least 256 samples of one; ``blocks``
        sets the number of tasks. A class given to ``map_batches`` is constructed once in every process that reads. If a
        stage processes several samples at once, there is only one task. An ``on_error`` limit applies to each task.

        Raises:
            MissingExtra: ray is not installed.
            PlanError: The dataset has no end.
        """
        from penstock.feed.to_ray import to_ray

        dataset: ray.data.Dataset = to_ray(self.plan, self._upcoming_epoch(), blocks)
        return dataset

    def stats(self) -> Stats:
        """Return statistics of the last or current run: rates, where the time goes, and the bottleneck in words."""
        return self._meters.stats() if isinstance(self._meters, Loader) else snapshot(self._meters)

    def explain(self) -> str:
        """Describe how the plan runs: what is fused, where, and with how many workers."""
        return Explanation(explain_plan(Program(self.plan)))

    def _repr_html_(self) -> str:
        """Return the dataset for a notebook; samples are shown where that takes no large download and no device."""
        try:
            length = self._length()
            shown = all(reader.traits.countable for reader in self._program().readers)
        except PenstockError:
            length, shown = None, False
        shown &= not any(source.computed for source in self.plan.leaves())
        cheap = not any(
            stage.resources and (stage.resources.gpus or stage.resources.on != "threads") for stage in self.plan.body
        )
        plan = self.plan if cheap else replace(self.plan, stages=self.plan.ordering)
        return dataset_html(self.plan, length, partial(Dataset(plan).take, SHOWN_SAMPLES) if shown else None)


@dataclass(frozen=True)
class _FieldValue(Map):
    """Replaces a sample by the value of one of its fields, which may be ``None``."""

    field: str

    def describe(self) -> str:
        return f"[{self.field!r}]"

    def function(self, ctx: Context) -> Callable[..., Any]:
        return self._value

    def _value(self, sample: Any) -> Any:
        if not isinstance(sample, dict) or self.field not in sample:
            kind = "sample" if isinstance(sample, dict) else type(sample).__name__
            raise DataError(f"ds[{self.field!r}]: a {kind} has no such field")
        return sample[self.field]


def _unpickled(plan: bytes, epochs: Epochs | None = None) -> Dataset:
    dataset = Dataset(pickle.loads(plan))
    dataset._epochs = epochs or dataset._epochs
    return dataset
