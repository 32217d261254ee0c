"""gzip decompression within limits, reproducible compression."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs import gz
from penstock.codecs.limits import Limits, OverLimit


@given(st.binary(max_size=5000))
def test_compressed_data_round_trips(data: bytes) -> None:
    assert gz.decompress(gz.compress(data), Limits()) == data


def test_compression_is_reproducible_and_readable_by_gzip() -> None:
    data = b"the same words " * 100
    assert gz.compress(data) == gz.compress(data)
    assert gz.compress(data)[4:8] == b"\0\0\0\0", "a timestamp would differ from run to run"
    assert gzip.decompress(gz.compress(data)) == data


def test_members_are_joined_and_padding_is_ignored() -> None:
    data = gzip.compress(b"one, ") + gzip.compress(b"") + gzip.compress(b"two") + bytes(512)
    assert gz.decompress(data, Limits()) == b"one, two"


def test_a_bomb_is_refused_by_its_size() -> None:
    bomb = gzip.compress(bytes(3_000_000))
    with pytest.raises(OverLimit, match="exceeds the limit of 2000000 bytes"):
        gz.decompress(bomb, Limits(bytes=2_000_000))


def test_a_bomb_is_refused_by_its_ratio() -> None:
    bomb = gzip.compress(bytes(30_000_000))
    with pytest.raises(OverLimit, match="beyond 100 times its size"):
        gz.decompress(bomb, Limits(ratio=100))


def test_a_bomb_of_many_members_is_refused() -> None:
    bomb = gzip.compress(bytes(900_000)) * 3
    with pytest.raises(OverLimit):
        gz.decompress(bomb, Limits(bytes=2_000_000))


def test_content_at_the_limit_passes() -> None:
    assert len(gz.decompress(gzip.compress(bytes(1000)), Limits(bytes=1000))) == 1000
    with pytest.raises(OverLimit):
        gz.decompress(gzip.compress(bytes(1001)), Limits(bytes=1000))


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_truncated_data_is_an_error(cut: int) -> None:
    with pytest.raises(ValueError, match="truncated gzip"):
        gz.decompress(gzip.compress(b"some words that matter")[:-cut], Limits())


def test_damaged_data_and_other_content_are_errors() -> None:
    good = bytearray(gzip.compress(b"some words that matter"))
    good[-6] ^= 1
    with pytest.raises(ValueError, match="damaged gzip"):
        gz.decompress(bytes(good), Limits())
    with pytest.raises(ValueError, match="not gzip data"):
        gz.decompress(zlib.compress(b"x"), Limits())
    with pytest.raises(ValueError, match="not gzip data"):
        gz.decompress(b"", Limits())
    with pytest.raises(ValueError, match="not gzip data"):
        gz.decompress(gzip.compress(b"x") + b"rubbish", Limits())
