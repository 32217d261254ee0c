from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import demo_run as demo
from penstock.cli import main

SMALL = ["--samples", "200", "--epochs", "1"]
RATES = re.compile(r"[\d,.]+(  samples/s| MB/s| s\.)|bottleneck.*")


@dataclass(frozen=True, slots=True)
class Result:
    """The exit code and output of a run, and the temporary files that it left."""

    code: int
    out: str
    err: str
    leftovers: list[str]

    def check(self, pattern: str) -> None:
        assert re.search(pattern, self.out), f"no {pattern!r} in\n{self.out}"


Demo = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Demo:
    """Run the command in this process, with its own folder for temporary files."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def call(*options: str) -> Result:
        code = main(["demo", *options])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err, sorted(os.listdir(temporary)))

    return call


def test_the_demo_learns_and_resumes_exactly(run: Demo) -> None:
    result = run("--samples", "1000", "--epochs", "8")
    assert result.code == 0
    accuracies = [float(percent) for percent in re.findall(r"(?:before training|epoch \d) +([\d.]+)%", result.out)]
    assert len(accuracies) == 9
    assert accuracies[0] < 45
    assert accuracies[-1] > 75
    result.check(r"rank 0 of 2 +128  samples, 4 of 13 batches\n +its state, \d+ bytes: {.*\"left\": \[\[128,")
    result.check(r"rank 0 of 2 +272  samples, in order: exact\n")
    result.check(r"rank 1 of 2 +\d+  samples, in order: exact\n")
    result.check(r"rank 2 of 3 +\d+  samples\n")
    result.check(r"before and after +800  samples, each once: exact\n")


def test_rates_are_printed_without_progress_if_there_is_no_terminal_and_nothing_is_left_behind(run: Demo) -> None:
    result = run(*SMALL)
    assert result.leftovers == []
    assert result.err == ""
    assert result.out.isascii()
    result.check(r"encoded and written +[\d,]+  samples/s, [\d.,]+ MB/s\n")
    for label in ("read, shuffled", "decoded, augmented", "trained on"):
        result.check(rf"{label} +[\d,]+  samples/s\n")
    result.check(r"bottleneck: \S+")
    result.check(r"bottleneck of the last epoch: \S+")
    result.check(r"Done in [\d.]+ s\.\n$")


def test_everything_but_the_rates_follows_from_the_seed(run: Demo) -> None:
    first, again, other = (RATES.sub("", run(*SMALL, "--seed", seed).out) for seed in ("4", "4", "5"))
    assert re.sub(" +", " ", first) == re.sub(" +", " ", again)
    assert first != other


def test_a_named_folder_keeps_the_shards_and_nothing_else(run: Demo, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "shapes"
    result = run(*SMALL, "--folder", str(folder))
    assert result.code == 0
    assert result.leftovers == []
    assert os.listdir(folder.parent) == ["shapes"]
    assert len(list(folder.glob("*.tar"))) == demo.SHARDS
    stored = ps.read_tar(str(folder)).decode("rgb8")
    assert len(stored) == 200
    assert {sample["json"]["shape"] for sample in stored} == set(demo.SHAPES)
    assert all(demo.SHAPES[sample["cls"]] == sample["json"]["shape"] for sample in stored)


def test_an_empty_folder_is_used_and_any_other_is_refused(run: Demo, tmp_path: Path) -> None:
    folder = tmp_path / "shapes"
    folder.mkdir()
    assert run(*SMALL, "--folder", str(folder)).code == 0
    before = sorted(os.listdir(folder))
    result = run(*SMALL, "--folder", str(folder))
    assert (result.code, result.out) == (1, "")
    assert result.err == f"penstock: {folder} is not an empty folder; name one that is new or empty\n"
    assert sorted(os.listdir(folder)) == before


def test_a_folder_that_cannot_be_created_is_reported_in_one_line(run: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run(*SMALL, "--folder", str(tmp_path / "file" / "shapes"))
    assert result.code == 1
    assert result.err == f"penstock: cannot write: Not a directory (url: {tmp_path / 'file' / 'shapes'})\n"


@pytest.mark.parametrize(
    ("option", "value"), [("--samples", "199"), ("--epochs", "0"), ("--seed", "-1"), ("--samples", "many")]
)
def test_numbers_that_make_no_sense_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["demo", option, value])
    assert exit_.value.code == 2
    assert option in capsys.readouterr().err


def test_a_resume_that_starts_over_is_detected(run: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps.Loader, "load_state_dict", lambda *_, **__: None)
    result = run(*SMALL)
    assert result.code == 1
    result.check(r"in order: NOT EXACT, 0 missing and \d+ unexpected\n")
    result.check(r"each once: NOT EXACT, 0 missing and \d+ unexpected\n")
    assert result.leftovers == []


def test_a_resume_by_other_ranks_that_loses_a_state_is_detected(run: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    load_state_dict = ps.Loader.load_state_dict

    def forgetful(
        self: ps.Loader,
        state: Mapping[str, Any] | None = None,
        *,
        states: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if states is not None:
            states = [states[0], {**states[1], "left": []}]
        load_state_dict(self, state, states=states)

    monkeypatch.setattr(ps.Loader, "load_state_dict", forgetful)
    result = run(*SMALL)
    assert result.code == 1
    result.check(r"rank 1 of 2 +\d+  samples, in order: exact\n")
    result.check(r"each once: NOT EXACT, \d+ missing and 0 unexpected\n")


def test_without_pillow_the_extra_is_named(run: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    result = run(*SMALL)
    assert result.code == 1
    assert result.err == ("penstock: a package for penstock demo is not installed: pip install 'penstock[images]'\n")


@pytest.fixture
def started(tmp_path: Path, warm_python: str) -> Iterator[subprocess.Popen[str]]:
    """The command in its own process, long enough to be interrupted, to keep its shards in ``kept``."""
    (tmp_path / "temporary").mkdir()
    options = ["--samples", "1000", "--epochs", "500", "--folder", str(tmp_path / "kept")]
    with subprocess.Popen(
        [warm_python, "-m", "penstock", "demo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("step", ["Draw and pack", "Train"])
def test_an_interrupt_leaves_nothing_behind(step: str, started: subprocess.Popen[str], tmp_path: Path) -> None:
    assert started.stdout is not None
    assert any(line.startswith(step) for line in started.stdout)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=120)
    assert (started.returncode, err) == (130, "penstock: interrupted\n")
    assert sorted(os.listdir(tmp_path)) == ["temporary"]
    assert os.listdir(tmp_path / "temporary") == []
