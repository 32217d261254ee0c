"""Fine-tune a small Vision Transformer on pictures of two classes, and classify new pictures: on a laptop, or on Ray.

    python examples/vit_finetune.py --engine local
    python examples/vit_finetune.py --engine ray

The pictures are in two folders, their labels in a CSV file. The program inspects them, drops the grayscale ones, turns
the others into tensors with a featurizer, and splits off a part for validation. With ``--engine ray`` every stage runs
on an existing cluster (or on a new local one), and Ray Train trains the model. The checkpoint then classifies new
pictures in batches, and the predictions are written to Parquet files.
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
CLASSES = ("stripes", "dots")
SIDE = 32  # pixels of the model's input
GRAY_EVERY = 12  # every twelfth picture is grayscale


def main() -> None:
    args = arguments()
    if args.engine == "ray":
        start_ray(args.ranks + args.workers)
    with timed("make the pictures"):
        make_pictures(args.folder / "train", args.images, seed=0)
        make_pictures(args.folder / "test", max(40, args.images // 4), seed=1)

    labeled = read_labeled(args.folder / "train").on(args.engine)
    with timed("inspect the pictures"):
        print("  schema:", labeled.schema())
        print("  classes:", labeled.unique("label"))
        print("  dims:", labeled.map(dims).groupby("dims").count().take_all())
    colored = labeled.filter(has_color)
    featurized = colored.map_batches(Featurizer, batch_size=64, workers=args.workers)
    train, valid = featurized.train_test_split(test_size=0.2)
    with timed("featurize the pictures"):
        print(f"  {train.count()} for training, {valid.count()} for validation")

    with timed("train"):
        fit = fit_on_ray if args.engine == "ray" else fit_locally
        checkpoint, accuracy = fit(train, valid, args)
    print(f"  validation: {accuracy:.0%} correct")

    pictures = read_pictures(args.folder / "test", mode="RGB").on(args.engine)
    predicted = pictures.map_batches(
        Classifier, batch_size=100, fn_args=(str(checkpoint),), workers=args.workers, gpus=args.gpus
    )
    with timed("predict"):
        shutil.rmtree(args.folder / "predictions", ignore_errors=True)
        written = predicted.drop("image").write_parquet(args.folder / "predictions")
    rows = ps.read_parquet(args.folder / "predictions")
    correct = np.mean([CLASSES[row["predicted"]] in row["path"] for row in rows])
    print(f"  {written.samples} new pictures: {correct:.0%} correct")
    sys.exit(0 if correct > 0.6 else "not better than chance")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--folder", type=Path, default=Path("vit-run"), help="where data and results go")
    parser.add_argument("--images", type=int, default=400, help="how many pictures to generate (%(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="how many epochs to train (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per batch on each rank (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train with --engine ray (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="workers of each stage (%(default)s)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker that predicts (%(default)s)")
    args = parser.parse_args()
    args.folder = args.folder.absolute()  # the training processes have other working directories
    return args


# The data


def read_labeled(folder: Path) -> ps.Dataset:
    """Return the pictures of both classes, each with its label from the CSV file in the folder."""
    return read_pictures(folder).zip(ps.read_csv(folder / "labels.csv"))


def read_pictures(folder: Path, mode: str | None = None) -> ps.Dataset:
    """Return the pictures of both classes, one class after the other."""
    first, second = (ps.read_images(folder / name, mode=mode) for name in CLASSES)
    return first.union(second)


def dims(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the number of dimensions of a picture."""
    return {"dims": sample["image"].ndim}


def has_color(sample: dict[str, Any]) -> bool:
    """Return whether a picture has a third dimension: its color channels."""
    return bool(sample["image"].ndim == 3)


class Featurizer:
    """Turns pictures into tensors for the model; constructed once in every worker."""

    def __init__(self) -> None:
        self.process = processor()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        pixels = self.process(list(batch["image"]), return_tensors="np")["pixel_values"]
        return {"pixel_values": pixels, "labels": batch["label"]}


class Classifier:
    """Predicts the classes of pictures; the model is loaded once in every worker."""

    def __init__(self, checkpoint: str, device: Any = "cpu") -> None:
        self.process, self.device = processor(), device
        self.model = ViTForImageClassification.from_pretrained(checkpoint).to(device).eval()

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        pixels = self.process(list(batch["image"]), return_tensors="pt")["pixel_values"]
        return {**batch, "predicted": self.model(pixels.to(self.device)).logits.argmax(1).cpu().numpy()}


def processor() -> Any:
    """Return the processor that resizes and normalizes pictures."""
    return ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})


