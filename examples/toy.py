"""The data and the network of the training examples: points of three classes in tar shards, and a small classifier."""

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

CLASSES = 3


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all training examples have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("toy-run"), help="where data and results go")
    parser.add_argument("--samples", type=int, default=600, help="how many samples to generate (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per batch on each rank (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="how many epochs to train (%(default)s)")
    return parser


def make_shards(folder: Path, samples: int) -> None:
    """Write the shards, unless they exist."""
    if (folder / "shards").is_dir():
        return
    rng = np.random.default_rng(0)
    points = [
        {"__key__": f"{i:06d}", "npy": rng.normal(i % CLASSES, 0.3, 8).astype(np.float32), "cls": i % CLASSES}
        for i in range(samples)
    ]
    ps.from_items(points).write_tar(str(folder / "shards"), max_samples=100)


def read_shards(folder: Path) -> ps.Dataset:
    """Return the samples, in a new order every epoch: ``npy`` is a point, ``cls`` its class."""
    return ps.read_tar(str(folder / "shards")).shuffle(seed=1).decode()


def start_ray(cores: int) -> None:
    """Connect to the cluster of ``RAY_ADDRESS``, or start a local one with at least this number of logical cores."""
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        cores = max(cores, os.cpu_count() or 1)
        ray.init("local", num_cpus=cores, include_dashboard=False, object_store_memory=300_000_000, **quiet)


def network() -> nn.Module:
    """Return the network, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> float:
    """Train on one batch; return the loss."""
    loss = nn.functional.cross_entropy(model(torch.as_tensor(batch["npy"])), torch.as_tensor(batch["cls"]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint; the file appears complete or not at all."""
    torch.save(checkpoint, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)
