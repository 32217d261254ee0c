"""Header fields, PAX records and the rules of grouping, one by one."""

from __future__ import annotations

import pytest

from penstock.formats.tar.archive import Extensions, checksum_holds, number, padded
from penstock.formats.tar.grouper import END, GAP, Entry, Grouper


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
def test_numbers_are_read_in_every_form(field: bytes, value: int) -> None:
    assert number(field) == value


@pytest.mark.parametrize("field", [b"0000000008\0\0", b"-1\0", b"0x10\0", b"1_0\0", b"\xff" * 12, b"\x81" + bytes(11)])
def test_what_is_no_number_is_refused(field: bytes) -> None:
    with pytest.raises(ValueError, match="number"):
        number(field)


@pytest.mark.parametrize(("size", "room"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_members_fill_whole_blocks(size: int, room: int) -> None:
    assert padded(size) == room


def test_a_block_of_high_bytes_has_a_checksum_beyond_16_bits() -> None:
    head = bytearray(b"\xff" * 512)
    total = 255 * 504 + 8 * 32
    head[148:156] = b"%06o\0 " % total
    assert checksum_holds(bytes(head))
    head[148:156] = b"%06o\0 " % (total - 1)
    assert not checksum_holds(bytes(head))


def test_global_records_hold_until_they_are_overruled() -> None:
    extensions = Extensions()
    extensions.read(ord("g"), b"14 path=a.jpg\n")
    extensions.forget()
    assert extensions.path() == b"a.jpg"
    extensions.read(ord("x"), b"14 path=b.jpg\n")
    assert extensions.path() == b"b.jpg"
    extensions.forget()
    assert extensions.path() == b"a.jpg"


def grouped(*names: bytes) -> tuple[list[Entry[int]], int]:
    grouper: Grouper[int] = Grouper()
    entries: list[Entry[int]] = []
    for value, name in enumerate(names):
        trouble = "trouble" if name in (GAP, END) else None
        entries += grouper.push(name, value, trouble)
    return [*entries, *grouper.finish()], grouper.skipped


def test_consecutive_members_with_one_key_are_one_sample() -> None:
    entries, skipped = grouped(b"./a.x", b"a.y", b"b.x", b"README", b"b.y")
    assert entries == [(b"a", ("x", "y"), [0, 1], None, False), (b"b", ("x", "y"), [2, 4], None, False)]
    assert skipped == 1


def test_damage_takes_along_what_it_may_have_torn() -> None:
    entries, _ = grouped(b"a.x", b"a.y", b"b.x", GAP, b"b.y", b"c.x", b"c.y")
    assert [(key, lost) for key, _, _, _, lost in entries] == [(b"a", False), (b"a", True), (b"c", False)]
    assert entries[1][3] == "trouble; last good key: 'a'"


def test_several_damages_without_a_good_sample_between_are_one_loss() -> None:
    entries, _ = grouped(b"a.x", b"a.y", b"b.x", GAP, b"b.y", GAP, b"c.y", GAP)
    assert [lost for *_, lost in entries] == [False, True]


def test_a_whole_sample_between_two_damages_is_kept() -> None:
    entries, _ = grouped(b"a.x", b"b.x", GAP, b"c.x", GAP, b"d.x")
    assert [(key, lost) for key, _, _, _, lost in entries] == [
        (b"a", False),
        (b"b", False),
        (b"b", True),
        (b"c", False),
        (b"c", True),
        (b"d", False),
    ]


def test_the_end_marker_closes_a_sample_that_nothing_vouches_for() -> None:
    entries, _ = grouped(b"a.x", END)
    assert [(key, lost) for key, _, _, _, lost in entries] == [(b"a", False), (b"a", True)]
