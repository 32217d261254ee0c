"""Tar shards: read in place through an index, read front to back from a stream, and written.

Names are loaded on first use, so that tools which only copy samples do not import numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.blobs.compression import ArchiveLimits as ArchiveLimits
    from penstock.formats.tar.index import Index as Index
    from penstock.formats.tar.located import LocatedTar as LocatedTar
    from penstock.formats.tar.reader import TarReader as TarReader
    from penstock.formats.tar.scan import load_index as load_index
    from penstock.formats.tar.walker import iter_samples as iter_samples
    from penstock.formats.tar.writer import ShardWriter as ShardWriter
    from penstock.formats.tar.writer import TarWriter as TarWriter
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
