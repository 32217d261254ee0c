"""The verbs of tables: columns made of others, groups, order by value, distinct values, joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from penstock.dataset import relations
from penstock.dataset.stage_methods import Chain, resources_of
from penstock.errors import PlanError
from penstock.plan import ByObject, Condition, Expression, Resources, WithColumns, check_choice, expression


class Tabular(Chain):
    """A plan whose samples can be put in order, grouped and joined.

    What sees every sample does so when it is first read. Where samples are columns it works on columns; what does not
    fit into ``on("local", memory=...)``, by default a quarter of the machine's memory, is in a temporary file.
    """

    __slots__ = ()

    def with_columns(self, **columns: Any) -> Self:
        """Add fields, or put others in their place: expressions, functions of a sample, or constants.

        ``with_columns(twice=ps.col("x") * 2, name=lambda sample: sample["text"][:10], part="train")``; each sees the
        sample as it was before.

        Raises:
            PlanError: there are none, or one is a condition.
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
        """Put the samples in the order of fields' values; equal ones stay as they are.

        Numbers come before other kinds, nothing (``None``) and NaN behind all. ``descending`` turns that round, for all
        fields or for each.

        Raises:
            PlanError: this is one rank's share, or ``fields`` are no names.
        """
        names = _names("sort", fields)
        downs = [descending] * len(names) if isinstance(descending, bool) else list(descending)
        if len(downs) != len(names) or not all(isinstance(down, bool) for down in downs):
            raise PlanError(f"descending={descending!r}: give True or False, or one of them for each field")
        return self._with(relations.whole(self.plan, relations.Sorted(names, tuple(downs))))

    def groupby(self, *fields: str) -> relations.Groups[Self]:
        """Gather the samples by the values of fields: ``ds.groupby("label").count()``.

        Raises:
            PlanError: this is one rank's share, or ``fields`` are no names.
        """
        names = _names("groupby", fields)
        relations.whole(self.plan, relations.Aggregated(names, "list"))  # whether it may
        return relations.Groups(self.plan, self._with, names)

    def distinct(self, *fields: str) -> Self:
        """The first sample of each value of fields, in the order they come; without names, of all fields together.

        Raises:
            PlanError: this is one rank's share, or ``fields`` are no names.
        """
        return self._with(relations.whole(self.plan, relations.Distinct(_names("distinct", fields) if fields else ())))

    def value_counts(self, field: str) -> Self:
        """How many samples have each value of a field: ``{field: value, "count": n}``, the most frequent first.

        Raises:
            PlanError: this is one rank's share, or ``field`` is no name.
        """
        return self.groupby(field).count().sort("count", descending=True)

    def describe(self, *fields: str) -> Self:
        """A row for each field (of those named, or all): type, count, missing, mean, std, min and max.

        Mean and deviation are those of numbers, least and greatest those of numbers and text.

        Raises:
            PlanError: this is one rank's share, or ``fields`` are no names.
        """
        read = relations.fields_of(self.plan, *_names("describe", fields)) if fields else self.plan
        return self._with(relations.whole(read, relations.Described()))

    def join(
        self,
        other: Chain,
        on: str | Sequence[str],
        how: Literal["inner", "left"] = "inner",
        *,
        suffix: str | None = None,
        **more: Any,
    ) -> Self:
        """Add to every sample the fields of those of ``other`` that have the same values of one or several fields.

        Samples stay in order; one that has several partners comes with each of them, one that has none is left out, or
        (``how="left"``) stays, with ``None`` in the other's fields. ``None`` is equal to ``None``. ``other`` is read
        whole, once in every process that joins. ``suffix`` renames its fields where both sides have them. Takes what
        ``map`` takes.

        Raises:
            PlanError: ``other`` is no dataset, or one rank's share; ``on`` is no name.
        """
        if not isinstance(other, Chain):
            raise PlanError(f"join needs a Dataset, not {type(other).__name__}")
        check_choice("how", how, ("inner", "left"))
        if other.plan.cut is not None and other.plan.cut.world > 1:
            raise PlanError(f"join needs all of the other dataset, which is cut for {other.plan.cut.world} ranks")
        way = relations.How(_names("join", (on,) if isinstance(on, str) else tuple(on)), how == "left", suffix)
        return self._then(relations.Join(relations.Side(other.plan, way), way, resources=resources_of("join", more)))


def _names(verb: str, fields: Sequence[Any]) -> tuple[str, ...]:
    names = tuple(fields)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise PlanError(f"{verb} needs names of fields, not {', '.join(map(repr, names)) or 'nothing'}")
    if len({*names}) < len(names):
        raise PlanError(f"{verb}: a field is named twice in {', '.join(map(repr, names))}")
    return names
