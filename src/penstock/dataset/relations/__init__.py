"""What needs to see every sample: groups, order by value, distinct values, joins; each is a dataset again.

Where samples are columns the work is done by columns. What does not fit into memory is put on the disk for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.later import later

if TYPE_CHECKING:
    from penstock.dataset.relations.describing import Described
    from penstock.dataset.relations.distinct import Distinct, unique
    from penstock.dataset.relations.grouping import Aggregated, Groups
    from penstock.dataset.relations.joining import How, Join, Side
    from penstock.dataset.relations.sorting import Sorted
    from penstock.dataset.relations.source import Whole, fields_of, memory_of, runs_of, whole
    from penstock.dataset.relations.stratifying import Strata, Stratified
    from penstock.dataset.relations.values import gathered

__all__ = [
    "Aggregated",
    "Described",
    "Distinct",
    "Groups",
    "How",
    "Join",
    "Side",
    "Sorted",
    "Strata",
    "Stratified",
    "Whole",
    "fields_of",
    "gathered",
    "memory_of",
    "runs_of",
    "unique",
    "whole",
]

__getattr__ = later(
    __name__,
    {
        "Aggregated": "grouping",
        "Described": "describing",
        "Distinct": "distinct",
        "Groups": "grouping",
        "How": "joining",
        "Join": "joining",
        "Side": "joining",
        "Sorted": "sorting",
        "Strata": "stratifying",
        "Stratified": "stratifying",
        "Whole": "source",
        "fields_of": "source",
        "gathered": "values",
        "memory_of": "source",
        "runs_of": "source",
        "unique": "distinct",
        "whole": "source",
    },
)
