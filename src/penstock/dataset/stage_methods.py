"""Methods that add a stage on items to a plan, or set how it runs; each returns a new value."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Never, Self, Unpack

from penstock.codecs import Limits
from penstock.codecs.stage import Decode, FieldSpec, field_specs
from penstock.dataset.function_options import RayWords, function_options
from penstock.engines import CacheResults, EngineName, Event, check_cachable, engine_options
from penstock.errors import PlanError
from penstock.landing.fingerprint import result_digest
from penstock.plan import (
    Batched,
    BatchedBy,
    Condition,
    ConditionFilter,
    Drop,
    FilterFn,
    FlatMapFn,
    MapBatches,
    MapFn,
    MapTuple,
    OnError,
    OrderStage,
    Plan,
    Rename,
    Resources,
    Select,
    Stage,
    ToTuple,
    Unbatched,
    check_count,
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

    def seed(self, n: int) -> Self:
        """Set the seed of the order and of all random numbers."""
        return self._with(replace(self.plan, seed=checked_seed(n)))

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


def checked_seed(n: Any) -> int:
    """Return a seed as an integer.

    Raises:
        PlanError: It is not one.
    """
    if isinstance(n, bool) or not isinstance(n, Integral):
        raise PlanError(f"seed={n!r}: give an integer")
    return int(n)


def _as_keywords(mapping: Any) -> str:
    """Return the call of ``rename`` that a dict of old and new names stands for."""
    pairs = mapping.items() if isinstance(mapping, Mapping) else [("old", "new")]
    return f"rename({', '.join(f'{new}={old!r}' for old, new in pairs)})"
