"""Methods for tables: computed columns, groups, sorting, distinct values, joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Never, Self

from penstock.dataset import relations
from penstock.dataset.function_options import resources_of
from penstock.dataset.stage_methods import StageMethods
from penstock.errors import PlanError
from penstock.plan import ByObject, Condition, Expression, Resources, WithColumns, check_choice, expression
from penstock.plan.values import Workers


class TableMethods(StageMethods):
    """A plan whose samples can be sorted, grouped and joined.

    A method that needs every sample reads them when its result is first read, and works on columns if the samples are
    columns. Samples beyond ``on("local", memory=...)``, by default a quarter of the machine's memory, are spilled to a
    temporary file.
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

        Numbers come before other types; ``None`` and NaN come last. ``descending`` reverses this order, for all fields
        or, as a list, field by field.

        Raises:
            PlanError: The dataset is one rank's share, or ``fields`` are not names.
        """
        names = _names("sort", fields)
        flags = [descending] * len(names) if isinstance(descending, bool) else list(descending)
        if len(flags) != len(names) or not all(isinstance(flag, bool) for flag in flags):
            raise PlanError(f"descending={descending!r}: give True or False, or a list with one of them for each field")
        return self._with(relations.summarized(self.plan, relations.Sorted(names, tuple(flags))))

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
        return self.groupby(field).count().sort("count", descending=True)

    def describe(self, *fields: str) -> Self:
        """Summarise each field, or each of ``fields``, in a row: type, count, missing, mean, std, min and max.

        Mean and standard deviation are given for numbers, min and max for numbers and text.

        Raises:
            PlanError: The dataset is one rank's share, or ``fields`` are not names.
        """
        read = relations.select_fields(self.plan, *_names("describe", fields)) if fields else self.plan
        return self._with(relations.summarized(read, relations.Described()))

    def join(
        self,
        other: Self,
        on: str | Sequence[str],
        how: Literal["inner", "left"] = "inner",
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

        Samples stay in order. A sample with several matches is repeated, once for each match; a sample without a match
        is dropped, or kept (``how="left"``) with ``None`` in the fields of ``other``. ``None`` equals ``None``. Every
        process that joins reads all of ``other`` once. The remaining arguments are those of ``map``.

        Args:
            other: The dataset to look up.
            on: The name of the field, or fields, to compare.
            how: ``"inner"`` or ``"left"``.
            suffix: Appended to the names of fields of ``other`` that both datasets have.

        Raises:
            PlanError: ``other`` is not a dataset or is one rank's share, or an argument is not valid.
        """
        if not isinstance(other, StageMethods):
            raise PlanError(f"join needs a Dataset, not {type(other).__name__}")
        check_choice("how", how, ("inner", "left"))
        if other.plan.cut is not None and other.plan.cut.world > 1:
            raise PlanError(f"join needs all of the other dataset, which is cut for {other.plan.cut.world} ranks")
        resources = resources_of("join", unknown, workers, "threads", cpus, gpus, retries, timeout_s, memory)
        keys = relations.JoinOptions(_names("join", (on,) if isinstance(on, str) else tuple(on)), how == "left", suffix)
        return self._then(relations.Join(relations.RightSide(other.plan, keys), keys, resources=resources))


def _names(verb: str, fields: Sequence[Any]) -> tuple[str, ...]:
    names = tuple(fields)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise PlanError(f"{verb} needs field names, not {', '.join(map(repr, names)) or 'nothing'}")
    if len({*names}) < len(names):
        raise PlanError(f"{verb}: a field is named twice in {', '.join(map(repr, names))}")
    return names
