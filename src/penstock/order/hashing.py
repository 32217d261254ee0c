"""The integer hash that every order and every sample's random generator is derived from.

It chains a splitmix64 finaliser over 64-bit words. It is implemented here so that no release of another library can
change an order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISeedSequence

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_FIRST, _SECOND, _GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
_MULTIPLIER = 0xD1342543DE82EF95  # odd and large: small keys and parts do not collide, as they would in a sum
_U_FIRST, _U_SECOND, _U_GOLDEN, _U_MULTIPLIER = map(np.uint64, (_FIRST, _SECOND, _GOLDEN, _MULTIPLIER))
_U27, _U30, _U31 = np.uint64(27), np.uint64(30), np.uint64(31)

MAX_SORTED_SIZE = 4096  # up to this size, sorting hashes is faster than the Feistel network and shuffles better
_ROUNDS = 4  # each half is replaced twice
_SEED_WORDS = 4  # 64-bit words that PCG64 requests from its seed


def scramble(x: U64) -> U64:
    """Mix the bits of every word, bijectively: each input bit flips about half of the output bits."""
    x = (x ^ (x >> _U30)) * _U_FIRST
    x = (x ^ (x >> _U27)) * _U_SECOND
    return x ^ (x >> _U31)


def fold(*parts: int) -> int:
    """Hash a sequence of integers of any sign and size, each taken modulo 2**64, into one 64-bit key."""
    key = 0
    for part in parts:
        key = (key * _MULTIPLIER + part + _GOLDEN) & _MASK
        key = ((key ^ (key >> 30)) * _FIRST) & _MASK
        key = ((key ^ (key >> 27)) * _SECOND) & _MASK
        key ^= key >> 31
    return key


def fold_into(keys: U64, part: int | U64 | I64) -> U64:
    """Fold one more integer into every key of an array: ``fold_into(fold(a), b)`` equals ``fold(a, b)``."""
    words = np.uint64(part & _MASK) if isinstance(part, int) else part.astype(np.uint64, copy=False)
    return scramble(keys * _U_MULTIPLIER + words + _U_GOLDEN)


def name_hash(name: str) -> int:
    """Return the 64-bit hash of a shard's name; it is the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def name_hashes(names: Iterable[str]) -> U64:
    """Return the hashes of several shard names as an array."""
    return np.fromiter((name_hash(name) for name in names), np.uint64)


def permutations(keys: U64, n: int) -> I64:
    """Return one permutation of ``[0, n)`` per key, as the rows of a matrix."""
    scores = scramble(keys[:, None] + np.arange(n, dtype=np.uint64) * _U_GOLDEN)
    return np.argsort(scores, axis=1, kind="stable")


def permute(key: int, n: int, i: I64) -> I64:
    """Evaluate the permutation of ``[0, n)`` that ``key`` selects at the indices ``i``.

    Up to ``MAX_SORTED_SIZE`` it sorts hashes. Above, it is a Feistel network over the next power of two, applied again
    to every value that falls outside ``[0, n)``; it needs no memory proportional to ``n``.
    """
    if n <= MAX_SORTED_SIZE:
        row: I64 = permutations(np.array([key & _MASK], np.uint64), n)[0][i]
        return row
    limit = np.uint64(n)
    bits = (n - 1).bit_length()
    keys = [np.uint64(fold(key, round_number)) for round_number in range(_ROUNDS)]
    x = _feistel(i.astype(np.uint64), keys, bits)
    outside = np.flatnonzero(x >= limit)
    while outside.size:
        x[outside] = _feistel(x[outside], keys, bits)
        outside = outside[x[outside] >= limit]
    return x.astype(np.int64)


def _feistel(x: U64, keys: list[np.uint64], bits: int) -> U64:
    """Permute ``[0, 2**bits)``; the halves may differ by a bit, so fewer than half of the values exceed ``n``."""
    shift = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    high, low = x >> shift, x & low_mask
    for round_number, key in enumerate(keys):
        if round_number % 2:
            low = low ^ (scramble(high + key) & low_mask)
        else:
            high = high ^ (scramble(low + key) & high_mask)
    return (high << shift) | low


class _HashedSeed(ISeedSequence):
    """A seed sequence of words that are already hashed; much cheaper than numpy's own ``SeedSequence``."""

    __slots__ = ("words",)

    def __init__(self, words: U64) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: npt.DTypeLike = np.uint32) -> npt.NDArray[np.uint32 | np.uint64]:
        if n_words == _SEED_WORDS and dtype is np.uint64:
            return self.words
        return scramble(self.words[0] + np.arange(1, n_words + 1, dtype=np.uint64) * _U_GOLDEN).astype(dtype)


def generators(keys: U64, stage_number: int) -> list[np.random.Generator]:
    """Return a fresh generator for every key; its stream depends only on the key and the stage's number."""
    steps = np.arange(1, _SEED_WORDS + 1, dtype=np.uint64) * _U_GOLDEN
    words = scramble(fold_into(keys, stage_number)[:, None] + steps)
    # The type stubs list only SeedSequence, but PCG64 accepts any ISeedSequence.
    return [np.random.Generator(np.random.PCG64(_HashedSeed(row))) for row in words]  # type: ignore[arg-type]
