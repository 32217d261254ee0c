"""Tar shards: read in place through an index, front to back from a stream, and written.

Names are loaded when they are first used: whoever only copies samples needs no numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.later import later

if TYPE_CHECKING:
    from penstock.formats.tar.compression import ArchiveLimits
    from penstock.formats.tar.index import Index
    from penstock.formats.tar.reader import TarReader
    from penstock.formats.tar.scan import load_index
    from penstock.formats.tar.spots import Spots
    from penstock.formats.tar.stream import samples
    from penstock.formats.tar.writer import ShardWriter, TarWriter

_WHERE = {
    "ArchiveLimits": "unpacking",
    "Index": "index",
    "ShardWriter": "writer",
    "Spots": "spots",
    "TarReader": "reader",
    "TarWriter": "writer",
    "load_index": "scan",
    "samples": "stream",
}

__all__ = [
    "ArchiveLimits",
    "Index",
    "ShardWriter",
    "Spots",
    "TarReader",
    "TarWriter",
    "load_index",
    "samples",
]

__getattr__ = later(__name__, _WHERE)
