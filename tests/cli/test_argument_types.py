from __future__ import annotations

import argparse

import pytest

from penstock.cli.argument_types import count, port_number, positive_count, seconds, size_argument, usage_error


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("12", 12), ("1e6", 1_000_000), ("1_000", 1000), ("3.0", 3)])
def test_a_count_is_a_whole_number(text: str, number: int) -> None:
    assert count(text) == number
    assert type(count(text)) is int


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "", "inf", "nan"])
def test_a_text_that_is_not_a_count_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of at least 0"):
        count(text)


def test_a_positive_count_is_above_zero() -> None:
    assert positive_count("1") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="'0' is not a whole number of at least 1"):
        positive_count("0")


def test_a_port_has_sixteen_bits() -> None:
    assert (port_number("0"), port_number("65535")) == (0, 65535)
    with pytest.raises(argparse.ArgumentTypeError, match="'99999' is not a port: give a number from 0 to 65535"):
        port_number("99999")


@pytest.mark.parametrize(
    ("text", "size"), [("1e9", 1e9), ("500MB", 500e6), ("2 kb", 2000), ("1.5G", 1.5e9), ("10", 10), ("1TB", 1e12)]
)
def test_a_size_may_have_a_unit(text: str, size: float) -> None:
    assert size_argument(text) == size


@pytest.mark.parametrize("text", ["0", "-5", "x", "5PB", "1.2.3", "1e999", ""])
def test_a_text_that_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size in bytes: write it like 1e9 or 500MB"):
        size_argument(text)


@pytest.mark.parametrize("text", ["0", "-1", "x", "inf", "nan"])
def test_seconds_are_finite_and_above_zero(text: str) -> None:
    assert seconds("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of seconds above zero"):
        seconds(text)


def test_a_usage_error_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        usage_error("-a does not work with -b")
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "penstock: -a does not work with -b\n")
