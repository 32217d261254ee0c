"""Methods that add a stage to a plan; each returns a new value."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral, Real
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal, Never, Self, Unpack

from penstock import relations
from penstock.codecs import Limits
from penstock.codecs.stage import Decode, FieldSpec, field_specs
from penstock.dataset.function_options import RayWords, function_options
from penstock.engines import CacheResults, EngineName, Event, check_cachable, engine_options
from penstock.errors import PlanError
from penstock.feed import this_worker
from penstock.landing.fingerprint import result_digest
from penstock.plan import (
    Batched,
    BatchedBy,
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
    OnError,
    OrderStage,
    Plan,
    Rename,
    Repeat,
    Resources,
    Select,
    SharedStages,
    Shuffle,
    Slice,
    SplitBy,
    SplitSide,
    Stage,
    StreamLimit,
    StreamSkip,
    ToTuple,
    Unbatched,
    Union,
    Zip,
    check_branch,
    check_count,
    check_flag,
    chosen_from,
    exclusions,
    with_choice,
)
from penstock.plan.peer_names import check_arguments, unknown_method
from penstock.plan.values import WorkerKind, Workers


class StageMethods:
    """A plan and the methods that add stages to it; immutable, every method returns a new value of the same class.

    Arguments are checked when a method is called: one that is not valid is a ``PlanError``.
    """

    __slots__ = ("plan",)

    plan: Plan

    def __init__(self, plan: Plan) -> None:
        """Wrap a plan."""
        object.__setattr__(self, "plan", plan)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "plan":
            raise AttributeError(f"a {type(self).__name__} is immutable; its methods return a new one")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.plan == other.plan

    def __hash__(self) -> int:
        return hash(self.plan)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}\n{self.plan.describe('  ')}\n>"

    if not TYPE_CHECKING:  # type checkers report names that do not exist

        def __getattr__(self, name: str) -> Never:
            known = [] if name.startswith("_") else [known for known in dir(type(self)) if not known.startswith("_")]
            raise AttributeError(unknown_method(name, known), name=name, obj=self)

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
        on: WorkerKind = "threads",
        cpus: float | None = None,
        gpus: float = 0,
        retries: int = 0,
        timeout_s: float | None = None,
        **by_field: FieldSpec,
    ) -> Self:
        """Decode bytes into values: the named fields as given, all others by ``spec`` and their extension.

        Args:
            spec: How to decode images: ``"rgb8"``, ``"pil"``, ``"torch"``, ...; ``None`` keeps the stored mode.
            fields: Decoders by field, for names that are not Python identifiers.
            trust_pickle: Also decode pickle, which can run code.
            limits: The maximum size of a decoded field.
            workers: How many workers decode, or (min, max).
            on: Whether workers are threads or processes.
            cpus: Cores per worker.
            gpus: Devices per worker.
            retries: How often to retry a failing sample.
            timeout_s: How long one sample may take.
            by_field: By field, a spec, the name of a codec, or a function of the bytes (and ``rng``).

        Raises:
            PlanError: A spec is unknown, or an argument is out of range.
        """
        given = field_specs(fields, by_field)
        last = self.plan.body[-1] if self.plan.body else None
        if isinstance(last, Batched | BatchedBy) and not (given and all(callable(spec) for _, spec in given)):
            raise PlanError(
                f"decode() decodes the fields of samples, and {last.describe()} joins them: call decode() before it"
            )
        resources = Resources(workers, on, cpus, gpus, retries, timeout_s)
        return self._then(Decode(spec, given, trust_pickle, limits or Limits(), resources=resources))

    def map(
        self,
        fn: Callable[..., Any],
        *,
        workers: Workers = None,
        on: WorkerKind = "threads",
        cpus: float | None = None,
        gpus: float = 0,
        retries: int = 0,
        timeout_s: float | None = None,
        memory: float | str | None = None,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        **ray_words: Unpack[RayWords],
    ) -> Self:
        """Replace every sample by ``fn(sample)``; a parameter named ``rng`` gets the sample's own generator.

        Args:
            fn: A function of a sample, which returns the new one, or a class whose instances are such functions: it
                is constructed once per worker. Any other class, such as ``dict``, is called on every sample.
            workers: How many workers call it, or (min, max); by default as many as there are cores.
            on: Whether workers are threads or processes.
            cpus: Cores per worker.
            gpus: Devices per worker; a parameter named ``device`` gets the worker's device.
            retries: How often to retry a failing sample.
            timeout_s: How long one sample may take.
            memory: The memory that one worker needs, in bytes or as "2GB"; Ray uses it to place workers.
            fn_args: Arguments of the class's constructor.
            fn_kwargs: Keyword arguments of the class's constructor.
            ray_words: The same arguments under Ray Data's names: ``concurrency``, ``num_cpus``, ``num_gpus``,
                ``fn_constructor_args``, ``fn_constructor_kwargs``, ``compute=ActorPoolStrategy(...)``.

        Raises:
            PlanError: ``fn`` is not a function, or an argument is unknown, out of range, or given under two names.
        """
        resources = workers, on, cpus, gpus, retries, timeout_s, memory
        return self._then(MapFn(fn, **function_options("map", ray_words, fn_args, fn_kwargs, *resources)))

    def filter(
        self,
        fn: Callable[..., Any] | Condition,
        *,
        workers: Workers = None,
        on: WorkerKind = "threads",
        cpus: float | None = None,
        gpus: float = 0,
        retries: int = 0,
        timeout_s: float | None = None,
        memory: float | str | None = None,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        **ray_words: Unpack[RayWords],
    ) -> Self:
        """Keep the samples for which ``fn(sample)`` is true. The other arguments are those of ``map``.

        A condition such as ``ps.col("label") == 3`` is evaluated on whole columns if the samples are columns. Row
        groups of a Parquet file that cannot contain a match are not read.

        Raises:
            PlanError: ``fn`` is neither a function nor a condition, or an argument is unknown or out of range.
        """
        resources = workers, on, cpus, gpus, retries, timeout_s, memory
        options = function_options("filter", ray_words, fn_args, fn_kwargs, *resources)
        if not isinstance(fn, Condition):
            return self._then(FilterFn(fn, **options))
        default, values = Resources(), options.pop("resources")
        given = [f.name for f in fields(Resources) if getattr(values, f.name) != getattr(default, f.name)]
        if given := given + [f"fn_{name}" for name, value in options.items() if value is not None]:
            raise PlanError(f"filter({fn}) does not call a function; leave out {', '.join(given)}")
        return self._then(ConditionFilter(fn))

    def flat_map(
        self,
        fn: Callable[..., Iterable[Any]] | type[Any],
        *,
        workers: Workers = None,
        on: WorkerKind = "threads",
        cpus: float | None = None,
        gpus: float = 0,
        retries: int = 0,
        timeout_s: float | None = None,
        memory: float | str | None = None,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        **ray_words: Unpack[RayWords],
    ) -> Self:
        """Replace every sample by all samples in ``fn(sample)``. The other arguments are those of ``map``.

        Raises:
            PlanError: ``fn`` is not a function, or an argument is unknown or out of range.
        """
        resources = workers, on, cpus, gpus, retries, timeout_s, memory
        return self._then(FlatMapFn(fn, **function_options("flat_map", ray_words, fn_args, fn_kwargs, *resources)))

    def map_batches(
        self,
        fn: Callable[..., Any],
        batch_size: int | None = None,
        *,
        workers: Workers = None,
        on: WorkerKind = "threads",
        cpus: float | None = None,
        gpus: float = 0,
        retries: int = 0,
        timeout_s: float | None = None,
        memory: float | str | None = None,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        **ray_words: Unpack[RayWords],
    ) -> Self:
        """Call ``fn`` on columns of ``batch_size`` neighbouring samples, for speed; row i of the result is row i.

        For batches to train on, use ``batched(n).map(fn)``. The other arguments are those of ``map``.

        Args:
            fn: A function of ``{field: stacked array or list}``, or a class whose instances are such functions.
            batch_size: Rows per call; by default the engine chooses.

        Raises:
            PlanError: ``fn`` is not a function or class, or an argument is unknown or out of range.
        """
        resources = workers, on, cpus, gpus, retries, timeout_s, memory
        options = function_options("map_batches", ray_words, fn_args, fn_kwargs, *resources)
        return self._then(MapBatches(fn, batch_size, **options))

    def select(self, *names: str) -> Self:
        """Keep these fields, and those named ``__like_this__``."""
        return self._then(Select(names))

    def drop(self, *names: str) -> Self:
        """Remove these fields."""
        return self._then(Drop(names))

    def rename(self, *mapping: Never, **names: str) -> Self:
        """Rename fields; ``rename(image="jpg;png")`` renames the first of the two that a sample has.

        Raises:
            PlanError: A name is given twice, or names are given as a dict instead of as keywords.
        """
        if mapping:
            raise PlanError(f"rename takes keywords, new name first: write {_as_keywords(mapping[0])}")
        return self._then(Rename(tuple(names.items())))

    def to_tuple(self, *names: str) -> Self:
        """Turn samples into tuples of these fields; ``"jpg;png"`` is the first of the two that a sample has."""
        split = tuple(part for name in names for part in (name.split() if isinstance(name, str) else [name]))
        return self._then(ToTuple(split))

    def map_tuple(self, *fns: Callable[..., Any] | None) -> Self:
        """Apply one function to each element of a tuple; ``None`` keeps the element."""
        return self._then(MapTuple(fns, resources=Resources()))

    def batched(
        self,
        batch_size: int,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        **unknown: Never,
    ) -> Self:
        """Join neighbouring samples into batches of columns.

        Raises:
            PlanError: An argument is unknown or out of range.
        """
        check_arguments("batched", unknown, ("batch_size", "drop_last", "collate"))
        return self._then(Batched(batch_size, drop_last, collate))

    def batched_by(
        self,
        size_fn: Callable[[Any], float],
        max_size: float,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Self:
        """Join neighbouring samples into batches whose sizes add up to at most ``max_size``."""
        return self._then(BatchedBy(size_fn, max_size, collate))

    def cache(
        self,
        folder: str | os.PathLike[str],
        *,
        version: str | int | None = None,
        per_epoch: int | bool | None = None,
    ) -> Self:
        """Keep the results of all stages before this one on disk as they stream; later epochs and runs read them.

        The order, states and cuts are those of the plan without it. Results are found again by the content of the
        source, the stages with their arguments, and the code of their functions; if any of them changes, results are
        computed again.

        Args:
            folder: A folder on this machine; all processes that name it share the results.
            version: What cannot be seen in the code, such as the version of a model that a function loads, or of data
                on a server that sends neither ETags nor times.
            per_epoch: How many variants of random stages to keep: epoch e has the random numbers of epoch e modulo
                this. ``True`` keeps one for each epoch.

        Raises:
            PlanError: A stage before it draws random numbers and ``per_epoch`` is not given, or sees more than one
                sample at a time; or the plan zips datasets, reads a stream, or has a cache already.
        """
        name = os.fspath(folder)
        if not name or "://" in name:
            raise PlanError(f"cache(): {name!r} is not a local folder")
        if per_epoch is not None and per_epoch is not True:
            per_epoch = check_count("per_epoch", per_epoch, least=1)
        check_cachable(self.plan, random=per_epoch is not None)
        path = os.path.abspath(os.path.expanduser(name))
        return self._then(CacheResults(path, result_digest, version, per_epoch))

    def unbatched(self) -> Self:
        """Split batches back into samples."""
        return self._then(Unbatched())

    # Stages on the order

    def shuffle(
        self,
        window: int | None = None,
        *,
        shards: int = 16,
        all: bool = False,
        seed: int | None = None,
        **unknown: Never,
    ) -> Self:
        """Shuffle the samples; every epoch has a different order.

        ``shards`` shards are read at a time, front to back, and their samples are permuted in windows of ``window``;
        ``all`` permutes the whole dataset. After ``flat_map``, ``unbatched`` or ``batched``, windows of the stream are
        permuted.

        Raises:
            PlanError: An argument is unknown or out of range.
        """
        check_arguments("shuffle", unknown, ("window", "shards", "all", "seed"))
        if window is not None:
            window = check_count("window", window, least=1)
        shards = check_count("shards", shards, least=1)
        check_flag("all", all)
        ds = self if seed is None else self.seed(seed)
        if self.plan.commutes and not any(stage.name == "flat_map" for stage in self.plan.body):
            everything = all or (window is None and ds.plan.source.random_access)
            return ds._then(Shuffle(window, shards, everything))
        if all:
            raise PlanError(
                f"shuffle(all=True) cannot come after {self._late_stage()}; put it before, or give a window"
            )
        return ds._then(LateShuffle(window or 1000))

    def _late_stage(self) -> str:
        """Return the call of the first stage that a shuffle does not commute with."""
        late = [s for s in self.plan.body if s.scope.value != "each" or s.name == "flat_map"]
        return late[0].describe()

    def limit(self, n: int) -> Self:
        """Keep the first ``n`` positions of the order; after a stage that changes the count, the first ``n`` items."""
        n = check_count("limit", n)
        if self.plan.keeps_count:
            return self._then(Slice(0, n, self.plan.cut is not None))
        return self._then_on_stream(StreamLimit(n))

    def skip(self, n: int) -> Self:
        """Skip the first ``n`` positions of the order; after a stage that changes the count, the first ``n`` items."""
        n = check_count("skip", n)
        if self.plan.keeps_count:
            return self._then(Slice(n, None, self.plan.cut is not None))
        return self._then_on_stream(StreamSkip(n))

    def _then_on_stream(self, stage: Stage) -> Self:
        if self.plan.cut is not None and self.plan.cut.world > 1:
            raise PlanError(f"{stage.describe()} counts the whole stream, which is cut for {self.plan.cut.world} ranks")
        return self._then(stage)

    def repeat(self, n: int | None = None) -> Self:
        """Repeat the dataset ``n`` times per epoch, each pass with its own order; ``None`` repeats forever."""
        if n is not None:
            n = check_count("repeat", n, least=1)
        if not self.plan.commutes:
            raise PlanError("repeat() cannot come after a stage that joins samples; put it before")
        return self._then(Repeat(n))

    def union(self, *others: Self) -> Self:
        """Concatenate this dataset and the others, in this order."""
        return self._combined(Union, "union", others)

    def zip(self, other: Self, strict: bool = True, *, suffix: str | None = None) -> Self:
        """Pair samples by position and merge their fields; ``suffix`` renames fields of ``other`` that both have."""
        if isinstance(strict, StageMethods):
            raise PlanError("zip pairs two datasets: for more, write a.zip(b).zip(c)")
        return self._combined(Zip, "zip", (other,), strict=strict, suffix=suffix)

    def _combined(self, kind: Any, name: str, others: Sequence[Self], **options: Any) -> Self:
        operands = [self, *others]
        for ds in operands:
            if not isinstance(ds, StageMethods):
                raise PlanError(f"{name} needs a Dataset, not {type(ds).__name__}")
            check_branch(ds.plan, name)
        plan = self.plan
        branches = tuple(ds.plan.as_branch() for ds in operands)
        return self._with(Plan(kind(branches, **options), (), plan.seed, plan.epoch, None, plan.errors, plan.engine))

    def train_test_split(
        self,
        test_size: float = 0.2,
        shuffle: bool = True,
        seed: int | None = None,
        by: str | None = None,
        stratify: str | None = None,
    ) -> tuple[Self, Self]:
        """Split the samples into (train, test), the same way in every epoch and run.

        Args:
            test_size: The share of samples in test, between 0 and 1.
            shuffle: Choose by a hash within each shard, so that adding shards moves no sample to the other side; False
                takes the end of the order as test.
            seed: Selects another split; independent of the seed of the run.
            by: A field to hash instead, so that samples with the same value stay together.
            stratify: A field; each of its values has the same share in test. The field of all samples is read once,
                when a side is first used.

        Raises:
            PlanError: ``test_size`` is not a share, arguments contradict each other, or an earlier stage joins samples.
        """
        check_flag("shuffle", shuffle)
        for name, field in (("by", by), ("stratify", stratify)):
            if field is not None and not (isinstance(field, str) and field):
                raise PlanError(f"{name}={field!r}: give the name of a field")
        seed = 0 if seed is None else _checked_seed(seed)
        if stratify is not None and (by is not None or not shuffle):
            raise PlanError("stratify= cannot be combined with by= or shuffle=False; leave them out")
        if not isinstance(test_size, Real) or not 0 < test_size < 1:
            raise PlanError(f"test_size={test_size!r}: give a share between 0 and 1")
        test_size = float(test_size)
        if not self.plan.commutes:
            raise PlanError("train_test_split() cannot come after a stage that joins samples; put it before")
        if by is not None:
            sides = [SplitBy(by, test_size, seed, side) for side in (False, True)]
            return self._then(sides[0]), self._then(sides[1])
        choices: list[SplitSide | Exclude]
        if stratify is not None:
            call = f"train_test_split(test_size={test_size}, stratify={stratify!r})"
            strata = relations.Strata(chosen_from(self.plan), stratify, test_size, seed)
            choices = [relations.Stratified((), strata=strata, test=side, call=call) for side in (False, True)]
        else:
            choices = [SplitSide(test_size, seed, side, not shuffle) for side in (False, True)]
        train, test = (self._with(with_choice(self.plan, choice)) for choice in choices)
        return train, test

    def exclude(self, *samples: Any) -> Self:
        """Remove samples from the order.

        ``samples`` are files written by ``on_error("skip", quarantine=...)``, identities, lists of identities, or
        ``loader.skipped``. An identity is ``(source, shard, index)``: the number of the source in this dataset, the
        name of the shard relative to the dataset's folder, and the number of the sample in the shard. Files are read
        when the dataset is used. Samples are removed before any shuffle and repeat, wherever ``exclude`` is called, and
        after a limit, skip or split. Identities that are not in the dataset are ignored with a warning.

        Raises:
            PlanError: An argument does not name a sample, or a file is also this dataset's quarantine.
        """
        return self._with(with_choice(self.plan, Exclude(exclusions(samples))))

    def shard(
        self,
        rank: int,
        world: int,
        cut: Literal["range", "step"] = "range",
        uneven: Literal["keep", "drop", "pad"] = "keep",
    ) -> Self:
        """Keep one rank's share of the order, wherever ``shard`` is called among the stages.

        If it is called in a DataLoader worker, the share belongs to that worker and is not divided among workers again.

        Raises:
            PlanError: The plan is already cut, a stage needs the whole stream, or ``rank`` is not below ``world``.
        """
        return self._with(self.plan.shard(Cut(rank, world, cut, uneven, this_worker() is not None)))

    def split(self, n: int, equal: bool = False, **unknown: Any) -> list[Self]:
        """Cut the dataset into ``n`` disjoint ones that can be pickled; ``equal`` drops at most n-1 samples.

        On Ray, the parts share one set of workers for the stages before the split, wherever each part is read.
        """
        check_arguments("split", unknown, ("n", "equal"))
        n = check_count("split", n, least=1)
        uneven: Literal["drop", "keep"] = "drop" if check_flag("equal", equal) else "keep"
        shared = SharedStages(token_hex(8), len(self.plan.body))
        in_worker = this_worker() is not None
        cuts = [Cut(rank, n, "range", uneven, in_worker, shared) for rank in range(n)]
        return [self._with(self.plan.shard(cut)) for cut in cuts]

    streaming_split = split

    def seed(self, n: int) -> Self:
        """Set the seed of the order and of all random numbers."""
        return self._with(replace(self.plan, seed=_checked_seed(n)))

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
        """Choose what happens to a sample that fails in any stage of the plan.

        Args:
            action: ``"raise"`` ends the run; ``"skip"`` leaves the sample out and counts it.
            limit: The most samples that may be skipped, as a number or as a share below 1; one more ends the run.
            quarantine: A file or folder to which the identities of skipped samples are appended, for ``exclude``.

        Raises:
            PlanError: An argument is out of range, or the quarantine is a file that ``exclude`` reads.
        """
        where = None if quarantine is None else os.fspath(quarantine)
        return self._with(replace(self.plan, errors=OnError(action, limit, where)))

    def on(
        self,
        engine: EngineName,
        *,
        cpus: int | None = None,
        memory: float | str | None = None,
        ordered: bool | None = None,
        devices: Sequence[Any] | None = None,
        address: str | None = None,
        report: bool | None = None,
        observer: Callable[[Event], object] | None = None,
        monitor: str | os.PathLike[str] | None = None,
        **unknown: Never,
    ) -> Self:
        """Choose the engine that runs the plan.

        Args:
            engine: ``"local"`` (threads and processes), ``"ray"`` (a cluster) or ``"serial"`` (a plain loop).
            cpus: Cores to use (local, ray).
            memory: Bytes that may be in flight, as a number or "8GB" (local, ray).
            ordered: False delivers results in the order in which they are finished (local, ray).
            devices: Devices for stages with ``gpus=``, such as ``["cuda:0"]`` (local).
            address: The cluster to connect to, such as ``"auto"``, ``"ray://host:10001"`` (ray).
            report: Show a live table of the run.
            observer: Called with every ``Event`` of the run.
            monitor: A local folder to which the run appends its statistics, for ``penstock view --run``.

        Raises:
            PlanError: There is no such engine, or it does not have the option.
        """
        options: dict[str, Any] = {
            "cpus": cpus,
            "memory": memory,
            "ordered": ordered,
            "devices": devices,
            "address": address,
            "report": report,
            "observer": observer,
            "monitor": monitor,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return self._with(replace(self.plan, engine=engine_options(engine, {**given, **unknown})))


def _checked_seed(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, Integral):
        raise PlanError(f"seed={n!r}: give an integer")
    return int(n)


def _as_keywords(mapping: Any) -> str:
    """Return the call of ``rename`` that a dict of old and new names stands for."""
    pairs = mapping.items() if isinstance(mapping, Mapping) else [("old", "new")]
    return f"rename({', '.join(f'{new}={old!r}' for old, new in pairs)})"
