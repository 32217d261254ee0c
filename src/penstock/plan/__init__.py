"""WHAT is to be done: plans, stages, blocks. Opens nothing."""

from penstock.plan.arrange import Arrangement, At, Placed, Row, arrange, relaxed
from penstock.plan.block import Block, Context, Origin, Place, Skipped, Slot
from penstock.plan.collate import Pad, collate, column, is_tensor, pad, rows
from penstock.plan.ordering import (
    Choose,
    Combination,
    Make,
    Mix,
    OrderStage,
    Repeat,
    Shuffle,
    Slice,
    Union,
    Zip,
    check_branch,
)
from penstock.plan.plan import Plan, Reader, Source, Spots, StreamReader
from penstock.plan.stage import EachStage, Filter, FlatMap, GroupStage, Map, Stage, StreamStage
from penstock.plan.stages import (
    Batched,
    BatchedBy,
    Drop,
    FilterFn,
    FlatMapFn,
    LateShuffle,
    MapBatches,
    MapFn,
    MapTuple,
    Rename,
    Select,
    StreamLimit,
    StreamSkip,
    ToTuple,
    Unbatched,
)
from penstock.plan.values import (
    EVERYTHING,
    ByObject,
    Cut,
    EngineOptions,
    Fields,
    OnError,
    Resources,
    Scope,
    check_callable,
    check_choice,
    check_count,
    name_of,
    size_in_bytes,
    takes,
)

__all__ = [name for name in dir() if not name.startswith("_")]
