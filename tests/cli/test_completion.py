from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from penstock.cli import COMMANDS, main
from penstock.cli.tools import TOOLS


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS | TOOLS)
    assert "maxshards" in text


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        (["penstock", "sp"], ["split"]),
        (["penstock", "split", "--max"], ["--max-size", "--maxshards", "--max-shards"]),
        (["penstock", "sort", "-S", "sh"], ["shuffle"]),
        (["penstock", "cat", "x"], []),
        (["penstock", "example", "ph"], ["photos"]),
        (["penstock", "example", "--se"], ["--seed"]),
    ],
)
def test_bash_completes_commands_options_and_choices(typed: list[str], completions: list[str]) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    script = 'eval "$("$0" -m penstock completion bash)"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _penstock; '
    done = subprocess.run(
        [bash, "-c", script + 'printf "%s\\n" "${COMPREPLY[@]}"', sys.executable, *typed],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == sorted(completions)


def test_zsh_answers_the_first_completion_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("|| _bash_complete -o default -F _penstock")
