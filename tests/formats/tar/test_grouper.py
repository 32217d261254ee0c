"""Members are grouped into samples, and losses keep their place among them."""

from __future__ import annotations

from penstock.formats.tar.grouper import BAD_END, LOST_RANGE, Grouper, SampleEntry


def group(*names: bytes) -> tuple[list[SampleEntry[int]], int]:
    """Push members, with their positions as values, and return the entries and the number of skipped members."""
    grouper: Grouper[int] = Grouper()
    entries: list[SampleEntry[int]] = []
    for value, name in enumerate(names):
        problem = "damaged" if name in (LOST_RANGE, BAD_END) else None
        entries += grouper.push(name, value, problem)
    return [*entries, *grouper.finish()], grouper.skipped.total()


def test_consecutive_members_with_one_key_are_one_sample() -> None:
    entries, skipped = group(b"./a.x", b"a.y", b"b.x", b"README", b"b.y")
    assert entries == [(b"a", ("x", "y"), [0, 1], None, False), (b"b", ("x", "y"), [2, 4], None, False)]
    assert skipped == 1


def test_a_sample_that_damage_may_have_torn_is_part_of_the_loss() -> None:
    entries, _ = group(b"a.x", b"a.y", b"b.x", LOST_RANGE, b"b.y", b"c.x", b"c.y")
    assert [(key, lost) for key, _, _, _, lost in entries] == [(b"a", False), (b"a", True), (b"c", False)]
    assert entries[1][3] == "damaged; last good key: 'a'"


def test_damage_without_a_good_sample_in_between_is_one_loss() -> None:
    entries, _ = group(b"a.x", b"a.y", b"b.x", LOST_RANGE, b"b.y", LOST_RANGE, b"c.y", LOST_RANGE)
    assert [lost for *_, lost in entries] == [False, True]


def test_a_complete_sample_between_two_losses_is_kept() -> None:
    entries, _ = group(b"a.x", b"b.x", LOST_RANGE, b"c.x", LOST_RANGE, b"d.x")
    assert [(key, lost) for key, _, _, _, lost in entries] == [
        (b"a", False),
        (b"b", False),
        (b"b", True),
        (b"c", False),
        (b"c", True),
        (b"d", False),
    ]


def test_a_bad_end_does_not_tear_the_sample_before_it() -> None:
    entries, _ = group(b"a.x", BAD_END)
    assert [(key, lost) for key, _, _, _, lost in entries] == [(b"a", False), (b"a", True)]


def test_a_run_of_samples_equals_its_members_pushed_one_by_one() -> None:
    names = [b"%d.%b" % (number, field) for number in range(9) for field in (b"x", b"y")]
    one_by_one, _ = group(*names)
    grouper: Grouper[int] = Grouper()
    entries = [entry for value in range(4) for entry in grouper.push(names[value], value)]
    run = grouper.push_run(names, range(len(names)), 4)
    assert run is not None
    keys, kind, values = run
    entries += [(key, kind, values[2 * at : 2 * at + 2], None, False) for at, key in enumerate(keys)]
    assert len(keys) > 1
    assert [*entries, *grouper.finish()] == one_by_one
