from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("argv", [["nothing-of-the-kind"], ["demo", "--nothing"]], ids=str)
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


def test_the_command_alone_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([])
    assert exited.value.code == 2
    assert "\n    pack " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "code", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_within_an_import_ends_the_command_as_any_other(
    sent: signal.Signals, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports(_: argparse.Namespace) -> int:
        try:
            signal.raise_signal(sent)
        except BaseException:
            raise ImportError("could not import module") from None  # as compiled modules do
        return 0

    monkeypatch.setattr(demo, "run", imports)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # libraries of other tests may replace it
    try:
        assert main(["demo"]) == code
        assert capsys.readouterr().err == f"penstock: {said}\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_exit_code_is_what_the_command_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda _: 7)
    assert main(["demo"]) == 7


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"penstock {penstock.__version__}\n"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("cat - <&-", "standard input is closed"),
        ("info {shard} >&-", "standard output is closed"),
        ("info {shard} >/dev/full", "No space left on device"),
        ("info {shard}.not 2>&-", ""),
    ],
)
def test_a_closed_standard_stream_is_one_line_and_exit_1(command: str, problem: str, tmp_path: Path) -> None:
    with penstock.TarWriter(tmp_path / "in.tar") as writer:
        writer.write({"__key__": "a", "cls": b"1"})
    words = command.format(shard=tmp_path / "in.tar")
    done = subprocess.run(f"{sys.executable} -m penstock {words}", shell=True, capture_output=True, text=True)
    assert done.stderr == (f"penstock: {problem}\n" if problem else "")
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pak", "a"], "there is no command 'pak': did you mean `penstock pack`?"),
        (["pack", "a", "b", "--fromat", "tar"], "unrecognized arguments: --fromat tar; did you mean --format?"),
        (["cat", "a.tar", "--whre=x"], "unrecognized arguments: --whre=x; did you mean --where?"),
    ],
)
def test_the_nearest_command_or_option_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {message}\n")


@pytest.mark.parametrize("command", ["info", "index", "show"])
def test_a_folder_of_other_files_is_described_with_what_reads_it(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cat").mkdir()
    for name in ("1.jpg", "2.jpg", "cat/3.JPG", "README"):
        (tmp_path / name).write_bytes(b"x")
    assert main([command, str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "no tar shards in this folder; 3 of its files are .jpg: read with ps.read_images" in error
    assert f"`penstock pack {tmp_path} FOLDER`" in error


def test_a_parquet_file_given_to_a_tar_tool_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert main(["show", str(tmp_path / "a.parquet")]) == 1
    assert "this is not a tar shard: read with ps.read_parquet, or make shards with" in capsys.readouterr().err
