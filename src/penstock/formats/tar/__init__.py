"""Tar shards: read in place through an index, front to back from a stream, and written."""

from penstock.formats.tar.compression import ArchiveLimits
from penstock.formats.tar.index import Index
from penstock.formats.tar.reader import TarReader
from penstock.formats.tar.scan import load_index
from penstock.formats.tar.spots import Spots
from penstock.formats.tar.stream import samples
from penstock.formats.tar.writer import ShardWriter, TarWriter

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
