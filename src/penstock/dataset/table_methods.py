"""The methods of tables: computed columns, groups, sorting, distinct values, joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Never, Self

from penstock.dataset import relations
from penstock.dataset.stage_methods import StageMethods, resources_of
from penstock.errors import PlanError
from penstock.plan import ByObject, Condition, Expression, Resources, WithColumns, check_choice, expression
from penstock.plan.values import Workers


class TableMethods(StageMethods):
    """A plan whose samples can be sorted, grouped and joined.

    A method that needs every sample reads them when its result is first read. It works on columns where samples come
    as columns. What does not fit into ``on("local", memory=...)``, by default a quarter of the machine's memory, is
    spilled to a temporary file.
    """

    __slots__ = ()

    def with_columns(self, **columns: Any) -> Self:
        """Add or replace fields: by expressions, functions of a sample, or constants.

        ``with_columns(twice=ps.col("x") * 2, name=lambda sample: sample["text"][:10], part="train")``; each sees the
        sample as it was before.

        Raises:
            PlanError: No field is given, or one is a condition.
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

        Numbers come before other types, ``None`` and NaN after everything. ``descending`` reverses that, for all fields
        or for each.

        Raises:
            PlanError: The dataset is one rank's share, or ``fields`` are not names.
        """
        names = _names("sort", fields)
        downs = [descending] * len(names) if isinstance(descending, bool) else list(descending)
        if len(downs) != len(names) or not all(isinstance(down, bool) for down in downs):
            raise PlanError(f"descending={descending!r}: give True or False, or one of them for each field")
        return self._with(relations.whole(self.plan, relations.Sorted(names, tuple(downs))))

    def groupby(self, *fields: str) -> relations.Groups[Self]:
        """Group the samples by the values of fields: ``ds.groupby("label").count()``.

        Raises:
            PlanError: The dataset is one rank's share, or ``fields`` are not names.
        """
        names = _names("groupby", fields)
        relations.whole(self.plan, relations.Aggregated(names, "list"))  # refuses a rank's share
        return relations.Groups(self.plan, self._with, names)

    def distinct(self, *fields: str) -> Self:
        """Keep the first sample for each value of the fields, in order; without names, of all fields together.

        Raises:
            PlanError: The dataset is one rank's share, or ``fields`` are not names.
        """
        return self._with(relations.whole(self.plan, relations.Distinct(_names("distinct", fields) if fields else ())))

    def value_counts(self, field: str) -> Self:
        """Count the samples with each value of a field: ``{field: value, "count": n}``, the most frequent first.

        Raises:
            PlanError: The dataset is one rank's share, or ``field`` is not a name.
        """
        return self.groupby(field).count().sort("count", descending=True)

    def describe(self, *fields: str) -> Self:
        """Summarise each field (those named, or all) in a row: type, count, missing, mean, std, min and max.

        Mean and standard deviation are given for numbers, min and max for numbers and text.

        Raises:
            PlanError: The dataset is one rank's share, or ``fields`` are not names.
        """
        read = relations.fields_of(self.plan, *_names("describe", fields)) if fields else self.plan
        return self._with(relations.whole(read, relations.Described()))

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
        """Add to every sample the fields of the samples of ``other`` that have the same values in some fields.

        Samples stay in order. A sample with several matches comes once with each of them; a sample without a match is
        dropped, or (``how="left"``) kept with ``None`` in the other's fields. ``None`` equals ``None``. ``other`` is
        read whole, once in every process that joins. The resources are those of ``map``.

        Args:
            other: The dataset to look up.
            on: The field, or fields, that both have.
            how: ``"inner"`` or ``"left"``.
            suffix: Appended to the other's fields where both sides have them.

        Raises:
            PlanError: ``other`` is not a dataset or is one rank's share, or ``on`` is not a name.
        """
        if not isinstance(other, StageMethods):
            raise PlanError(f"join needs a Dataset, not {type(other).__name__}")
        check_choice("how", how, ("inner", "left"))
        if other.plan.cut is not None and other.plan.cut.world > 1:
            raise PlanError(f"join needs all of the other dataset, which is cut for {other.plan.cut.world} ranks")
        resources = resources_of("join", unknown, workers, "threads", cpus, gpus, retries, timeout_s, memory)
        keys = relations.How(_names("join", (on,) if isinstance(on, str) else tuple(on)), how == "left", suffix)
        return self._then(relations.Join(relations.Side(other.plan, keys), keys, resources=resources))


def _names(verb: str, fields: Sequence[Any]) -> tuple[str, ...]:
    names = tuple(fields)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise PlanError(f"{verb} needs field names, not {', '.join(map(repr, names)) or 'nothing'}")
    if len({*names}) < len(names):
        raise PlanError(f"{verb}: a field is named twice in {', '.join(map(repr, names))}")
    return names
