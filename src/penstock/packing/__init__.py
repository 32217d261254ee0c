"""Writes any dataset to shards, local or remote: in one exact order, resuming where a run was interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.landing import Packed as Packed
    from penstock.packing.packer import pack as pack
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
