"""Train with Ray Train: each worker's loader finds its rank, and the checkpoints have the states of all loaders.

    python examples/ray_train.py

Starts a training with three workers, one of which fails in the middle of an epoch. A second training, with two workers,
loads Ray Train's last checkpoint with the states of all three workers, and resumes in the middle of the epoch. The
ledger proves that every sample was delivered exactly once.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import toy
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from toy import arguments, make_shards, network, read_shards, start_ray, train_step

import penstock as ps


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--fail-at", type=int, default=6, help="the step at which a worker fails (%(default)s)")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    make_shards(args.folder, args.samples)
    start_ray(4)
    ray.cloudpickle.register_pickle_by_value(toy)  # the workers cannot import it
    config = {name: getattr(args, name) for name in ("batch_size", "epochs", "save_every")}
    config |= {"folder": str(args.folder.absolute()), "data": read_shards(args.folder.absolute())}
    try:
        fit(3, {**config, "fail_at": args.fail_at})
        sys.exit("the training should have failed")
    except ray.train.TrainingFailedError as error:
        if "fails on purpose" not in str(error):
            raise
    print(f"three workers: one of them failed at step {args.fail_at}")
    metrics = fit(2, config).metrics
    began, step, loss = metrics["began"], metrics["step"], metrics["loss"]
    print(f"two workers resumed after step {began} and reached step {step}, loss {loss:.3f}")
    proof = ps.ledger(args.folder / "ledger").verify()
    print(proof)
    sys.exit(0 if proof.ok and proof.finished and began else 1)


def fit(workers: int, config: dict[str, Any]) -> Any:
    """Train with this number of workers; resumes from the last checkpoint of a training of the same name and folder."""
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="toy", storage_path=f"{config['folder']}/ray"),
    )
    return trainer.fit()


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Train on one worker."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = config["data"].batched(config["batch_size"]).loader(ledger=f"{config['folder']}/ledger")
    step = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            step = restore(Path(folder), model, optimizer, loader)
    began = step

    while loader.epoch < config["epochs"]:
        for batch in loader:
            loss = train_step(model, optimizer, batch)
            step += 1
            if step == config.get("fail_at") and rank == 1:
                raise RuntimeError("this worker fails on purpose")
            if step % config["save_every"] == 0:
                report({"began": began, "step": step, "loss": loss}, rank, model, optimizer, loader)
    loader.close()
    report({"began": began, "step": step, "loss": loss}, rank, model, optimizer, loader)


def report(metrics: dict[str, Any], rank: int, model: Any, optimizer: Any, loader: ps.Loader) -> None:
    """Report a checkpoint to Ray Train: each worker adds the state of its loader, the first worker also the network."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / f"loader-{rank}.json").write_text(json.dumps(loader.state_dict()))
        if rank == 0:
            unwrapped = getattr(model, "module", model)
            trained = {"model": unwrapped.state_dict(), "optimizer": optimizer.state_dict(), "step": metrics["step"]}
            torch.save(trained, folder / "trained.pt")
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def restore(folder: Path, model: Any, optimizer: Any, loader: ps.Loader) -> int:
    """Load a checkpoint of any number of workers; return its step."""
    saved = torch.load(folder / "trained.pt", weights_only=True)
    getattr(model, "module", model).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(states=[json.loads(path.read_text()) for path in sorted(folder.glob("loader-*.json"))])
    return int(saved["step"])


if __name__ == "__main__":
    main()
