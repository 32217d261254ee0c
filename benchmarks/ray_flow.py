"""The data flow of a fine-tuning without its training: Ray Data and Penstock, step by step, on the same pictures.

    python benchmarks/ray_flow.py --images 400

Reads pictures of two classes and their labels, inspects them, drops grayscale pictures, featurizes, splits, and lets a
small Vision Transformer predict the classes of other pictures. The start of Ray is not counted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil
from transformers.utils.logging import disable_progress_bar

import penstock as ps

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from vit_finetune import CLASSES, make_pictures

# With "featurize": Ray Data featurizes when it splits, Penstock when the parts are read.
INSPECTION = ("schema", "take(1)", "groupby count", "unique", "train_test_split", "featurize")


class Featurizer:
    """Turns pictures into tensors."""

    def __init__(self) -> None:
        self.process = ViTImageProcessorPil(size={"height": 32, "width": 32})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "pixel_values": self.process(list(batch["image"]), return_tensors="np")["pixel_values"],
            "labels": batch["label"],
        }


class Classifier(Featurizer):
    """Predicts the classes of pictures."""

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = ViTForImageClassification.from_pretrained(checkpoint).eval()

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        pixels = self.process(list(batch["image"]), return_tensors="pt")["pixel_values"]
        return {"predicted": self.model(pixels).logits.argmax(1).numpy()}


def dims(row: dict[str, Any]) -> dict[str, Any]:
    """Return 3 dimensions for color and 2 for grayscale, which has a first dimension of one in Ray Data."""
    image = row["image"]
    return {"dims": 3 if image.ndim == 3 and image.shape[-1] == 3 else 2}


def has_color(row: dict[str, Any]) -> bool:
    """Return whether a picture has colors."""
    return bool(dims(row)["dims"] == 3)


class Clock:
    """Runs steps, and records their seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, step: str, run: Callable[[], Any]) -> Any:
        started_at = time.perf_counter()
        result = run()
        self.seconds[step] = time.perf_counter() - started_at
        return result


def run_penstock(folder: Path, checkpoint: str) -> tuple[Clock, list[Any]]:
    """Run the flow on Penstock's local engine; return the times and the results."""
    clock = Clock()

    def pictures(part: str, mode: str | None = None) -> ps.Dataset:
        first, second = (ps.read_images(folder / part / name, mode=mode) for name in CLASSES)
        return first.union(second)

    labels = ps.read_csv(folder / "train" / "labels.csv")
    labeled = pictures("train").zip(labels)
    clock("schema", labeled.schema)
    clock("take(1)", lambda: labeled.take(1))
    counts = clock("groupby count", lambda: labeled.map(dims).groupby("dims").count().take_all())
    featurized = labeled.filter(has_color).map_batches(Featurizer, batch_size=64, workers=2)
    distinct_labels = clock("unique", lambda: labels.unique("label"))
    parts = clock("train_test_split", lambda: featurized.train_test_split(test_size=0.2))
    featurized_count = clock(
        "featurize", lambda: sum(len(b["labels"]) for part in parts for b in part.iter_batches(64))
    )
    predicted = pictures("test", "RGB").map_batches(Classifier, batch_size=100, fn_args=(checkpoint,), workers=2)
    clock("take_batch(5)", lambda: predicted.take_batch(5))
    classes = clock("predict", lambda: [int(row["predicted"]) for row in predicted.take_all()])
    return clock, [sorted(row["count"] for row in counts), sorted(distinct_labels), featurized_count, sorted(classes)]


def run_ray_data(folder: Path, checkpoint: str) -> tuple[Clock, list[Any]]:
    """Run the same calls on Ray Data; return the times and the results."""
    import ray
    from ray.data import ActorPoolStrategy

    clock = Clock()

    def pictures(part: str, mode: str | None = None) -> Any:
        first, second = (ray.data.read_images(str(folder / part / name), mode=mode) for name in CLASSES)
        return first.union(second)

    two_actors = ActorPoolStrategy(size=2)
    labels = ray.data.read_csv(str(folder / "train" / "labels.csv"))
    labeled = pictures("train").zip(labels)
    clock("schema", labeled.schema)
    clock("take(1)", lambda: labeled.take(1))
    counts = clock("groupby count", lambda: labeled.map(dims).groupby("dims").count().take_all())
    featurized = labeled.filter(has_color).map_batches(Featurizer, batch_size=64, compute=two_actors)
    distinct_labels = clock("unique", lambda: labels.unique("label"))
    parts = clock("train_test_split", lambda: featurized.train_test_split(test_size=0.2))
    featurized_count = clock(
        "featurize", lambda: sum(len(b["labels"]) for part in parts for b in part.iter_batches(batch_size=64))
    )
    predicted = pictures("test", "RGB").map_batches(
        Classifier, batch_size=100, fn_constructor_args=(checkpoint,), compute=two_actors
    )
    clock("take_batch(5)", lambda: predicted.take_batch(5))
    classes = clock("predict", lambda: [int(row["predicted"]) for row in predicted.take_all()])
    return clock, [sorted(row["count()"] for row in counts), sorted(distinct_labels), featurized_count, sorted(classes)]


def start_ray(cores: int) -> float:
    """Start Ray and warm it up; return how many seconds that took."""
    import ray
    import ray.data

    started_at = time.perf_counter()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=cores, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # Ray Data's zip relies on it
    ray.data.range(10).take_all()
    return time.perf_counter() - started_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--folder", type=Path, default=None, help="where the pictures go (default: a temporary folder)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        make_pictures(folder / "train", args.images, seed=0)
        make_pictures(folder / "test", args.images // 2, seed=1)
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=2, **size))
        model.save_pretrained(folder / "model")
        _, warmup = run_penstock(folder, str(folder / "model"))
        clock, results = run_penstock(folder, str(folder / "model"))
        cores = max(4, os.cpu_count() or 1)  # two actors, and the tasks that feed them
        print(f"Ray started in {start_ray(cores):.1f} s, which is not counted")
        ray_clock, ray_results = run_ray_data(folder, str(folder / "model"))
    if not warmup == results == ray_results:
        sys.exit(f"the results differ: {np.array(results, object)} and {np.array(ray_results, object)}")
    print(f"{'step':18}{'penstock':>10}{'Ray Data':>10}{'ratio':>8}")
    for step, seconds in clock.seconds.items():
        ray_seconds = ray_clock.seconds[step]
        print(f"{step:18}{seconds:9.3f}s{ray_seconds:9.2f}s{ray_seconds / seconds:7.0f}x")
    for name, steps in (("inspection", INSPECTION), ("the whole flow", tuple(clock.seconds))):
        ratio = sum(ray_clock.seconds[step] for step in steps) / sum(clock.seconds[step] for step in steps)
        print(f"{name}: {ratio:.0f}x faster")


if __name__ == "__main__":
    main()
