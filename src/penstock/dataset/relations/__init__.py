"""Operations that need every sample: groups, sorting, distinct values, joins; each returns a dataset.

Samples that are columns are processed as columns. What exceeds the memory limit is spilled to a temporary file.
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
    from penstock.dataset.relations.join import How as How
    from penstock.dataset.relations.join import Join as Join
    from penstock.dataset.relations.join import Side as Side
    from penstock.dataset.relations.key_values import gathered as gathered
    from penstock.dataset.relations.sort import Sorted as Sorted
    from penstock.dataset.relations.source import Whole as Whole
    from penstock.dataset.relations.source import fields_of as fields_of
    from penstock.dataset.relations.source import memory_of as memory_of
    from penstock.dataset.relations.source import runs_of as runs_of
    from penstock.dataset.relations.source import whole as whole
    from penstock.dataset.relations.stratify import Strata as Strata
    from penstock.dataset.relations.stratify import Stratified as Stratified
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
