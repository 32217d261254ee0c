"""How a plan runs: serially, on threads and processes, or on Ray. Engines see scopes and resources, not stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.engines.cached.stages import CacheResults as CacheResults
    from penstock.engines.cached.stages import check_cachable as check_cachable
    from penstock.engines.consumer import Consumer as Consumer
    from penstock.engines.consumer import ConsumerHost as ConsumerHost
    from penstock.engines.consumer import ConsumerLost as ConsumerLost
    from penstock.engines.cursor import AnyCursor as AnyCursor
    from penstock.engines.cursor import Start as Start
    from penstock.engines.cursor import StartPart as StartPart
    from penstock.engines.lanes import Lanes as Lanes
    from penstock.engines.lineage import COLUMNS as COLUMNS
    from penstock.engines.lineage import DELIVERED as DELIVERED
    from penstock.engines.lineage import DROPPED as DROPPED
    from penstock.engines.lineage import INDEX as INDEX
    from penstock.engines.lineage import ITEM as ITEM
    from penstock.engines.lineage import KIND as KIND
    from penstock.engines.lineage import LEAF as LEAF
    from penstock.engines.lineage import OUTPUT as OUTPUT
    from penstock.engines.lineage import PADDED as PADDED
    from penstock.engines.lineage import PASSED as PASSED
    from penstock.engines.lineage import POSITION as POSITION
    from penstock.engines.lineage import REPEATED as REPEATED
    from penstock.engines.lineage import SHARD as SHARD
    from penstock.engines.local.engine import closed_at_exit as closed_at_exit
    from penstock.engines.meter import Event as Event
    from penstock.engines.meter import Meters as Meters
    from penstock.engines.options import EngineName as EngineName
    from penstock.engines.options import engine_options as engine_options
    from penstock.engines.pipeline import Pipeline as Pipeline
    from penstock.engines.pipeline import Served as Served
    from penstock.engines.pipeline import split_problem as split_problem
    from penstock.engines.program import Program as Program
    from penstock.engines.restoring import EpochStart as EpochStart
    from penstock.engines.restoring import Restored as Restored
    from penstock.engines.restoring import is_untouched as is_untouched
    from penstock.engines.restoring import make_state as make_state
    from penstock.engines.restoring import restore as restore
    from penstock.engines.restoring import start_at as start_at
    from penstock.engines.restoring import state_at as state_at
    from penstock.engines.run import ENGINES as ENGINES
    from penstock.engines.run import DeliveryCallback as DeliveryCallback
    from penstock.engines.run import Run as Run
    from penstock.engines.run import check_limit as check_limit
    from penstock.engines.run import log_skipped as log_skipped
    from penstock.engines.run import start_run as start_run
    from penstock.engines.segments import Level as Level
    from penstock.engines.segments import Segment as Segment
    from penstock.engines.stats import Stats as Stats
    from penstock.engines.stats import snapshot as snapshot
    from penstock.engines.upcoming import shard_uses as shard_uses
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
