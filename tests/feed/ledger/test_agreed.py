"""The ledger of ranks that agree where an epoch ends; this file is also the program that the ranks run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.dataset import Dataset
from penstock.testing import numbers

WORLD = 2


def late(sample: dict[str, Any]) -> bool:
    """Reject most samples of the first rank."""
    return bool(sample["x"] >= 20 and sample["x"] % 3)


def copies(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "copy": number} for number in range(sample["x"] % 4)]


PLANS: dict[str, Callable[[], Dataset]] = {
    "filter": lambda: numbers((30, 12, 20)).filter(late).batched(4),
    "single samples": lambda: numbers((30, 12, 20)).filter(late),
    "late shuffle": lambda: numbers((30, 12, 20)).flat_map(copies).filter(late).shuffle(7).batched(4),
}


def program(folder: str) -> None:
    """Run an epoch of each plan; except for the first plan, with a restart from a state before the last steps."""
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for uneven in ("drop", "pad"):
        for number, (name, make) in enumerate(PLANS.items()):
            where = f"{folder}/{uneven} {name}"
            loader = make().loader(uneven=uneven, ledger=where)
            if number:
                list(islice(loader, 3))
                state = loader.state_dict()
                list(islice(loader, 2))
                loader = make().loader(uneven=uneven, ledger=where)
                loader.load_state_dict(state)
            list(loader)
    dist.destroy_process_group()


def test_what_ranks_agree_to_drop_or_repeat_is_in_the_proof(tmp_path: Path, warm_python: str) -> None:
    ranks = []
    for rank in range(WORLD):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
        command = [warm_python, __file__, str(tmp_path)]
        ranks.append(subprocess.Popen(command, env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": "lo"}))
    assert [process.wait(500) for process in ranks] == [0] * WORLD
    for name in PLANS:
        dropped = ps.ledger(tmp_path / f"drop {name}").verify()
        assert dropped.ok, dropped
        assert dropped.finished
        assert dropped.epochs[0].dropped > 0
        padded = ps.ledger(tmp_path / f"pad {name}").verify()
        assert padded.ok, padded
        assert padded.finished
        assert padded.epochs[0].padded > 0
        assert padded.epochs[0].dropped == 0
        for uneven in ("drop", "pad"):
            steps = [step for step in ps.ledger(tmp_path / f"{uneven} {name}") if step.epoch == 0]
            assert [step.step for step in steps] == list(range(len(steps)))
            assert all(len(step.ranks) == WORLD for step in steps)


if __name__ == "__main__":
    program(sys.argv[1])
