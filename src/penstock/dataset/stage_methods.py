"""What is done to samples, said in a chain: every method adds one stage to the plan and returns a new value."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import Any, Literal, Self

from penstock.codecs import Limits
from penstock.codecs.stage import Decode, FieldSpec, field_specs
from penstock.dataset import relations
from penstock.engines import engine_options
from penstock.errors import PlanError
from penstock.feed import this_worker
from penstock.plan import (
    Batched,
    BatchedBy,
    ByObject,
    Choose,
    Combination,
    Condition,
    ConditionFilter,
    Cut,
    Drop,
    Exclude,
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
    check_count,
    exclusions,
)

Workers = int | tuple[int, int] | None
On = Literal["threads", "processes"]


class Chain:
    """A plan and the methods that add to it; immutable, every method returns a new one of the same kind."""

    __slots__ = ("plan",)

    plan: Plan

    def __init__(self, plan: Plan) -> None:
        """Made by the functions that read, and by its own methods."""
        object.__setattr__(self, "plan", plan)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "plan":
            raise AttributeError(f"a {type(self).__name__} is not changed: its methods give new ones")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.plan == other.plan

    def __hash__(self) -> int:
        return hash(self.plan)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}\n{self.plan.describe('  ')}\n>"

    def _with(self, plan: Plan) -> Self:
        return type(self)(plan)

    def _then(self, stage: Stage | OrderStage) -> Self:
        return self._with(self.plan.then(stage))

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
    ) -> Self:
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

    def map(self, fn: Callable[..., Any], **resources: Any) -> Self:
        """Replace every sample by ``fn(sample)``; a parameter named ``rng`` gets the sample's own generator.

        Takes ``workers=``, ``on=``, ``cpus=``, ``gpus=``, ``retries=``, ``timeout_s=``.

        Raises:
            PlanError: ``fn`` is no function, or an argument is out of range.
        """
        return self._then(MapFn(fn, resources=resources_of("map", resources)))

    def filter(self, fn: Callable[..., Any] | Condition, **resources: Any) -> Self:
        """Keep the samples for which ``fn(sample)`` is true. Takes what ``map`` takes.

        A condition such as ``ps.col("label") == 3`` is asked of columns where samples are columns, and a Parquet file
        skips the row groups that cannot hold such a row.

        Raises:
            PlanError: it is neither a function nor a condition, or an argument is out of range.
        """
        if isinstance(fn, Condition):
            if resources:
                raise PlanError(f"filter({fn}) calls no function: it has no {', '.join(resources)}")
            return self._then(ConditionFilter(fn))
        return self._then(FilterFn(fn, resources=resources_of("filter", resources)))

    def flat_map(self, fn: Callable[..., Iterable[Any]], **resources: Any) -> Self:
        """Replace every sample by all that ``fn(sample)`` gives. Takes what ``map`` takes."""
        return self._then(FlatMapFn(fn, resources=resources_of("flat_map", resources)))

    def map_batches(
        self,
        fn: Callable[..., Any],
        batch_size: int | None = None,
        *,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        **resources: Any,
    ) -> Self:
        """Call ``fn`` on columns of up to ``batch_size`` neighbours, for speed; row i answers row i.

        A class is constructed once per worker with ``fn_args`` and ``fn_kwargs``. For real batches use
        ``batched(n).map(fn)``. Takes what ``map`` takes.

        Raises:
            PlanError: ``fn`` is no function or class, or an argument is out of range.
        """
        args = ByObject(tuple(fn_args)) if fn_args else None
        kwargs = ByObject(dict(fn_kwargs)) if fn_kwargs else None
        given = resources_of("map_batches", resources)
        return self._then(MapBatches(fn, batch_size, args, kwargs, resources=given))

    def select(self, *names: str) -> Self:
        """Keep these fields (and those named ``__like_this__``)."""
        return self._then(Select(names))

    def drop(self, *names: str) -> Self:
        """Leave these fields out."""
        return self._then(Drop(names))

    def rename(self, **names: str) -> Self:
        """Give fields new names: ``rename(image="jpg;png")`` takes the first that is there."""
        return self._then(Rename(tuple(names.items())))

    def to_tuple(self, *names: str) -> Self:
        """Turn samples into tuples of these fields; ``"jpg;png"`` takes the first that is there."""
        split = tuple(part for name in names for part in (name.split() if isinstance(name, str) else [name]))
        return self._then(ToTuple(split))

    def map_tuple(self, *fns: Callable[..., Any] | None) -> Self:
        """Apply a function to each place of the tuple; ``None`` leaves it as it is."""
        return self._then(MapTuple(fns, resources=Resources()))

    def batched(
        self, batch_size: int, drop_last: bool = False, collate: Callable[[list[Any]], Any] | None = None
    ) -> Self:
        """Join neighbours into batches of columns."""
        return self._then(Batched(batch_size, drop_last, collate))

    def batched_by(
        self,
        size_fn: Callable[[Any], float],
        max_size: float,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Self:
        """Join neighbours into batches whose sizes add up to at most ``max_size``."""
        return self._then(BatchedBy(size_fn, max_size, collate))

    def unbatched(self) -> Self:
        """Take batches apart again."""
        return self._then(Unbatched())

    # Stages on the order

    def shuffle(
        self, window: int | None = None, *, shards: int = 16, all: bool = False, seed: int | None = None
    ) -> Self:
        """Put samples in another order every epoch.

        ``shards`` shards at a time are read front to back and permuted in windows of ``window`` samples; ``all``
        permutes everything. After ``flat_map``, ``unbatched`` or ``batched`` it permutes windows of that stream.

        Raises:
            PlanError: an argument out of range.
        """
        if window is not None:
            window = check_count("window", window, least=1)
        shards = check_count("shards", shards, least=1)
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

    def limit(self, n: int) -> Self:
        """Take the first ``n``: of the order while every sample still counts, else of the stream."""
        n = check_count("limit", n)
        if self.plan.counted:
            return self._then(Slice(0, n, self.plan.cut is not None))
        return self._stream(StreamLimit(n))

    def skip(self, n: int) -> Self:
        """Leave out the first ``n``: of the order while every sample still counts, else of the stream."""
        n = check_count("skip", n)
        if self.plan.counted:
            return self._then(Slice(n, None, self.plan.cut is not None))
        return self._stream(StreamSkip(n))

    def _stream(self, stage: Stage) -> Self:
        if self.plan.cut is not None and self.plan.cut.world > 1:
            raise PlanError(f"{stage.describe()} counts the whole stream, which is cut for {self.plan.cut.world} ranks")
        return self._then(stage)

    def repeat(self, n: int | None = None) -> Self:
        """Go through everything ``n`` times in one epoch, each pass in an order of its own; ``None``: without end."""
        if n is not None:
            n = check_count("repeat", n, least=1)
        if not self.plan.commutes:
            raise PlanError("repeat() cannot stand after a stage that joins samples; put it before")
        return self._then(Repeat(n))

    def union(self, *others: Chain) -> Self:
        """This one, then the others."""
        return self._combined(Union, "union", others)

    def zip(self, other: Chain, strict: bool = True, *, suffix: str | None = None) -> Self:
        """Pair samples by position; fields merge, ``suffix`` renames the right one's where both have them."""
        return self._combined(Zip, "zip", (other,), strict=strict, suffix=suffix)

    def _combined(self, kind: Any, name: str, others: Sequence[Chain], **how: Any) -> Self:
        together: list[Chain] = [self, *others]
        for ds in together:
            if not isinstance(ds, Chain):
                raise PlanError(f"{name} needs a Dataset, not {type(ds).__name__}")
            check_branch(ds.plan, name)
        plan = self.plan
        branches = tuple(branch(ds.plan) for ds in together)
        return self._with(Plan(kind(branches, **how), (), plan.seed, plan.epoch, None, plan.errors, plan.engine))

    def train_test_split(
        self,
        test_size: float = 0.2,
        shuffle: bool = True,
        seed: int | None = None,
        by: str | None = None,
        stratify: str | None = None,
    ) -> tuple[Self, Self]:
        """Part the samples in (train, test), the same way in every epoch and run.

        Each shard gives its share, chosen by a hash, so that adding shards moves no sample; ``by`` hashes a field
        instead, so that samples with the same value stay together; ``shuffle=False`` takes the end of the order.
        ``stratify`` names a field of which every value gives the same share; that field of all samples is read once,
        when a side is first used.

        Raises:
            PlanError: ``test_size`` is no share, arguments contradict each other, or a stage before joins samples.
        """
        if stratify is not None and (by is not None or not shuffle):
            raise PlanError("stratify= says by itself which samples are chosen: leave by= and shuffle= out")
        if isinstance(test_size, bool) or not isinstance(test_size, float) or not 0 < test_size < 1:
            raise PlanError(f"test_size={test_size!r}: give a share between 0 and 1")
        if not self.plan.commutes:
            raise PlanError("train_test_split() cannot stand after a stage that joins samples; put it before")
        if by is not None:
            sides = [SplitBy(by, test_size, seed or 0, side) for side in (False, True)]
            return self._then(sides[0]), self._then(sides[1])
        if stratify is not None:
            said = f"train_test_split(test_size={test_size}, stratify={stratify!r})"
            strata = relations.Strata(self._unshuffled(), stratify, test_size, seed or 0)
            left, right = (
                self._choose(relations.Stratified((), strata=strata, test=side, said=said)) for side in (False, True)
            )
            return left, right
        train, test = (self._choose(Choose(test_size, seed or 0, side, not shuffle)) for side in (False, True))
        return train, test

    def _chosen_from(self) -> int:
        """Behind which stage samples are chosen: below every shuffle and repeat."""
        after = len(self.plan.stages)
        while after and not isinstance(self.plan.stages[after - 1], Slice | Choose):
            after -= 1
        return after

    def _unshuffled(self) -> Plan:
        """What is chosen from."""
        after, plan = self._chosen_from(), self.plan
        kept = (stage for at, stage in enumerate(plan.stages) if at < after or not isinstance(stage, OrderStage))
        return replace(plan, stages=tuple(kept), cut=None)

    def _choose(self, choice: Choose | Exclude) -> Self:
        """Choose below every shuffle and repeat, so that what is chosen is the same in every epoch."""
        plan, after = self.plan, self._chosen_from()
        if isinstance(plan.source, Mix | Union) and not after:
            branches = []
            for below, branch in zip(_parts(choice, plan), plan.source.branches, strict=True):
                branches.append(self._with(branch)._choose(below).plan)
            return self._with(replace(plan, source=replace(plan.source, branches=tuple(branches))))
        return self._with(replace(plan, stages=(*plan.stages[:after], choice, *plan.stages[after:])))

    def exclude(self, *samples: Any) -> Self:
        """Leave samples out of the order: files written by ``on_error("skip", quarantine=...)``, or identities.

        An identity is ``(source, shard, index)``: the number of the source in this dataset, the shard's name relative
        to the dataset's folder, and the place in the shard; a list of them, and ``loader.skipped``, will do. Files are
        read when the dataset is used. It is done before any shuffle and repeat, wherever it is written, and after a
        limit, skip or split. Samples that are not there are ignored with a warning.

        Raises:
            PlanError: something names no sample, or a file is also this dataset's quarantine.
        """
        return self._choose(Exclude(exclusions(samples)))

    def shard(
        self,
        rank: int,
        world: int,
        cut: Literal["range", "step"] = "range",
        uneven: Literal["keep", "drop", "pad"] = "keep",
    ) -> Self:
        """Take one rank's share of the order, wherever this stands in the chain.

        In a worker of a DataLoader it is that worker's share, and is not shared with the others again.

        Raises:
            PlanError: it is cut already, holds a stage that needs the whole stream, or the numbers do not fit.
        """
        return self._with(self.plan.shard(Cut(rank, world, cut, uneven, this_worker() is not None)))

    def split(self, n: int, equal: bool = False) -> list[Self]:
        """Cut in ``n`` disjoint parts that can be pickled; ``equal`` leaves out at most n-1 samples."""
        n = check_count("split", n, least=1)
        return [self.shard(rank, n, uneven="drop" if equal else "keep") for rank in range(n)]

    streaming_split = split

    def seed(self, n: int) -> Self:
        """Set the run's seed: all order and randomness follow from it."""
        if isinstance(n, bool) or not isinstance(n, Integral):
            raise PlanError(f"seed={n!r}: give a whole number")
        return self._with(replace(self.plan, seed=int(n)))

    def epoch(self, k: int) -> Self:
        """Fix the epoch: every iteration is epoch ``k``."""
        return self._with(replace(self.plan, epoch=check_count("epoch", k)))

    def on_error(
        self,
        action: Literal["raise", "skip"],
        limit: float | None = None,
        *,
        quarantine: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Say what happens to a sample that fails, anywhere in the plan.

        ``"skip"`` leaves it out and counts it; more than ``limit`` (a number, or a share below 1) end the run.
        ``quarantine`` is a file, or a folder, to which the identities of those samples are added, for ``exclude``.

        Raises:
            PlanError: an argument that does not fit, or a quarantine that ``exclude`` reads.
        """
        where = None if quarantine is None else os.fspath(quarantine)
        return self._with(replace(self.plan, errors=OnError(action, limit, where)))

    def on(self, engine: str, **options: Any) -> Self:
        """Choose the engine: ``"local"``, ``"ray"`` or ``"serial"``.

        The first two take ``cpus=`` (cores to use), ``memory=`` (bytes under way) and ``ordered=False`` (whatever is
        finished comes first), the local one ``devices=["cuda:0"]`` (for stages with ``gpus=``) and Ray ``address=`` (of
        a cluster); all take ``report=True`` (a live table) and ``observer=`` (told of every ``Event``).

        Raises:
            PlanError: there is no such engine or option.
        """
        return self._with(replace(self.plan, engine=engine_options(engine, options)))


def resources_of(stage: str, given: dict[str, Any]) -> Resources:
    known = [field.name for field in fields(Resources)]
    if unknown := [name for name in given if name not in known]:
        raise PlanError(f"{stage} has no argument {', '.join(unknown)}; it takes {', '.join(known)}")
    return Resources(**given)


def _parts(choice: Choose | Exclude, plan: Plan) -> Iterator[Choose | Exclude]:
    """What a choice is for each branch: sources are counted anew in it."""
    seen = 0
    for number, branch in enumerate(plan.branches()):
        before, seen = seen, seen + sum(not isinstance(source, Combination) for source in branch.sources())
        last = number == len(plan.branches()) - 1
        yield choice.part(before, None if last else seen) if isinstance(choice, Exclude) else choice


def branch(plan: Plan) -> Plan:
    """A plan as a branch: engine and error policy are those of the whole."""
    clean = Plan(plan.source)
    return replace(plan, engine=clean.engine, errors=clean.errors, epoch=None)
