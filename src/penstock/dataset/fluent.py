"""The dataset itself: a value whose methods each add one stage, or hand its plan to an engine."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from operator import index
from typing import Any, Literal, SupportsIndex

import cloudpickle

from penstock.codecs import Limits
from penstock.codecs.stage import Decode, FieldSpec, field_specs
from penstock.dataset.words import brief, explained, type_of
from penstock.engines import Meters, Program, Run, Stats, engine_options, snapshot
from penstock.errors import PlanError
from penstock.feed import Loader, find_rank
from penstock.packing import Packed, write_shards
from penstock.plan import (
    Batched,
    BatchedBy,
    ByObject,
    Choose,
    Cut,
    Drop,
    FilterFn,
    FlatMapFn,
    LateShuffle,
    MapBatches,
    MapFn,
    MapTuple,
    Mix,
    OnError,
    OrderStage,
    Plan,
    Rename,
    Repeat,
    Resources,
    Select,
    Shuffle,
    Slice,
    SplitBy,
    Stage,
    StreamLimit,
    StreamSkip,
    ToTuple,
    Unbatched,
    Union,
    Zip,
    check_branch,
    check_choice,
    check_count,
    relaxed,
)
from penstock.storage import Storage

Workers = int | tuple[int, int] | None
On = Literal["threads", "processes"]


class Dataset:
    """A description of samples and what is done to them; immutable, every method returns a new one.

    Iterating starts the engine: every ``for`` is the next epoch.
    """

    __slots__ = ("__weakref__", "_epochs", "_meters", "_ready", "plan")

    def __init__(self, plan: Plan) -> None:
        """Made by the functions that read, and by a dataset's methods."""
        self.plan = plan
        self._epochs = 0
        self._ready: Program | None = None
        self._meters = Meters()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dataset) and self.plan == other.plan

    def __hash__(self) -> int:
        return hash(self.plan)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (cloudpickle.dumps(self.plan),)  # which takes lambdas and what stands in a main module

    def __repr__(self) -> str:
        return f"<Dataset\n{self.plan.describe('  ')}\n>"

    # Stages on items

    def decode(
        self,
        spec: str | None = None,
        *,
        fields: Mapping[str, FieldSpec] | None = None,
        trust_pickle: bool = False,
        limits: Limits | None = None,
        workers: Workers = None,
        on: On = "threads",
        cpus: float | None = None,
        gpus: float = 0,
        retries: int = 0,
        timeout_s: float | None = None,
        **by_field: FieldSpec,
    ) -> Dataset:
        """Turn bytes into values: named fields as given, all others by ``spec`` and extension.

        Args:
            spec: How images are decoded: ``"rgb8"``, ``"pil"``, ``"torch"``, ...; ``None``: as stored.
            fields: Decoders by field, for names that are no Python words.
            trust_pickle: Decode pickle too, which can run code.
            limits: What one field may unpack to.
            workers: Workers, or (min, max).
            on: Where they run.
            cpus: Cores for each.
            gpus: Devices for each.
            retries: How often a failing sample is tried again.
            timeout_s: How long one sample may take.
            by_field: A spec, the name of a codec, or a function of the bytes (and ``rng``).

        Raises:
            PlanError: a spec that does not exist, or an argument out of range.
        """
        given = field_specs(fields, by_field)
        resources = Resources(workers, on, cpus, gpus, retries, timeout_s)
        return self._then(Decode(spec, given, trust_pickle, limits or Limits(), resources=resources))

    def map(self, fn: Callable[..., Any], **resources: Any) -> Dataset:
        """Replace every sample by ``fn(sample)``; a parameter named ``rng`` gets the sample's own generator.

        Takes ``workers=``, ``on=``, ``cpus=``, ``gpus=``, ``retries=``, ``timeout_s=``.

        Raises:
            PlanError: ``fn`` is no function, or an argument is out of range.
        """
        return self._then(MapFn(fn, resources=_resources("map", resources)))

    def filter(self, fn: Callable[..., Any], **resources: Any) -> Dataset:
        """Keep the samples for which ``fn(sample)`` is true. Takes what ``map`` takes."""
        return self._then(FilterFn(fn, resources=_resources("filter", resources)))

    def flat_map(self, fn: Callable[..., Iterable[Any]], **resources: Any) -> Dataset:
        """Replace every sample by all that ``fn(sample)`` gives. Takes what ``map`` takes."""
        return self._then(FlatMapFn(fn, resources=_resources("flat_map", resources)))

    def map_batches(
        self,
        fn: Callable[..., Any],
        batch_size: int | None = None,
        *,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        **resources: Any,
    ) -> Dataset:
        """Call ``fn`` on columns of up to ``batch_size`` neighbours, for speed; row i answers row i.

        A class is constructed once per worker with ``fn_args`` and ``fn_kwargs``. For real batches use
        ``batched(n).map(fn)``. Takes what ``map`` takes.

        Raises:
            PlanError: ``fn`` is no function or class, or an argument is out of range.
        """
        args = ByObject(tuple(fn_args)) if fn_args else None
        kwargs = ByObject(dict(fn_kwargs)) if fn_kwargs else None
        given = _resources("map_batches", resources)
        return self._then(MapBatches(fn, batch_size, args, kwargs, resources=given))

    def select(self, *names: str) -> Dataset:
        """Keep these fields (and those named ``__like_this__``)."""
        return self._then(Select(names))

    def drop(self, *names: str) -> Dataset:
        """Leave these fields out."""
        return self._then(Drop(names))

    def rename(self, **names: str) -> Dataset:
        """Give fields new names: ``rename(image="jpg;png")`` takes the first that is there."""
        return self._then(Rename(tuple(names.items())))

    def to_tuple(self, *names: str) -> Dataset:
        """Turn samples into tuples of these fields; ``"jpg;png"`` takes the first that is there."""
        split = tuple(part for name in names for part in (name.split() if isinstance(name, str) else [name]))
        return self._then(ToTuple(split))

    def map_tuple(self, *fns: Callable[..., Any] | None) -> Dataset:
        """Apply a function to each place of the tuple; ``None`` leaves it as it is."""
        return self._then(MapTuple(fns, resources=Resources()))

    def batched(
        self, batch_size: int, drop_last: bool = False, collate: Callable[[list[Any]], Any] | None = None
    ) -> Dataset:
        """Join neighbours into batches of columns."""
        return self._then(Batched(batch_size, drop_last, collate))

    def batched_by(
        self,
        size_fn: Callable[[Any], float],
        max_size: float,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Dataset:
        """Join neighbours into batches whose sizes add up to at most ``max_size``."""
        return self._then(BatchedBy(size_fn, max_size, collate))

    def unbatched(self) -> Dataset:
        """Take batches apart again."""
        return self._then(Unbatched())

    # Stages on the order

    def shuffle(
        self, window: int | None = None, *, shards: int = 16, all: bool = False, seed: int | None = None
    ) -> Dataset:
        """Put samples in another order every epoch.

        ``shards`` shards at a time are read front to back and permuted in windows of ``window`` samples; ``all``
        permutes everything. After ``flat_map``, ``unbatched`` or ``batched`` it permutes windows of that stream.

        Raises:
            PlanError: an argument out of range.
        """
        if window is not None:
            check_count("window", window, least=1)
        check_count("shards", shards, least=1)
        ds = self if seed is None else self.seed(seed)
        if self.plan.commutes and not any(stage.name == "flat_map" for stage in self.plan.body):
            everything = all or (window is None and ds.plan.source.random_access)
            return ds._then(Shuffle(window, shards, everything))
        if all:
            raise PlanError(f"shuffle(all=True) cannot stand after {self._late()}; put it before, or give a window")
        return ds._then(LateShuffle(window or 1000))

    def _late(self) -> str:
        late = [s for s in self.plan.body if s.scope.value != "each" or s.name == "flat_map"]
        return late[0].describe()

    def limit(self, n: int) -> Dataset:
        """Take the first ``n``: of the order while every sample still counts, else of the stream."""
        check_count("limit", n)
        if self.plan.counted:
            return self._then(Slice(0, n, self.plan.cut is not None))
        return self._stream(StreamLimit(n))

    def skip(self, n: int) -> Dataset:
        """Leave out the first ``n``: of the order while every sample still counts, else of the stream."""
        check_count("skip", n)
        if self.plan.counted:
            return self._then(Slice(n, None, self.plan.cut is not None))
        return self._stream(StreamSkip(n))

    def _stream(self, stage: Stage) -> Dataset:
        if self.plan.cut is not None and self.plan.cut.world > 1:
            raise PlanError(f"{stage.describe()} counts the whole stream, which is cut for {self.plan.cut.world} ranks")
        return self._then(stage)

    def repeat(self, n: int | None = None) -> Dataset:
        """Go through everything ``n`` times in one epoch, each pass in an order of its own; ``None``: without end."""
        if n is not None:
            check_count("repeat", n, least=1)
        if not self.plan.commutes:
            raise PlanError("repeat() cannot stand after a stage that joins samples; put it before")
        return self._then(Repeat(n))

    def union(self, *others: Dataset) -> Dataset:
        """This one, then the others."""
        return self._combined(Union, "union", others)

    def zip(self, other: Dataset, strict: bool = True, *, suffix: str | None = None) -> Dataset:
        """Pair samples by position; fields merge, ``suffix`` renames the right one's where both have them."""
        return self._combined(Zip, "zip", (other,), strict=strict, suffix=suffix)

    def _combined(self, kind: Any, name: str, others: Sequence[Dataset], **how: Any) -> Dataset:
        for ds in (self, *others):
            if not isinstance(ds, Dataset):
                raise PlanError(f"{name} needs a Dataset, not {type(ds).__name__}")
            check_branch(ds.plan, name)
        plan = self.plan
        branches = tuple(branch(ds.plan) for ds in (self, *others))
        return Dataset(Plan(kind(branches, **how), (), plan.seed, plan.epoch, None, plan.errors, plan.engine))

    def train_test_split(
        self, test_size: float = 0.2, shuffle: bool = True, seed: int | None = None, by: str | None = None
    ) -> tuple[Dataset, Dataset]:
        """Part the samples in (train, test), the same way in every epoch and run.

        Each shard gives its share, chosen by a hash, so that adding shards moves no sample; ``by`` hashes a field
        instead, so that samples with the same value stay together; ``shuffle=False`` takes the end of the order.

        Raises:
            PlanError: ``test_size`` is no share, or a stage before joins samples.
        """
        if isinstance(test_size, bool) or not isinstance(test_size, float) or not 0 < test_size < 1:
            raise PlanError(f"test_size={test_size!r}: give a share between 0 and 1")
        if not self.plan.commutes:
            raise PlanError("train_test_split() cannot stand after a stage that joins samples; put it before")
        if by is not None:
            sides = [SplitBy(by, test_size, seed or 0, side) for side in (False, True)]
            return self._then(sides[0]), self._then(sides[1])
        train, test = (self._choose(Choose(test_size, seed or 0, side, not shuffle)) for side in (False, True))
        return train, test

    def _choose(self, choice: Choose) -> Dataset:
        """Choose below every shuffle and repeat, so that the two sides never trade samples between epochs."""
        plan = self.plan
        after = len(plan.stages)
        while after and not isinstance(plan.stages[after - 1], Slice | Choose):
            after -= 1
        if isinstance(plan.source, Mix | Union) and not after:
            branches = tuple(Dataset(branch)._choose(choice).plan for branch in plan.source.branches)
            return Dataset(replace(plan, source=replace(plan.source, branches=branches)))
        return Dataset(replace(plan, stages=(*plan.stages[:after], choice, *plan.stages[after:])))

    def shard(
        self,
        rank: int,
        world: int,
        cut: Literal["range", "step"] = "range",
        uneven: Literal["keep", "drop", "pad"] = "keep",
    ) -> Dataset:
        """Take one rank's share of the order, wherever this stands in the chain.

        Raises:
            PlanError: it is cut already, holds a stage that needs the whole stream, or the numbers do not fit.
        """
        return Dataset(self.plan.shard(Cut(rank, world, cut, uneven)))

    def split(self, n: int, equal: bool = False) -> list[Dataset]:
        """Cut in ``n`` disjoint parts that can be pickled; ``equal`` leaves out at most n-1 samples."""
        check_count("split", n, least=1)
        return [self.shard(rank, n, uneven="drop" if equal else "keep") for rank in range(n)]

    streaming_split = split

    def seed(self, n: int) -> Dataset:
        """Set the run's seed: all order and randomness follow from it."""
        if isinstance(n, bool) or not isinstance(n, int):
            raise PlanError(f"seed={n!r}: give a whole number")
        return Dataset(replace(self.plan, seed=n))

    def epoch(self, k: int) -> Dataset:
        """Fix the epoch: every iteration is epoch ``k``."""
        check_count("epoch", k)
        return Dataset(replace(self.plan, epoch=k))

    def on_error(self, action: Literal["raise", "skip"], limit: float | None = None) -> Dataset:
        """Say what happens to a sample that fails, anywhere in the plan.

        ``"skip"`` leaves it out and counts it; more than ``limit`` (a number, or a share below 1) end the run.
        """
        return Dataset(replace(self.plan, errors=OnError(action, limit)))

    def on(self, engine: str, **options: Any) -> Dataset:
        """Choose the engine: ``"local"`` or ``"serial"``.

        The local engine takes ``cpus=`` (cores it may use), ``memory=`` (bytes under way), ``ordered=False`` (whatever
        is finished comes first) and ``devices=["cuda:0"]`` (for stages with ``gpus=``); both take ``report=True`` (a
        live table) and ``observer=`` (a function that is told of every ``Event``).

        Raises:
            PlanError: there is no such engine or option.
        """
        return Dataset(replace(self.plan, engine=engine_options(engine, options)))

    def _then(self, stage: Stage | OrderStage) -> Dataset:
        return Dataset(self.plan.then(stage))

    # Consuming

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


def _resources(stage: str, given: dict[str, Any]) -> Resources:
    known = [field.name for field in fields(Resources)]
    if unknown := [name for name in given if name not in known]:
        raise PlanError(f"{stage} has no argument {', '.join(unknown)}; it takes {', '.join(known)}")
    return Resources(**given)


def _unpickled(plan: bytes) -> Dataset:
    return Dataset(pickle.loads(plan))


def branch(plan: Plan) -> Plan:
    """A plan as a branch: engine and error policy are those of the whole."""
    clean = Plan(plan.source)
    return replace(plan, engine=clean.engine, errors=clean.errors, epoch=None)
