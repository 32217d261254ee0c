"""What the examples train: points of three kinds, in tar shards, and a small network that tells them apart."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import penstock as ps

KINDS = 3


def arguments(about: str | None) -> argparse.ArgumentParser:
    """What every example takes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("toy-run"), help="where data and results go")
    parser.add_argument("--samples", type=int, default=600, help="how many samples to make (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a batch, on each rank (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="how many times to go through the samples (%(default)s)")
    return parser


def make_shards(folder: Path, samples: int) -> None:
    """Write the shards, unless they are there."""
    if (folder / "shards").is_dir():
        return
    dice = np.random.default_rng(0)
    points = [
        {"__key__": f"{i:06d}", "npy": dice.normal(i % KINDS, 0.3, 8).astype(np.float32), "cls": i % KINDS}
        for i in range(samples)
    ]
    ps.from_items(points).write_tar(str(folder / "shards"), max_samples=100)


def read_shards(folder: Path) -> ps.Dataset:
    """The samples, in another order every epoch: ``npy`` is a point, ``cls`` its kind."""
    return ps.read_tar(str(folder / "shards")).shuffle(seed=1).decode()


def start_ray(cores: int) -> None:
    """Use the cluster that ``RAY_ADDRESS`` names; else start one here, with so many logical cores at least."""
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        many = max(cores, os.cpu_count() or 1)
        ray.init("local", num_cpus=many, include_dashboard=False, object_store_memory=300_000_000, **quiet)


def network() -> nn.Module:
    """The network, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, KINDS))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> float:
    """Learn from one batch; gives the loss."""
    loss = nn.functional.cross_entropy(model(torch.as_tensor(batch["npy"])), torch.as_tensor(batch["cls"]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint that is there as a whole or not at all."""
    torch.save(checkpoint, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)
