"""gzip for fields with a ``.gz`` extension: bounded decompression, reproducible compression."""

from __future__ import annotations

import gzip
import zlib

from penstock.codecs.limits import Limits

GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 31  # zlib's code for the largest history buffer with a gzip header and trailer


def decompress(data: bytes, limits: Limits) -> bytes:
    """Return the content of a gzip file, with all its members joined and their checksums verified.

    Memory stays within the limits whatever sizes the data declares.

    Raises:
        OverLimit: The result exceeds ``limits.bytes`` or ``limits.ratio``.
        ValueError: The data is not gzip, is damaged or is truncated.
    """
    max_bytes = min(limits.bytes, limits.max_expanded_bytes(len(data)))
    contents: list[bytes] = []
    size, rest = 0, data
    while True:
        content, rest = _decompress_member(rest, max_bytes - size)
        contents.append(content)
        size += len(content)
        if size > max_bytes:
            limits.check_bytes(size, "gzip content")
            limits.check_ratio(len(data), size, "gzip content")
        # Zeros may pad the last member to a block boundary, as on tapes.
        rest = rest.lstrip(b"\0")
        if not rest:
            return contents[0] if len(contents) == 1 else b"".join(contents)


def compress(data: bytes) -> bytes:
    """Return ``data`` as one gzip member without a timestamp, so that equal data gives equal bytes."""
    return gzip.compress(data, compresslevel=6, mtime=0)


def _decompress_member(data: bytes, max_bytes: int) -> tuple[bytes, bytes]:
    """Return the content of the first member, at most ``max_bytes + 1`` bytes, and the data after that member."""
    if not data.startswith(GZIP_MAGIC):
        raise ValueError(f"not gzip data: it starts with {bytes(data[:8])!r}")
    decompressor = zlib.decompressobj(_GZIP_WBITS)
    try:
        content = decompressor.decompress(data, max_bytes + 1)
    except zlib.error as exc:
        raise ValueError(f"damaged gzip data: {exc}") from exc
    if not decompressor.eof and len(content) <= max_bytes:
        raise ValueError(f"truncated gzip data: {len(data)} bytes end in the middle of a member")
    return content, decompressor.unused_data
