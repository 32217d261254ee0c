"""A training by Lightning's Trainer: it takes exactly ``len`` batches of an epoch, and saves the loader's state."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.testing import numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]

SAMPLES, STEPS = 62, 8


def _loader(folder: Path) -> Any:
    ds = numbers((30, 12, 20)).shuffle(10).batched(8)
    return ds.loader(0, 1, ledger=folder, format="torch", dtypes={"x": torch.float32})


def _model() -> Any:
    """Return a model that records the samples that it was trained on."""
    import lightning  # not at the top: every process that collects the tests would spend seconds on it

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[int]] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.seen.append([int(x) for x in batch["x"]])
            loss: torch.Tensor = self.layer(batch["x"][:, None] / 100).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    return Model()


def _train(loader: Any, folder: Path, steps: int = -1, resume: Path | None = None) -> Any:
    """Train up to 2 epochs, or some steps, with a checkpoint after every step; continue from ``resume``."""
    model = _model()
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    trainer = Trainer(
        max_epochs=2,
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        callbacks=[ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, loader, ckpt_path=resume, weights_only=False)
    return model


def _epochs(folder: Path) -> list[list[int]]:
    loader = _loader(folder)
    return [[int(x) for x in batch["x"]] for _ in range(2) for batch in loader]


def test_every_epoch_of_a_trainer_is_whole(tmp_path: Path) -> None:
    model = _train(_loader(tmp_path / "ledger"), tmp_path)
    assert model.seen == _epochs(tmp_path / "straight")
    assert Counter(len(batch) for batch in model.seen) == {8: 14, 6: 2}
    proof = ps.ledger(tmp_path / "ledger").verify()
    assert proof.ok
    assert [epoch.delivered for epoch in proof.epochs] == [SAMPLES] * 2


@pytest.mark.parametrize("stop", [3, STEPS, STEPS + 5])
def test_a_training_that_is_stopped_and_restarted_gets_every_sample_once(stop: int, tmp_path: Path) -> None:
    first = _train(_loader(tmp_path / "ledger"), tmp_path, steps=stop)
    assert len(first.seen) == stop
    second = _train(_loader(tmp_path / "ledger"), tmp_path, resume=tmp_path / f"step={stop}.ckpt")
    assert first.seen + second.seen == _epochs(tmp_path / "straight")
    proof = ps.ledger(tmp_path / "ledger").verify()
    assert proof.ok, proof
    assert [epoch.delivered for epoch in proof.epochs] == [SAMPLES] * 2
