"""CRC-32, by the fastest library that is installed."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32 as crc32  # ten times as fast as zlib's
except ImportError:
    from zlib import crc32 as crc32
