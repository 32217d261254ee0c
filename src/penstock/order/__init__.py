"""The order of an epoch, its cuts, and the state of a reader: pure functions on integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.order.hashing import I64 as I64
    from penstock.order.hashing import U64 as U64
    from penstock.order.hashing import fold as fold
    from penstock.order.hashing import fold_into as fold_into
    from penstock.order.hashing import generators as generators
    from penstock.order.hashing import name_hash as name_hash
    from penstock.order.hashing import name_hashes as name_hashes
    from penstock.order.hashing import permutations as permutations
    from penstock.order.hashing import permute as permute
    from penstock.order.hashing import scramble as scramble
    from penstock.order.mixture import MixedOrder as MixedOrder
    from penstock.order.orders import NOT_FOUND as NOT_FOUND
    from penstock.order.orders import UNKNOWN as UNKNOWN
    from penstock.order.orders import ChainedOrder as ChainedOrder
    from penstock.order.orders import Order as Order
    from penstock.order.orders import PermutedOrder as PermutedOrder
    from penstock.order.orders import Refs as Refs
    from penstock.order.orders import RepeatedOrder as RepeatedOrder
    from penstock.order.orders import ShardOrder as ShardOrder
    from penstock.order.orders import ShuffledOrder as ShuffledOrder
    from penstock.order.orders import SlicedOrder as SlicedOrder
    from penstock.order.orders import Spans as Spans
    from penstock.order.orders import ZippedOrder as ZippedOrder
    from penstock.order.orders import scatter as scatter
    from penstock.order.pieces import CUTS as CUTS
    from penstock.order.pieces import ENDLESS as ENDLESS
    from penstock.order.pieces import GROUP_STRIDE as GROUP_STRIDE
    from penstock.order.pieces import Piece as Piece
    from penstock.order.pieces import cut as cut
    from penstock.order.pieces import head as head
    from penstock.order.pieces import join as join
    from penstock.order.pieces import merge as merge
    from penstock.order.pieces import size as size
    from penstock.order.pieces import tail as tail
    from penstock.order.pieces import total as total
    from penstock.order.state import OpenWindow as OpenWindow
    from penstock.order.state import State as State
    from penstock.order.state import is_state_number as is_state_number
    from penstock.order.state import recut as recut
    from penstock.order.subset import ExcludingOrder as ExcludingOrder
    from penstock.order.subset import SubsetOrder as SubsetOrder
    from penstock.order.subset import WorkerOrder as WorkerOrder
    from penstock.order.uncounted import UncountedOrder as UncountedOrder
    from penstock.order.uncounted import to_counted as to_counted
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
