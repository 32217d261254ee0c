"""Methods for tables: computed columns, groups, sorting, distinct values, joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Never, Self, get_args

from penstock import relations
from penstock.dataset.function_options import resources_of
from penstock.dataset.order_methods import OrderMethods
from penstock.errors import PlanError
from penstock.plan import ByObject, Condition, Expression, Resources, Sort, WithColumns, check_choice, expression
from penstock.plan.values import Workers, check_names

JoinKind = Literal["inner", "left", "right", "full", "semi", "anti"]


class TableMethods(OrderMethods):
    """A plan whose samples can be sorted, grouped and joined.

    A method that needs every sample reads them when its result is first read. DuckDB works on the columns that the
    method needs, with the memory and cores of ``on("local", memory=..., cpus=...)``, by default a quarter of the
    machine's memory and all cores; what is beyond the limit is spilled to temporary files. The values of a field that
    is compared must have one type.
    """

    __slots__ = ()

    def with_columns(self, **columns: Any) -> Self:
        """Add or replace fields: by expressions, functions of a sample, or constants.

        ``with_columns(twice=ps.col("x") * 2, name=lambda sample: sample["text"][:10], part="train")``. All of
        them are computed from the original sample.

        Raises:
            PlanError: No field is given, or a value is a condition.
        """
        if not columns:
            raise PlanError("with_columns() needs fields, as in with_columns(twice=ps.col('x') * 2)")
        for name, value in columns.items():
            if isinstance(value, Condition):
                raise PlanError(f"with_columns({name}={value}): a condition is for filter(); give a function instead")
        named = {name: value if callable(value) else expression(value) for name, value in columns.items()}
        plain = all(isinstance(value, Expression) for value in named.values())
        return self._then(WithColumns(ByObject(named), resources=None if plain else Resources()))

    def sort(self, *fields: str, descending: bool | Sequence[bool] = False) -> Self:
        """Sort the samples by the values of fields; samples with equal values keep their order.

        ``None`` and NaN come last, also if ``descending``: for all fields or, as a list, field by field. After stages
        that keep the count, the sort is an order like that of ``shuffle``: it can be cut for ranks, resumed and
        indexed, and a sample is read where it is stored, after the keys of all samples. Behind other stages, the whole
        stream is read and sorted.

        Raises:
            PlanError: ``fields`` are not names, or the dataset is one rank's share and a stage changes the count.
        """
        names = _names("sort", fields)
        flags = list(descending) if isinstance(descending, Sequence) else [descending] * len(names)
        if len(flags) != len(names) or not all(isinstance(flag, bool) for flag in flags):
            raise PlanError(f"descending={descending!r}: give True or False, or a list with one of them for each field")
        by = relations.Sorted(names, tuple(flags))
        if not relations.can_sort_positions(self.plan):
            return self._with(relations.summarized(self.plan, by))
        if any(stage.applies_per_rank for stage in self.plan.ordering):
            raise PlanError(f"{by.describe()} cannot come after a limit of one rank's share; put it before shard()")
        return self._then(Sort(relations.SortedPositions(replace(self.plan, cut=None), by)))

    def groupby(self, *fields: str) -> relations.Groups[Self]:
        """Group the samples by the values of fields: ``ds.groupby("label").count()``.

        Raises:
            PlanError: The dataset is one rank's share, or ``fields`` are not names.
        """
        names = _names("groupby", fields)
        relations.summarized(self.plan, relations.Aggregated(names, "list"))  # checks that the dataset is not cut
        return relations.Groups(self.plan, self._with, names)

    def distinct(self, *fields: str) -> Self:
        """Keep the first sample of each combination of values of the fields (without names, of all fields), in order.

        Raises:
            PlanError: The dataset is one rank's share, or ``fields`` are not names.
        """
        return self._with(
            relations.summarized(self.plan, relations.Distinct(_names("distinct", fields) if fields else ()))
        )

    def value_counts(self, field: str) -> Self:
        """Count the samples with each value of a field: ``{field: value, "count": n}``, the most frequent first.

        Raises:
            PlanError: The dataset is one rank's share, or ``field`` is not a name.
        """
        counts = relations.Aggregated(_names("value_counts", (field,)), "count", frequent_first=True)
        return self._with(relations.summarized(relations.select_fields(self.plan, "value_counts", field), counts))

    def sql(self, query: str) -> Self:
        """Return the rows of a query in DuckDB's SQL over the table ``samples``, which has a column for each field.

        ``ds.sql("select label, count(*) as n from samples group by label order by n")``. The values of each field must
        have one type. The query has no access to files, extensions or variables, and runs on one thread, so that its
        result is the same every time, even without ``order by``.

        Raises:
            PlanError: The dataset is one rank's share, or ``query`` is not text; when it is read: the query is wrong.
        """
        if not isinstance(query, str) or not query.strip():
            raise PlanError(f"sql needs a query, as in sql('select count(*) from samples'), not {query!r}")
        return self._with(relations.summarized(self.plan, relations.Queried(query)))

    def describe(self, *fields: str) -> Self:
        """Summarise each field, or each of ``fields``, in a row: type, count, missing, mean, std, min and max.

        Mean and standard deviation are given for numbers, min and max for numbers and text. If a field has text, min
        and max are text in every row.

        Raises:
            PlanError: The dataset is one rank's share, or ``fields`` are not names.
        """
        read = relations.select_fields(self.plan, "describe", *_names("describe", fields)) if fields else self.plan
        return self._with(relations.summarized(read, relations.Described()))

    def join(
        self,
        other: Self,
        on: str | Sequence[str],
        how: JoinKind = "inner",
        *,
        suffix: str | None = None,
        workers: Workers = None,
        cpus: float | None = None,
        gpus: float = 0,
        retries: int = 0,
        timeout_s: float | None = None,
        memory: float | str | None = None,
        **unknown: Never,
    ) -> Self:
        """Add the fields of the samples of ``other`` that have the same values in the fields ``on``.

        Samples stay in order, and a sample with several matches is repeated, once for each match. ``None`` equals
        ``None``. Every process that joins reads all of ``other`` once. The remaining arguments are those of ``map``.

        Args:
            other: The dataset to look up.
            on: The name of the field, or fields, to compare.
            how: Which samples are in the result. ``"inner"``: those with a match. ``"left"``: all; those without have
                ``None`` in the fields of ``other``. ``"right"`` and ``"full"``: those of ``"inner"`` or ``"left"``,
                then the samples of ``other`` without a match, with ``None`` in the other fields. ``"semi"`` and
                ``"anti"``: those with a match, or those without, with their own fields only.
            suffix: Appended to the names of fields of ``other`` that both datasets have.

        Raises:
            PlanError: ``other`` is not a dataset or is one rank's share, or an argument is not valid.
        """
        if not isinstance(other, OrderMethods):
            raise PlanError(f"join needs a Dataset, not {type(other).__name__}")
        check_choice("how", how, get_args(JoinKind))
        if other.plan.cut is not None and other.plan.cut.world > 1:
            raise PlanError(f"join needs all of the other dataset, which is cut for {other.plan.cut.world} ranks")
        resources = resources_of("join", unknown, workers, "threads", cpus, gpus, retries, timeout_s, memory)
        keys = _names("join", (on,) if isinstance(on, str) else tuple(on))

        def joined(one: Self, another: Self, kept: Any) -> Self:
            options = relations.JoinOptions(keys, kept, suffix)
            return one._then(relations.Join(relations.OtherSide(another.plan, options), options, resources=resources))

        if how not in ("right", "full"):
            return joined(self, other, how)
        return joined(self, other, "inner" if how == "right" else "left").union(joined(other, self, "rest"))


def _names(verb: str, fields: Sequence[Any]) -> tuple[str, ...]:
    names = tuple(fields)
    check_names(verb, names)
    if len({*names}) < len(names):
        raise PlanError(f"{verb}: a field is named twice in {', '.join(map(repr, names))}")
    return names
