"""Group, sort, distinct and join, by DuckDB and Arrow: only columns of keys are loaded, samples are not moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.relations.describe import Described as Described
    from penstock.relations.describe import type_of as type_of
    from penstock.relations.distinct import Distinct as Distinct
    from penstock.relations.distinct import unique as unique
    from penstock.relations.groups import Aggregated as Aggregated
    from penstock.relations.groups import Groups as Groups
    from penstock.relations.join import Join as Join
    from penstock.relations.join import JoinOptions as JoinOptions
    from penstock.relations.join import OtherSide as OtherSide
    from penstock.relations.keys import gathered as gathered
    from penstock.relations.sort import Sorted as Sorted
    from penstock.relations.sort import SortedPositions as SortedPositions
    from penstock.relations.sort import can_sort_positions as can_sort_positions
    from penstock.relations.source import select_fields as select_fields
    from penstock.relations.source import summarized as summarized
    from penstock.relations.sql import Queried as Queried
    from penstock.relations.stratify import Strata as Strata
    from penstock.relations.stratify import Stratified as Stratified
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
