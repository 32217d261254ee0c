"""The quick header of ordinary members is the header."""

from __future__ import annotations

import tarfile

import pytest

from penstock.formats.tar.archive import _header, member_header


@pytest.mark.parametrize("name", ["a", "000000001-x.jpg", "d/e.f", "k" * 100])
@pytest.mark.parametrize("size", [0, 1, 511, 123_456_789, 8**11 - 1])
def test_a_plain_header_is_as_the_general_one(name: str, size: int) -> None:
    made = member_header(name.encode(), size)
    assert made == _header(name.encode(), size)
    info = tarfile.TarInfo.frombuf(made, "utf-8", "strict")
    assert (info.name, info.size) == (name, size)
