"""The training examples run, at a small size, and end as their docstrings say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "toy.py")

RunScript = Callable[..., tuple[int, str]]

FULL = os.environ.get("PENSTOCK_FULL") == "1"
RunExample = Callable[..., str]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture
def run(run_script: RunScript, warm_python: str) -> RunExample:
    """Runs an example with its results in ``folder`` and returns its output; ranks are warm processes, too."""
    torchrun_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in torchrun_variables}
    env = inherited | {"OMP_NUM_THREADS": "1", "PENSTOCK_WARM_EXECUTABLE": warm_python, "PENSTOCK_WARM_END": "quick"}

    def run_example(*call: str, folder: Path, code: int = 0) -> str:
        status, text = run_script(*call, "--folder", folder, folder=EXAMPLES, env=env)
        assert status == code, text
        return text

    return run_example


def _verify_ledger(folder: Path, epochs: int) -> int:
    """Check that the ledger proves every epoch; return the number of delivered samples."""
    proof = ps.ledger(folder / "ledger").verify()
    assert proof.ok, str(proof)
    assert proof.finished
    assert len(proof.epochs) == epochs
    return proof.delivered


def _example(name: str) -> str:
    return str(EXAMPLES / name)


def test_an_interrupted_process_resumes(run: RunExample, tmp_path: Path) -> None:
    call = ("-W", "error", _example("train.py"), "--samples", "200")
    assert "stopped at step 11" in run(*call, "--stop-at", "11", folder=tmp_path, code=1)
    assert "resuming after step 8, in epoch 0" in run(*call, folder=tmp_path)
    assert _verify_ledger(tmp_path, 2) == 400


if FULL:  # the test below runs the same program, with four ranks and with three

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_ranks_have_equal_shares(ranks: int, run: RunExample, tmp_path: Path) -> None:
        text = run(*TORCHRUN, str(ranks), _example("ddp.py"), "--samples", "203", "--epochs", "1", folder=tmp_path)
        assert "every sample came exactly once" in text
        assert _verify_ledger(tmp_path, 1) == 203 // ranks * ranks


def test_three_ranks_resume_after_one_of_four_was_killed(run: RunExample, tmp_path: Path) -> None:
    text = run(_example("elastic.py"), "--samples", "601", "--epochs", "1", folder=tmp_path)
    assert "SIGKILL" in text
    assert "3 ranks resume after step 4 of 4 ranks, in epoch 0" in text
    assert "every sample came exactly once" in text
    assert _verify_ledger(tmp_path, 1) >= 601 - 2


def test_two_ranks_train_on_while_one_of_two_servers_is_killed(run: RunExample, tmp_path: Path) -> None:
    text = run(_example("serve.py"), "--samples", "400", "--epochs", "1", folder=tmp_path)
    assert "killed one of 2 servers at step 5" in text
    assert "every sample came exactly once" in text
    assert _verify_ledger(tmp_path, 1) == 400


def test_accelerate_distributes_every_sample_once(run: RunExample, tmp_path: Path) -> None:
    text = run(*TORCHRUN, "2", _example("accelerated.py"), "--samples", "200", folder=tmp_path)
    assert "epoch 1: every sample once, by 2 processes" in text
    assert _verify_ledger(tmp_path, 2) == 400


def test_a_trainer_trains_on_every_sample_once(run: RunExample, tmp_path: Path) -> None:
    text = run(*TORCHRUN, "2", _example("trainer.py"), "--samples", "128", folder=tmp_path)
    assert "8 steps on 2 processes" in text
    assert _verify_ledger(tmp_path, 2) == 256


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_and_the_list_of_examples_name_its_command(program: str) -> None:
    assert f"examples/{program}" in (EXAMPLES / program).read_text()
    assert f"`{program}`" in (EXAMPLES / "README.md").read_text()
