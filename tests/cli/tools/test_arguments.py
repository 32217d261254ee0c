from __future__ import annotations

import argparse

import pytest

from penstock.cli.tools.arguments import add_selection_arguments, field_names, sample_slice


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10:20", (10, 20, 1)), (":100", (0, 100, 1)), ("::10", (0, None, 10)), ("3:", (3, None, 1)), (":", (0, None, 1))],
)
def test_a_slice_is_start_stop_and_step(text: str, expected: tuple[int, int | None, int]) -> None:
    assert sample_slice(text) == expected


@pytest.mark.parametrize("text", ["", "5", "a:b", "-1:3", "1:2:0", "1:2:3:4"])
def test_a_text_that_is_not_a_slice_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a slice: write it like 10:20"):
        sample_slice(text)


@pytest.mark.parametrize("text", ["jpg cls", "jpg,cls", "JPG;cls", " jpg ,; cls "])
def test_field_names_may_be_separated_in_several_ways(text: str) -> None:
    assert field_names(text) == ["jpg", "cls"]


def test_a_list_without_field_names_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="' ,;' names no field: write names like"):
        field_names(" ,;")


def test_a_tool_may_give_the_short_option_for_counts_another_meaning() -> None:
    parser = argparse.ArgumentParser()
    add_selection_arguments(parser, count_flags=("--count",))
    parser.add_argument("-c", "--command")
    assert vars(parser.parse_args(["-c", "ls", "--count", "3"])) == {"command": "ls", "count": 3, "where": None}
