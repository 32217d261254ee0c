"""Fine-tune a small Vision Transformer on pictures of two kinds, and have it name new ones: on a laptop, or on Ray.

    python examples/vit_finetune.py --engine local
    python examples/vit_finetune.py --engine ray

Pictures lie in two folders, their labels in a CSV file. They are looked at, those without colour are left out, a
featurizer makes tensors of them, and a share is kept for validation. With ``--engine ray`` every stage runs on the
cluster that is there (or on one that is started), and the training is Ray Train's. The checkpoint then predicts
pictures that it has not seen, in batches, into Parquet files.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from toy import start_ray
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil
from transformers.utils.logging import disable_progress_bar

import penstock as ps

disable_progress_bar()
KINDS = ("stripes", "dots")
SIDE = 32  # pixels of what the model sees
GRAY_EVERY = 12  # one picture in so many has no colour


def main() -> None:
    args = arguments()
    if args.engine == "ray":
        start_ray(args.ranks + args.workers)
    with timed("make the pictures"):
        make_pictures(args.folder / "train", args.images, seed=0)
        make_pictures(args.folder / "test", max(40, args.images // 4), seed=1)

    labeled = read_labeled(args.folder / "train").on(args.engine)
    with timed("look at them"):
        print("  schema:", labeled.schema())
        print("  kinds:", labeled.unique("label"))
        print("  dims:", labeled.map(dims).groupby("dims").count().take_all())
    colored = labeled.filter(has_color)
    featurized = colored.map_batches(Featurizer, batch_size=64, workers=args.workers)
    train, valid = featurized.train_test_split(test_size=0.2)
    with timed("featurize them"):
        print(f"  {train.count()} to train with, {valid.count()} to validate with")

    with timed("train"):
        fit = fit_on_ray if args.engine == "ray" else fit_here
        checkpoint, accuracy = fit(train, valid, args)
    print(f"  validation: {accuracy:.0%} right")

    pictures = union_of(args.folder / "test", mode="RGB").on(args.engine)
    predicted = pictures.map_batches(
        Classifier, batch_size=100, fn_args=(str(checkpoint),), workers=args.workers, gpus=args.gpus
    )
    with timed("predict"):
        shutil.rmtree(args.folder / "predictions", ignore_errors=True)
        written = predicted.drop("image").write_parquet(args.folder / "predictions")
    right = np.mean([KINDS[row["predicted"]] in row["path"] for row in ps.read_parquet(args.folder / "predictions")])
    print(f"  {written.samples} pictures that it has not seen: {right:.0%} right")
    sys.exit(0 if right > 0.6 else "no better than chance")


def arguments() -> argparse.Namespace:
    """What it takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--folder", type=Path, default=Path("vit-run"), help="where data and results go")
    parser.add_argument("--images", type=int, default=400, help="how many pictures to train with (%(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="how many times to go through them (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="pictures of a batch, on each rank (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train, with --engine ray (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="workers of each stage (%(default)s)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker that predicts (%(default)s)")
    args = parser.parse_args()
    args.folder = args.folder.absolute()  # the processes that train are in folders of their own
    return args


# The data


def read_labeled(folder: Path) -> ps.Dataset:
    """The pictures of both kinds, one kind after the other, each with its label from the CSV file beside them."""
    return union_of(folder).zip(ps.read_csv(folder / "labels.csv"))


def union_of(folder: Path, mode: str | None = None) -> ps.Dataset:
    """The pictures of both kinds."""
    first, second = (ps.read_images(folder / kind, mode=mode) for kind in KINDS)
    return first.union(second)


def dims(sample: dict[str, Any]) -> dict[str, Any]:
    """How many dimensions a picture has."""
    return {"dims": sample["image"].ndim}


def has_color(sample: dict[str, Any]) -> bool:
    """Whether it has a third one: its color."""
    return bool(sample["image"].ndim == 3)


class Featurizer:
    """Makes of pictures what the model takes; constructed once in every worker."""

    def __init__(self) -> None:
        self.process = processor()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        pixels = self.process(list(batch["image"]), return_tensors="np")["pixel_values"]
        return {"pixel_values": pixels, "labels": batch["label"]}


class Classifier:
    """Names the kinds of pictures; the model is loaded once in every worker."""

    def __init__(self, checkpoint: str, device: Any = "cpu") -> None:
        self.process, self.device = processor(), device
        self.model = ViTForImageClassification.from_pretrained(checkpoint).to(device).eval()

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        pixels = self.process(list(batch["image"]), return_tensors="pt")["pixel_values"]
        return {**batch, "predicted": self.model(pixels.to(self.device)).logits.argmax(1).cpu().numpy()}


def processor() -> Any:
    """What resizes and normalizes pictures."""
    return ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})


# The training


