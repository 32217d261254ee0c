from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cli import demo_run as demo
from penstock.cli import main

SMALL = ["--samples", "200", "--epochs", "1"]
RATE = re.compile(r"[\d,.]+(  samples/s| MB/s| s\.)|bottleneck.*")


@dataclass(frozen=True, slots=True)
class Shown:
    code: int
    out: str
    err: str
    left: list[str]

    def has(self, pattern: str) -> re.Match[str]:
        found = re.search(pattern, self.out)
        assert found, f"no {pattern!r} in\n{self.out}"
        return found


Demo = Callable[..., Shown]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Demo:
    """The command, run in this process with a folder for temporary files of its own."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    def call(*options: str) -> Shown:
        code = main(["demo", *options])
        captured = capsys.readouterr()
        return Shown(code, captured.out, captured.err, sorted(os.listdir(place)))

    return call


def test_it_learns_and_resumes_exactly(run: Demo) -> None:
    shown = run("--samples", "1000", "--epochs", "8")
    assert shown.code == 0
    accuracies = [float(found) for found in re.findall(r"(?:before|epoch \d) +([\d.]+)%", shown.out)]
    assert len(accuracies) == 9
    assert accuracies[0] < 45
    assert accuracies[-1] > 75
    shown.has(r"rank 0 of 2 +128  samples, 4 of 13 batches\n +its state, \d+ bytes: {.*\"left\": \[\[128,")
    shown.has(r"rank 0 of 2 +272  samples, in order: exact\n")
    shown.has(r"rank 1 of 2 +\d+  samples, in order: exact\n")
    shown.has(r"rank 2 of 3 +\d+  samples\n")
    shown.has(r"before and after +800  samples, each once: exact\n")


def test_it_prints_the_rates_of_writing_reading_decoding_and_training(run: Demo) -> None:
    shown = run(*SMALL)
    shown.has(r"encoded and written +[\d,]+  samples/s, [\d.,]+ MB/s\n")
    for what in ("read, shuffled", "decoded, augmented", "trained on"):
        shown.has(rf"{what} +[\d,]+  samples/s\n")
    shown.has(r"bottleneck: \S+")
    shown.has(r"bottleneck of the last epoch: \S+")
    shown.has(r"Done in [\d.]+ s\.\n$")


def test_it_leaves_nothing_and_is_quiet_where_there_is_no_terminal(run: Demo) -> None:
    shown = run(*SMALL)
    assert shown.left == []
    assert shown.err == ""
    assert shown.out.isascii()


def test_all_but_the_rates_follows_from_the_seed(run: Demo) -> None:
    first, again, other = (RATE.sub("", run(*SMALL, "--seed", seed).out) for seed in ("4", "4", "5"))
    assert re.sub(" +", " ", first) == re.sub(" +", " ", again)
    assert first != other


def test_a_named_folder_keeps_the_shards_and_nothing_else(run: Demo, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "shapes"
    shown = run(*SMALL, "--folder", str(folder))
    assert shown.code == 0
    assert shown.left == []
    assert os.listdir(folder.parent) == ["shapes"]
    assert len(list(folder.glob("*.tar"))) == demo.SHARDS
    stored = ps.read_tar(str(folder)).decode("rgb8")
    assert len(stored) == 200
    assert {sample["json"]["shape"] for sample in stored} == set(demo.SHAPES)
    assert all(demo.SHAPES[sample["cls"]] == sample["json"]["shape"] for sample in stored)


def test_an_empty_folder_is_used_and_a_full_one_refused(run: Demo, tmp_path: Path) -> None:
    folder = tmp_path / "shapes"
    folder.mkdir()
    assert run(*SMALL, "--folder", str(folder)).code == 0
    before = sorted(os.listdir(folder))
    shown = run(*SMALL, "--folder", str(folder))
    assert (shown.code, shown.out) == (1, "")
    assert shown.err == f"penstock: {folder} is not an empty folder; name one that is new or empty\n"
    assert sorted(os.listdir(folder)) == before


def test_a_folder_that_cannot_be_is_one_line(run: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shown = run(*SMALL, "--folder", str(tmp_path / "file" / "shapes"))
    assert shown.code == 1
    assert shown.err == f"penstock: cannot write: Not a directory (url: {tmp_path / 'file' / 'shapes'})\n"


@pytest.mark.parametrize(
    ("option", "value"), [("--samples", "199"), ("--epochs", "0"), ("--seed", "-1"), ("--samples", "many")]
)
def test_numbers_that_make_no_sense_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["demo", option, value])
    assert exit_.value.code == 2
    assert option in capsys.readouterr().err


def test_a_resume_that_starts_over_is_exit_1(run: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps.Loader, "load_state_dict", lambda *_, **__: None)
    shown = run(*SMALL)
    assert shown.code == 1
    shown.has(r"in order: NOT EXACT, 0 missing and \d+ that do not belong\n")
    shown.has(r"each once: NOT EXACT, 0 missing and \d+ that do not belong\n")
    assert shown.left == []


def test_a_resume_by_other_ranks_that_loses_a_state_is_exit_1(run: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ps.Loader.load_state_dict

    def forgetful(
        self: ps.Loader,
        state: Mapping[str, Any] | None = None,
        *,
        states: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if states is not None:
            states = [states[0], {**states[1], "left": []}]
        real(self, state, states=states)

    monkeypatch.setattr(ps.Loader, "load_state_dict", forgetful)
    shown = run(*SMALL)
    assert shown.code == 1
    shown.has(r"rank 1 of 2 +\d+  samples, in order: exact\n")
    shown.has(r"each once: NOT EXACT, \d+ missing and 0 that do not belong\n")


@pytest.mark.parametrize(
    ("got", "expected", "ordered", "words"),
    [
        ([("a", 1), ("b", 2)], [("a", 1), ("b", 2)], True, demo.EXACT),
        ([("b", 2), ("a", 1)], [("a", 1), ("b", 2)], False, demo.EXACT),
        ([("b", 2), ("a", 1)], [("a", 1), ("b", 2)], True, "NOT EXACT, another order"),
        ([("a", 1)], [("a", 1), ("b", 2)], False, "NOT EXACT, 1 missing and 0 that do not belong"),
        ([("a", 1), ("a", 1)], [("a", 1)], False, "NOT EXACT, 0 missing and 1 that do not belong"),
        ([("a", 7)], [("a", 1)], False, "NOT EXACT, 1 missing and 1 that do not belong"),
    ],
)
def test_a_verdict_minds_samples_pixels_and_order(
    got: demo.Seen, expected: demo.Seen, ordered: bool, words: str
) -> None:
    assert demo.verdict(got, expected, ordered=ordered) == words


def test_without_pillow_it_names_the_extra(run: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    shown = run(*SMALL)
    assert shown.code == 1
    assert shown.err == (
        "penstock: penstock demo needs an extra that is not installed: pip install 'penstock[images]'\n"
    )


def test_augmenting_moves_and_mirrors_but_changes_no_pixel() -> None:
    image = np.arange(32 * 32 * 3, dtype=np.uint32).astype(np.uint8).reshape(32, 32, 3)
    made = [demo.augment(image, np.random.default_rng(seed)) for seed in range(20)]
    assert len({one.tobytes() for one in made}) > 5
    assert all(np.array_equal(np.sort(one, axis=None), np.sort(image, axis=None)) for one in made)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, long enough to be interrupted, keeping its shards in ``kept``."""
    (tmp_path / "temporary").mkdir()
    options = ["--samples", "1000", "--epochs", "500", "--folder", str(tmp_path / "kept")]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "demo", *options],
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
    _, err = started.communicate(timeout=30)
    assert (started.returncode, err) == (130, "penstock: interrupted\n")
    assert sorted(os.listdir(tmp_path)) == ["temporary"]
    assert os.listdir(tmp_path / "temporary") == []
