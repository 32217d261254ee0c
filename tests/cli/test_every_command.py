"""Properties of every command: quick help, exit codes, errors in one line, no partial files."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
import tomllib
from pathlib import Path

import pytest

from penstock.cli import COMMANDS, main, parser_of
from penstock.cli.tools import OLD_NAMES, TOOLS

ROOT = Path(__file__).resolve().parents[2]
ALL_COMMANDS = sorted(COMMANDS | TOOLS)
HEAVY = {"numpy", "torch", "pyarrow", "ray", "PIL", "penstock.engines", "penstock.formats", "penstock.packing"}


@pytest.mark.parametrize("name", ALL_COMMANDS)
def test_help_shows_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert re.search(r"^examples?:", printed, re.MULTILINE), "no example"
    assert f"penstock {name}" in printed.partition("example")[2]


@pytest.mark.parametrize("name", ALL_COMMANDS)
def test_help_opens_with_the_purpose_and_two_examples(name: str) -> None:
    purpose, examples, usage = parser_of(name).format_help().split("\n\n")[:3]
    assert purpose.replace("\n", " ") == (COMMANDS | TOOLS)[name]
    assert examples.startswith("examples:\n  ")
    assert len(re.findall(r"^  ", examples, re.MULTILINE)) >= 2
    assert usage.startswith(f"usage: penstock {name}")


@pytest.mark.parametrize(
    ("letter", "names"),
    [
        ("-c", {"--count"}),
        ("-s", {"--skip"}),
        ("-f", {"--fields", "--field"}),
        ("-w", {"--workers"}),
        ("-o", {"--output"}),
    ],
)
def test_a_letter_means_the_same_in_every_command(letter: str, names: set[str]) -> None:
    for name in ALL_COMMANDS:
        shown = [action for action in parser_of(name)._actions if action.help is not argparse.SUPPRESS]
        for action in shown:
            if letter in action.option_strings:
                assert names & {*action.option_strings}, (name, action.option_strings)


def test_commands_that_write_into_an_existing_target_have_one_option_for_it() -> None:
    for name in ("pack", "convert", "proc"):
        shown = [action for action in parser_of(name)._actions if action.help is not argparse.SUPPRESS]
        flags = {flag for action in shown for flag in action.option_strings}
        assert "--mode" in flags
        assert not flags & {"--fresh", "--overwrite", "--append", "--resume"}


def test_the_two_commands_for_work_on_every_item_name_each_other() -> None:
    assert "penstock process" in TOOLS["proc"]
    assert "penstock proc)" in COMMANDS["process"]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["proc", "-c", "ls -l", "a.tar"], {"command": "ls -l", "count": None}),
        (["proc", "-c", "5", "--command", "ls", "a.tar"], {"command": "ls", "count": 5}),
        (["proc", "-w", "4", "--command", "ls"], {"parallel": 4, "working_dir": None}),
        (["proc", "-w", "/tmp", "--command", "ls"], {"parallel": 1, "working_dir": "/tmp"}),
        (["proc", "-s", "script.sh"], {"script": "script.sh"}),
        (["split", "-s", "1e6", "a.tar"], {"max_size": 1e6}),
        (["sort", "-s", "cls", "a.tar"], {"by": "cls"}),
        (["mix", "-w", "3,1", "a.tar", "b.tar"], {"weights": "3,1"}),
        (["create", "-f", ";", "a.csv"], {"delim": ";"}),
    ],
    ids=" ".join,
)
def test_letters_of_tarproc_are_still_understood(words: list[str], values: dict[str, object]) -> None:
    args = vars(parser_of(words[0]).parse_intermixed_args(words[1:]))
    assert {name: args[name] for name in values} == values


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    script = (
        "import sys, time, contextlib, io, json\nbegan = time.process_time()\nfrom penstock.cli import main\n"
        f"for name in {ALL_COMMANDS!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        main([name, '--help'])\n"
        "print(json.dumps([time.process_time() - began, sorted(sys.modules)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout)
    assert not HEAVY & set(modules)
    assert seconds < 0.2 * len(ALL_COMMANDS) / 3  # of CPU time: each command well below 200 ms


@pytest.mark.parametrize("words", [["cat"], ["cat", "--where", "a == 1"], ["sort"], ["first", "-f", "a"]], ids=" ".join)
def test_tools_that_only_copy_samples_do_not_import_numpy(words: list[str], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        (tmp_path / "1.a").write_text("1")
        archive.add(tmp_path / "1.a", "1.a")
    script = (
        f"import sys\nfrom penstock.cli import main\nassert main({[*words, str(tmp_path / 'a.tar')]!r}) == 0\n"
        "sys.stdout.flush()\nassert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=True)


def test_a_user_error_is_never_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.tar")
    (tmp_path / "file").write_text("x")
    for words in (
        ["cat", missing],
        ["cat", str(tmp_path)],
        ["split", missing, "-o", str(tmp_path / "o")],
        ["split", missing, "-o", str(tmp_path / "file" / "o")],
        ["sort", missing],
        ["show", missing],
        ["tsv", missing],
        ["first", missing],
        ["mix", missing, missing],
        ["mix", str(tmp_path / "none.yaml")],
        ["create", str(tmp_path / "none.tsv")],
        ["proc", "-c", "true", missing],
        ["proc", "-c", "true", missing, "-o", str(tmp_path / "x-{}.tar")],
        ["proc", "--python", "none:none", missing],
        ["info", missing],
        ["index", missing],
        ["verify", missing],
        ["pack", missing, str(tmp_path / "o")],
        ["cat", "nowhere://x/y.tar"],
    ):
        assert main(words) == 1, words
        captured = capfd.readouterr()
        lines = captured.err.splitlines() + [line for line in captured.out.splitlines() if words[0] == "verify"]
        assert 1 <= len(lines) <= 2, (words, captured.err)
        assert "Traceback" not in captured.err


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
def test_a_usage_error_exits_with_2(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err


def test_the_old_names_are_installed() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {name for name, target in scripts.items() if target == "penstock.cli:old_name"} == set(OLD_NAMES)


@pytest.mark.parametrize("words", [["cat"], ["sort"], ["split"]])
def test_ctrl_c_leaves_no_partial_file(words: list[str], tmp_path: Path, warm_python: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    fifo = tmp_path / "in.tar"
    os.mkfifo(fifo)
    shard = subprocess.run(["tar", "-cf", "-", "-C", str(ROOT), "README.md"], stdout=subprocess.PIPE, check=True).stdout
    run = subprocess.Popen(
        [warm_python, "-m", "penstock", *words, str(fifo), "-o", str(out / "x.tar")], stderr=subprocess.PIPE
    )
    with open(fifo, "wb") as file:
        file.write(shard[:-5120])
        file.flush()
        time.sleep(0.4)
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=120)
    assert (run.returncode, error) == (130, b"penstock: interrupted\n")
    assert list(out.iterdir()) == []


def test_an_archive_is_neither_written_to_a_terminal_nor_read_from_one(tmp_path: Path, warm_python: str) -> None:
    script = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    for words in (["cat", "x.tar"], ["cat"]):
        done = subprocess.run(
            [sys.executable, "-c", script, warm_python, "-m", "penstock", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "terminal" in done.stdout or "nothing to read" in done.stdout


def test_an_interrupt_inside_exec_exits_with_130(tmp_path: Path) -> None:
    (tmp_path / "stub.py").write_text(
        textwrap.dedent(
            """
            import sys
            from types import SimpleNamespace

            from penstock import cli

            def run(args):
                exec("raise KeyboardInterrupt")  # as dataclasses do

            cli.module_of = lambda name: SimpleNamespace(add_arguments=lambda parser: None, run=run)
            sys.exit(cli.main(["demo"]))
            """
        )
    )
    done = subprocess.run([sys.executable, "-m", "stub"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "penstock: interrupted\n")