def fit_here(train: ps.Dataset, valid: ps.Dataset, args: argparse.Namespace) -> tuple[Path, float]:
    """Train in this process; gives the checkpoint and how much of the validation is right."""
    model, optimizer = small_vit()
    for batch in batches(train, args.batch_size, args.epochs):
        train_step(model, optimizer, batch)
    model.save_pretrained(args.folder / "checkpoint")
    return args.folder / "checkpoint", accuracy_of(model, valid.iter_torch_batches(64))


def fit_on_ray(train: ps.Dataset, valid: ps.Dataset, args: argparse.Namespace) -> tuple[Path, float]:
    """Train with Ray Train, a process for each rank."""
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    shutil.rmtree(args.folder / "ray", ignore_errors=True)
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"train": train.on("local"), "batch_size": args.batch_size, "epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.ranks, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="vit",
            storage_path=str(args.folder / "ray"),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
        datasets={"valid": valid.to_ray()},
    )
    result = trainer.fit()
    return Path(result.checkpoint.path), result.metrics["accuracy"]


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """What every rank does: its share of the pictures, by a loader that finds the rank by itself."""
    import ray.train
    import ray.train.torch

    model, _ = small_vit()
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in batches(config["train"], config["batch_size"], config["epochs"]):
        train_step(model, optimizer, batch)
    own = getattr(model, "module", model)
    shard = ray.train.get_dataset_shard("valid")
    accuracy = accuracy_of(own, shard.iter_torch_batches(batch_size=64))
    with tempfile.TemporaryDirectory() as folder:
        first = ray.train.get_context().get_world_rank() == 0
        if first:
            own.save_pretrained(folder)
        checkpoint = ray.train.Checkpoint.from_directory(folder) if first else None
        ray.train.report({"accuracy": accuracy}, checkpoint=checkpoint)


def batches(train: ps.Dataset, batch_size: int, epochs: int) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of this rank, in another order every epoch."""
    loader = train.shuffle(seed=0).batched(batch_size).loader()
    for _ in range(epochs):
        for batch in loader:
            yield {name: torch.as_tensor(batch[name]) for name in ("pixel_values", "labels")}


def small_vit() -> tuple[Any, torch.optim.Optimizer]:
    """A Vision Transformer that nobody has to download, and what trains it."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(image_size=SIDE, patch_size=8, num_labels=len(KINDS), **size)
    model = ViTForImageClassification(config)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """Learn from one batch."""
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()


@torch.no_grad()
def accuracy_of(model: Any, batches: Any) -> float:
    """How much of what it is shown it gets right."""
    model.eval()
    right = [model(pixel_values=one["pixel_values"]).logits.argmax(1) == one["labels"] for one in batches]
    return float(torch.cat(right).float().mean())


# The pictures


def make_pictures(folder: Path, many: int, seed: int) -> None:
    """Write pictures of stripes and of dots, some without colour, and their labels; unless they are there."""
    told = {"images": many, "seed": seed}
    if (folder / "made.json").is_file() and json.loads((folder / "made.json").read_text()) == told:
        return
    shutil.rmtree(folder, ignore_errors=True)
    dice = np.random.default_rng(seed)
    rows = []
    for label, kind in enumerate(KINDS):
        (folder / kind).mkdir(parents=True)
        for number in range(many // 2):
            drawn = Image.fromarray(drawing(kind, dice))
            gray = number % GRAY_EVERY == GRAY_EVERY - 1
            (drawn.convert("L") if gray else drawn).save(folder / kind / f"{number:05d}.jpg", quality=90)
            rows.append({"label": label, "name": kind})
    with open(folder / "labels.csv", "w", newline="") as file:
        table = csv.DictWriter(file, ["label", "name"])
        table.writeheader()
        table.writerows(rows)
    (folder / "made.json").write_text(json.dumps(told))


def drawing(kind: str, dice: np.random.Generator) -> np.ndarray:
    """A picture: stripes on something blueish or dots on something reddish, of any width and place."""
    height, width = dice.integers(40, 72, 2)
    y, x = np.mgrid[:height, :width] + dice.uniform(0, 20)
    wave = 2 * np.pi / dice.uniform(8, 14)
    light = np.sin(y * wave) if kind == "stripes" else np.minimum(np.sin(y * wave), np.sin(x * wave))
    color, ground = dice.uniform(0, 255, 3), dice.uniform(0, 120, 3)
    ground[2 if kind == "stripes" else 0] = dice.uniform(160, 255)
    picture = np.where((light > 0)[..., None], color, ground) + dice.normal(0, 12, (height, width, 3))
    return picture.clip(0, 255).astype(np.uint8)


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Say what is done, and how long it took."""
    begun = time.perf_counter()
    print(f"{step} ...", flush=True)
    yield
    print(f"  {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
