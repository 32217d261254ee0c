"""Operations that need every sample: groups, sorting, distinct values, joins; each returns a dataset.

Samples that are columns are processed as columns. Samples beyond the memory limit are spilled to a temporary file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.dataset.relations.describe import Described as Described
    from penstock.dataset.relations.distinct import Distinct as Distinct
    from penstock.dataset.relations.distinct import unique as unique
    from penstock.dataset.relations.groups import Aggregated as Aggregated
    from penstock.dataset.relations.groups import Groups as Groups
    from penstock.dataset.relations.join import Join as Join
    from penstock.dataset.relations.join import JoinOptions as JoinOptions
    from penstock.dataset.relations.join import RightSide as RightSide
    from penstock.dataset.relations.key_values import gathered as gathered
    from penstock.dataset.relations.sort import Sorted as Sorted
    from penstock.dataset.relations.source import SummarySource as SummarySource
    from penstock.dataset.relations.source import memory_of as memory_of
    from penstock.dataset.relations.source import runs_of as runs_of
    from penstock.dataset.relations.source import select_fields as select_fields
    from penstock.dataset.relations.source import summarized as summarized
    from penstock.dataset.relations.stratify import Strata as Strata
    from penstock.dataset.relations.stratify import Stratified as Stratified
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