# The training


def fit_locally(train: ps.Dataset, valid: ps.Dataset, args: argparse.Namespace) -> tuple[Path, float]:
    """Train in this process; return the path of the checkpoint and the accuracy on the validation data."""
    model, optimizer = small_vit()
    for batch in batches(train, args.batch_size, args.epochs):
        train_step(model, optimizer, batch)
    model.save_pretrained(args.folder / "checkpoint")
    return args.folder / "checkpoint", accuracy_of(model, valid.iter_torch_batches(64))


def fit_on_ray(train: ps.Dataset, valid: ps.Dataset, args: argparse.Namespace) -> tuple[Path, float]:
    """Train with Ray Train, with one process per rank; return the same as ``fit_locally``."""
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
    """Train on one rank with its share of the pictures; the loader finds the rank."""
    import ray.train
    import ray.train.torch

    model, _ = small_vit()
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in batches(config["train"], config["batch_size"], config["epochs"]):
        train_step(model, optimizer, batch)
    unwrapped = getattr(model, "module", model)
    shard = ray.train.get_dataset_shard("valid")
    accuracy = accuracy_of(unwrapped, shard.iter_torch_batches(batch_size=64))
    with tempfile.TemporaryDirectory() as folder:
        is_first = ray.train.get_context().get_world_rank() == 0
        if is_first:
            unwrapped.save_pretrained(folder)
        checkpoint = ray.train.Checkpoint.from_directory(folder) if is_first else None
        ray.train.report({"accuracy": accuracy}, checkpoint=checkpoint)


def batches(train: ps.Dataset, batch_size: int, epochs: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches of this rank, in a new order every epoch."""
    loader = train.shuffle(seed=0).batched(batch_size).loader()
    for _ in range(epochs):
        for batch in loader:
            yield {name: torch.as_tensor(batch[name]) for name in ("pixel_values", "labels")}


def small_vit() -> tuple[Any, torch.optim.Optimizer]:
    """Return a new Vision Transformer, which needs no download, and its optimizer."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(image_size=SIDE, patch_size=8, num_labels=len(CLASSES), **size)
    model = ViTForImageClassification(config)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """Train on one batch."""
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()


@torch.no_grad()
def accuracy_of(model: Any, batches: Any) -> float:
    """Return the share of pictures that the model classifies correctly."""
    model.eval()
    correct = [model(pixel_values=batch["pixel_values"]).logits.argmax(1) == batch["labels"] for batch in batches]
    return float(torch.cat(correct).float().mean())


# The pictures


def make_pictures(folder: Path, count: int, seed: int) -> None:
    """Write pictures of stripes and of dots, some in grayscale, and their labels, unless they exist."""
    parameters = {"images": count, "seed": seed}
    stamp = folder / "made.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == parameters:
        return
    shutil.rmtree(folder, ignore_errors=True)
    rng = np.random.default_rng(seed)
    rows = []
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(count // 2):
            picture = Image.fromarray(draw_picture(name, rng))
            is_gray = number % GRAY_EVERY == GRAY_EVERY - 1
            (picture.convert("L") if is_gray else picture).save(folder / name / f"{number:05d}.jpg", quality=90)
            rows.append({"label": label, "name": name})
    with open(folder / "labels.csv", "w", newline="") as file:
        table = csv.DictWriter(file, ["label", "name"])
        table.writeheader()
        table.writerows(rows)
    stamp.write_text(json.dumps(parameters))


def draw_picture(name: str, rng: np.random.Generator) -> np.ndarray:
    """Return a random picture: stripes on a bluish background, or dots on a reddish one."""
    height, width = rng.integers(40, 72, 2)
    y, x = np.mgrid[:height, :width] + rng.uniform(0, 20)
    frequency = 2 * np.pi / rng.uniform(8, 14)
    wave = np.sin(y * frequency)
    pattern = wave if name == "stripes" else np.minimum(wave, np.sin(x * frequency))
    color, background = rng.uniform(0, 255, 3), rng.uniform(0, 120, 3)
    background[2 if name == "stripes" else 0] = rng.uniform(160, 255)
    picture = np.where((pattern > 0)[..., None], color, background) + rng.normal(0, 12, (height, width, 3))
    return picture.clip(0, 255).astype(np.uint8)


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Print the name of a step, and how long it took."""
    started_at = time.perf_counter()
    print(f"{step} ...", flush=True)
    yield
    print(f"  {time.perf_counter() - started_at:.1f} s", flush=True)


if __name__ == "__main__":
    main()
