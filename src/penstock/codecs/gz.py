"""Fields stored under a ``.gz`` extension: bounded decompression, reproducible compression."""

from __future__ import annotations

import gzip
import zlib

from penstock.codecs.limits import Limits

MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's number for the largest window with a gzip header and trailer


def decompress(data: bytes, limits: Limits) -> bytes:
    """Return what a gzip file holds, all its members joined, checksums verified.

    Memory stays within the limits whatever the data claims.

    Raises:
        OverLimit: The result exceeds ``limits.bytes`` or ``limits.ratio``.
        ValueError: The data is not gzip, is damaged or is cut short.
    """
    allowed = min(limits.bytes, limits.unfolded(len(data)))
    parts: list[bytes] = []
    size, rest = 0, data
    while True:
        part, rest = _member(rest, allowed - size)
        parts.append(part)
        size += len(part)
        if size > allowed:
            limits.check_bytes(size, "gzip content")
            limits.check_ratio(len(data), size, "gzip content")
        # Zeros may pad the last member up to a block.
        rest = rest.lstrip(b"\0")
        if not rest:
            return parts[0] if len(parts) == 1 else b"".join(parts)


def compress(data: bytes) -> bytes:
    """Return ``data`` as one gzip member without a time stamp: equal data gives equal bytes."""
    return gzip.compress(data, compresslevel=6, mtime=0)


def _member(data: bytes, allowed: int) -> tuple[bytes, bytes]:
    """One member's content, at most one byte more than ``allowed``, and the data after it."""
    if not data.startswith(MAGIC):
        raise ValueError(f"not gzip data: it starts with {bytes(data[:8])!r}")
    unfold = zlib.decompressobj(_GZIP_WINDOW)
    try:
        content = unfold.decompress(data, allowed + 1)
    except zlib.error as exc:
        raise ValueError(f"damaged gzip data: {exc}") from exc
    if not unfold.eof and len(content) <= allowed:
        raise ValueError(f"truncated gzip data: {len(data)} bytes end in the middle of a member")
    return content, unfold.unused_data
