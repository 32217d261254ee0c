"""How every command behaves: help at once, codes, one line for what is wrong, no half files, pages that are true."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import pytest

from penstock.cli import COMMANDS, main, parser_of, reference
from penstock.cli.tools import OLD_NAMES, TOOLS

ROOT = Path(__file__).resolve().parents[2]
ALL = sorted(COMMANDS | TOOLS)
HEAVY = {"numpy", "torch", "pyarrow", "ray", "PIL", "penstock.engines", "penstock.formats", "penstock.packing"}


@pytest.mark.parametrize("name", ALL)
def test_help_shows_examples_that_the_parser_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert re.search(r"^examples?:", shown, re.MULTILINE), "no example"
    assert f"penstock {name}" in shown.partition("example")[2]


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    script = (
        "import sys, time, contextlib, io, json\nbegun = time.process_time()\nfrom penstock.cli import main\n"
        f"for name in {ALL!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        main([name, '--help'])\n"
        "print(json.dumps([time.process_time() - begun, sorted(sys.modules)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout)
    assert not HEAVY & set(modules)
    assert seconds < 0.2 * len(ALL) / 3  # of the processor: each far below its 200 ms


def test_no_command_shows_a_traceback_for_what_a_user_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    none = str(tmp_path / "none.tar")
    (tmp_path / "file").write_text("x")
    for words in (
        ["cat", none],
        ["cat", str(tmp_path)],
        ["split", none, "-o", str(tmp_path / "o")],
        ["split", none, "-o", str(tmp_path / "file" / "o")],
        ["sort", none],
        ["show", none],
        ["tsv", none],
        ["first", none],
        ["mix", none, none],
        ["mix", str(tmp_path / "none.yaml")],
        ["create", str(tmp_path / "none.tsv")],
        ["proc", "-c", "true", none],
        ["proc", "-c", "true", none, "-o", str(tmp_path / "x-{}.tar")],
        ["proc", "--python", "none:none", none],
        ["info", none],
        ["index", none],
        ["verify", none],
        ["pack", none, str(tmp_path / "o")],
        ["cat", "nowhere://x/y.tar"],
    ):
        assert main(words) == 1, words
        told = capfd.readouterr()
        lines = told.err.splitlines() + [line for line in told.out.splitlines() if words[0] == "verify"]
        assert 1 <= len(lines) <= 2, (words, told.err)
        assert "Traceback" not in told.err


@pytest.mark.parametrize(
    "words",
    [
        ["cat", "-c", "-1"],
        ["cat", "--slice", "1"],
        ["cat", "--where", "a b", "x.tar"],
        ["cat", "--rename", "{none}", "x.tar"],
        ["cat", "-o"],
        ["split", "-s", "0"],
        ["split", "-n", "x"],
        ["split", "-o", "-", "x.tar"],
        ["sort", "-S", "weight"],
        ["tsv", "-F", "xls"],
        ["first", "-S", "a(b)", "x.tar"],
        ["proc", "x.tar"],
        ["proc", "-c", "a", "--python", "b:c", "x.tar"],
        ["proc", "-c", "a", "--timeout", "0", "x.tar"],
        ["proc", "-c", "a", "--decode", "pil", "x.tar"],
        ["proc", "-c", "a", "--engine", "ray", "x.tar"],
        ["proc", "-c", "a", "-o", "{}.tar"],
        ["proc", "-s", "/none", "x.tar"],
        ["mix", "-w", "1", "a.tar", "b.tar"],
        ["mix", "-w", "a,b", "a.tar", "b.tar"],
        ["mix", "-w", "0,0", "a.tar", "b.tar"],
        ["create", "-k", "x", "p.tsv"],
        ["completion", "tcsh"],
        ["pack", "a", "b", "--max-side", "0"],
        ["pack", "a", "b", "--max-bytes", "x"],
        ["pack", "a", "b", "--quality", "90"],
        ["pack", "a", "b", "--compress", "xz", "--format", "parquet"],
        ["convert", "a", "b", "--workers", "0"],
        ["process", "a.py:f", "in", "--workers", "0"],
        ["process", "a.py:f", "in", "--metadata", "rows.xls"],
        ["process", "a.py", "in"],
        ["info", "a", "--workers", "0"],
    ],
    ids=" ".join,
)
def test_a_wrong_call_exits_with_2(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    told = capfd.readouterr()
    assert told.out == ""
    assert "Traceback" not in told.err
    assert told.err


def test_the_page_of_commands_is_what_the_parsers_say() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == reference.page(), (
        "python -m penstock.cli.reference > docs/commands.md"
    )


def test_the_page_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    page = reference.page()
    for name in ALL:
        part = page.partition(f"\n## penstock {name}\n")[2].partition("\n## ")[0]
        for action in parser_of(name)._actions:
            if action.help != "==SUPPRESS==" and action.dest != "help":
                assert all(word in part for word in action.option_strings), (name, action)


def test_the_old_names_are_installed() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {name for name, where in scripts.items() if where == "penstock.cli:old_name"} == set(OLD_NAMES)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ALL)
    assert "maxshards" in text


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (["penstock", "sp"], ["split"]),
        (["penstock", "split", "--max"], ["--max-size", "--maxshards", "--max-shards"]),
        (["penstock", "sort", "-S", "sh"], ["shuffle"]),
        (["penstock", "cat", "x"], []),
    ],
)
def test_bash_completes(typed: list[str], wanted: list[str]) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    script = 'eval "$("$0" -m penstock completion bash)"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _penstock; '
    done = subprocess.run(
        [bash, "-c", script + 'printf "%s\\n" "${COMPREPLY[@]}"', sys.executable, *typed],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == sorted(wanted)


@pytest.mark.parametrize("words", [["cat"], ["sort"], ["split"]])
def test_ctrl_c_leaves_no_half_file(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    fifo = tmp_path / "in.tar"
    os.mkfifo(fifo)
    shard = subprocess.run(["tar", "-cf", "-", "-C", str(ROOT), "README.md"], stdout=subprocess.PIPE, check=True).stdout
    run = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words, str(fifo), "-o", str(out / "x.tar")], stderr=subprocess.PIPE
    )
    with open(fifo, "wb") as file:
        file.write(shard[:-5120])
        file.flush()
        time.sleep(0.4)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=30)
    assert (run.returncode, said) == (130, b"penstock: interrupted\n")
    assert list(out.iterdir()) == []


def test_an_archive_is_not_written_to_a_terminal_nor_read_from_one(tmp_path: Path) -> None:
    script = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    for words in (["cat", "x.tar"], ["cat"]):
        done = subprocess.run(
            [sys.executable, "-c", script, sys.executable, "-m", "penstock", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "terminal" in done.stdout or "nothing to read" in done.stdout


def test_an_interrupt_inside_any_code_ends_with_130(tmp_path: Path) -> None:
    (tmp_path / "stub.py").write_text(
        textwrap.dedent(
            """
            import sys
            from types import SimpleNamespace

            from penstock import cli

            def run(args):
                exec("raise KeyboardInterrupt")  # as a dataclass is made

            cli.module_of = lambda name: SimpleNamespace(arguments=lambda parser: None, run=run)
            sys.exit(cli.main(["demo"]))
            """
        )
    )
    done = subprocess.run([sys.executable, "-m", "stub"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "penstock: interrupted\n")
