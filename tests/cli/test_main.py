from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest

import penstock
from penstock.cli import COMMANDS, demo, main
from penstock.cli.tools import TOOLS
from penstock.errors import DataError


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert [name for name in COMMANDS | TOOLS if not re.search(rf"^    {name}\s", out, re.MULTILINE)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert f"usage: penstock {name}" in capsys.readouterr().out


def test_the_version_is_that_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nothing-of-the-kind"], ["demo", "--nothing"]], ids=str)
def test_a_usage_error_exits_with_2_and_prints_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: penstock")


def test_a_penstock_error_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise DataError("the header is damaged", "a.tar", "0001")

    monkeypatch.setattr(demo, "run", fail)
    assert main(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "penstock: the header is damaged (shard: a.tar, key: 0001)\n"


def test_an_unexpected_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


def test_an_interrupt_is_one_line_and_exit_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "penstock: interrupted\n"


def test_the_exit_code_is_what_the_command_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda _: 7)
    assert main(["demo"]) == 7


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"penstock {penstock.__version__}\n"
