"""The description of a pipeline: plans, stages, blocks and expressions, as values that do not open their sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.plan.arrangement import Arrangement as Arrangement
    from penstock.plan.arrangement import BranchStage as BranchStage
    from penstock.plan.arrangement import PartStage as PartStage
    from penstock.plan.arrangement import PlacedStage as PlacedStage
    from penstock.plan.arrangement import Row as Row
    from penstock.plan.arrangement import arrange as arrange
    from penstock.plan.arrangement import chosen_from as chosen_from
    from penstock.plan.arrangement import resolved as resolved
    from penstock.plan.arrangement import unshuffled as unshuffled
    from penstock.plan.arrangement import with_choice as with_choice
    from penstock.plan.block import BatchRows as BatchRows
    from penstock.plan.block import Block as Block
    from penstock.plan.block import Context as Context
    from penstock.plan.block import Lineage as Lineage
    from penstock.plan.block import Origin as Origin
    from penstock.plan.block import Place as Place
    from penstock.plan.block import Skipped as Skipped
    from penstock.plan.block import Slot as Slot
    from penstock.plan.block import estimate_nbytes as estimate_nbytes
    from penstock.plan.collation import PAD_FIELD as PAD_FIELD
    from penstock.plan.collation import Pad as Pad
    from penstock.plan.collation import collate as collate
    from penstock.plan.collation import column as column
    from penstock.plan.collation import is_tensor as is_tensor
    from penstock.plan.collation import pad as pad
    from penstock.plan.collation import uncollate as uncollate
    from penstock.plan.columns import Columns as Columns
    from penstock.plan.columns import JoinableItems as JoinableItems
    from penstock.plan.columns import join_columns as join_columns
    from penstock.plan.columns import pick_rows as pick_rows
    from penstock.plan.expressions import Column as Column
    from penstock.plan.expressions import Condition as Condition
    from penstock.plan.expressions import ConditionFilter as ConditionFilter
    from penstock.plan.expressions import Expression as Expression
    from penstock.plan.expressions import WithColumns as WithColumns
    from penstock.plan.expressions import col as col
    from penstock.plan.expressions import expression as expression
    from penstock.plan.group_stages import Batched as Batched
    from penstock.plan.group_stages import BatchedBy as BatchedBy
    from penstock.plan.group_stages import LateShuffle as LateShuffle
    from penstock.plan.group_stages import StreamLimit as StreamLimit
    from penstock.plan.group_stages import StreamSkip as StreamSkip
    from penstock.plan.group_stages import Unbatched as Unbatched
    from penstock.plan.identity import Identity as Identity
    from penstock.plan.identity import exclusions as exclusions
    from penstock.plan.identity import parse_identity as parse_identity
    from penstock.plan.order_stages import Combination as Combination
    from penstock.plan.order_stages import Exclude as Exclude
    from penstock.plan.order_stages import Mix as Mix
    from penstock.plan.order_stages import OrderFactory as OrderFactory
    from penstock.plan.order_stages import OrderStage as OrderStage
    from penstock.plan.order_stages import Repeat as Repeat
    from penstock.plan.order_stages import Shuffle as Shuffle
    from penstock.plan.order_stages import Slice as Slice
    from penstock.plan.order_stages import Sort as Sort
    from penstock.plan.order_stages import SplitSide as SplitSide
    from penstock.plan.order_stages import Union as Union
    from penstock.plan.order_stages import Zip as Zip
    from penstock.plan.order_stages import check_branch as check_branch
    from penstock.plan.plan import Plan as Plan
    from penstock.plan.source import Located as Located
    from penstock.plan.source import Reader as Reader
    from penstock.plan.source import ShardCache as ShardCache
    from penstock.plan.source import Source as Source
    from penstock.plan.source import StreamReader as StreamReader
    from penstock.plan.source import Traits as Traits
    from penstock.plan.stage import EachStage as EachStage
    from penstock.plan.stage import Filter as Filter
    from penstock.plan.stage import FlatMap as FlatMap
    from penstock.plan.stage import GroupStage as GroupStage
    from penstock.plan.stage import Map as Map
    from penstock.plan.stage import Stage as Stage
    from penstock.plan.stage import StreamStage as StreamStage
    from penstock.plan.stage import sample_error as sample_error
    from penstock.plan.stages import Drop as Drop
    from penstock.plan.stages import FilterFn as FilterFn
    from penstock.plan.stages import FlatMapFn as FlatMapFn
    from penstock.plan.stages import MapBatches as MapBatches
    from penstock.plan.stages import MapFn as MapFn
    from penstock.plan.stages import MapTuple as MapTuple
    from penstock.plan.stages import Rename as Rename
    from penstock.plan.stages import Select as Select
    from penstock.plan.stages import SplitBy as SplitBy
    from penstock.plan.stages import ToTuple as ToTuple
    from penstock.plan.values import EVERYTHING as EVERYTHING
    from penstock.plan.values import ByObject as ByObject
    from penstock.plan.values import Cut as Cut
    from penstock.plan.values import EngineOptions as EngineOptions
    from penstock.plan.values import Fields as Fields
    from penstock.plan.values import OnError as OnError
    from penstock.plan.values import Recut as Recut
    from penstock.plan.values import Resources as Resources
    from penstock.plan.values import Scope as Scope
    from penstock.plan.values import SharedStages as SharedStages
    from penstock.plan.values import check_callable as check_callable
    from penstock.plan.values import check_choice as check_choice
    from penstock.plan.values import check_count as check_count
    from penstock.plan.values import check_flag as check_flag
    from penstock.plan.values import check_seconds as check_seconds
    from penstock.plan.values import kind_of as kind_of
    from penstock.plan.values import name_of as name_of
    from penstock.plan.values import no_field as no_field
    from penstock.plan.values import size_in_bytes as size_in_bytes
    from penstock.plan.values import takes_mode as takes_mode
    from penstock.plan.values import takes_parameter as takes_parameter
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
