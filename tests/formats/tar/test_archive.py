"""Headers are read in every variant and written so that others read them; samples are encoded as members."""

from __future__ import annotations

import io
import tarfile

import pytest

from penstock.errors import DataError
from penstock.formats.tar.archive import (
    END_MARKER,
    Extensions,
    _ustar_header,
    checksum_holds,
    compression_of,
    encode_sample,
    member_header,
    padded,
    parse_number,
)


@pytest.mark.parametrize("name", ["a", "000000001-x.jpg", "d/e.f", "k" * 100])
@pytest.mark.parametrize("size", [0, 1, 511, 123_456_789, 8**11 - 1])
def test_the_fast_path_writes_the_general_header(name: str, size: int) -> None:
    header = member_header(name.encode(), size)
    assert header == _ustar_header(name.encode(), size)
    info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    assert (info.name, info.size) == (name, size)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"00000000144\0", 100),
        (b"        144 ", 100),
        (b"144\0garbage!", 100),
        (b"000000000144", 100),
        (bytes(12), 0),
        (b" " * 12, 0),
        (b"\x80" + bytes(6) + b"\1" + bytes(4), 1 << 32),
    ],
)
def test_numbers_are_parsed_in_every_format(field: bytes, value: int) -> None:
    assert parse_number(field) == value


@pytest.mark.parametrize("field", [b"0000000008\0\0", b"-1\0", b"0x10\0", b"1_0\0", b"\xff" * 12, b"\x81" + bytes(11)])
def test_an_invalid_number_is_refused(field: bytes) -> None:
    with pytest.raises(ValueError, match="number"):
        parse_number(field)


@pytest.mark.parametrize(("size", "padded_size"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_members_fill_whole_blocks(size: int, padded_size: int) -> None:
    assert padded(size) == padded_size


def test_a_block_of_high_bytes_has_a_checksum_beyond_16_bits() -> None:
    head = bytearray(b"\xff" * 512)
    total = 255 * 504 + 8 * 32
    head[148:156] = b"%06o\0 " % total
    assert checksum_holds(bytes(head))
    head[148:156] = b"%06o\0 " % (total - 1)
    assert not checksum_holds(bytes(head))


def test_global_records_apply_until_they_are_overridden() -> None:
    extensions = Extensions()
    extensions.add(ord("g"), b"14 path=a.jpg\n")
    extensions.clear()
    assert extensions.path() == b"a.jpg"
    extensions.add(ord("x"), b"14 path=b.jpg\n")
    assert extensions.path() == b"b.jpg"
    extensions.clear()
    assert extensions.path() == b"a.jpg"


def test_a_tar_header_is_never_taken_for_compression() -> None:
    assert compression_of(member_header(b"BZh9.txt", 1)) is None
    assert compression_of(b"BZh9") == "bz2"


def test_an_encoded_sample_is_an_archive_that_tarfile_reads() -> None:
    encoded = encode_sample("d/k", {"txt": b"hello", "cls": b"3"})
    data = b"".join(encoded.pieces)
    assert (encoded.keys, encoded.field_names, encoded.nbytes) == (["d/k"], ("cls", "txt"), len(data))
    spans = zip(encoded.starts, encoded.sizes, strict=True)
    assert [data[start : start + size] for start, size in spans] == [b"3", b"hello"]
    with tarfile.open(fileobj=io.BytesIO(data + END_MARKER)) as archive:
        assert archive.getnames() == ["d/k.cls", "d/k.txt"]


def test_a_sample_without_fields_is_refused() -> None:
    with pytest.raises(DataError, match=r"without fields.*key: k"):
        encode_sample("k", {})
