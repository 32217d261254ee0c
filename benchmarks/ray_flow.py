"""The flow of a fine-tuning, training apart: Ray Data's own program beside ours, step by step, on the same pictures.

    python benchmarks/ray_flow.py --images 400

Reads pictures of two kinds and their labels, looks at them, leaves out those without color, featurizes, splits, and has
a small Vision Transformer predict others. Ray is started before the clock; seconds are of the steps alone.
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
from vit_finetune import KINDS, make_pictures

# With the featurizing: Ray Data does it when it splits, we when the parts are read.
LOOKING = ("schema", "take(1)", "groupby count", "unique", "train_test_split", "featurize")


class Featurizer:
    """Makes tensors of pictures."""

    def __init__(self) -> None:
        self.process = ViTImageProcessorPil(size={"height": 32, "width": 32})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "pixel_values": self.process(list(batch["image"]), return_tensors="np")["pixel_values"],
            "labels": batch["label"],
        }


class Classifier(Featurizer):
    """Names the kinds of pictures."""

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = ViTForImageClassification.from_pretrained(checkpoint).eval()

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        pixels = self.process(list(batch["image"]), return_tensors="pt")["pixel_values"]
        return {"predicted": self.model(pixels).logits.argmax(1).numpy()}


def dims(row: dict[str, Any]) -> dict[str, Any]:
    """What a picture is: Ray Data gives those without color a first dimension of one."""
    image = row["image"]
    return {"dims": 3 if image.ndim == 3 and image.shape[-1] == 3 else 2}


def has_color(row: dict[str, Any]) -> bool:
    """Whether it has a color."""
    return bool(dims(row)["dims"] == 3)


class Clock:
    """Steps and their seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, step: str, do: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        done = do()
        self.seconds[step] = time.perf_counter() - begun
        return done


def ours(folder: Path, checkpoint: str) -> tuple[Clock, list[Any]]:
    """The flow, on the local engine."""
    clock = Clock()

    def pictures(part: str, mode: str | None = None) -> ps.Dataset:
        first, second = (ps.read_images(folder / part / kind, mode=mode) for kind in KINDS)
        return first.union(second)

    labels = ps.read_csv(folder / "train" / "labels.csv")
    labeled = pictures("train").zip(labels)
    clock("schema", labeled.schema)
    clock("take(1)", lambda: labeled.take(1))
    counts = clock("groupby count", lambda: labeled.map(dims).groupby("dims").count().take_all())
    featurized = labeled.filter(has_color).map_batches(Featurizer, batch_size=64, workers=2)
    kinds = clock("unique", lambda: labels.unique("label"))
    parts = clock("train_test_split", lambda: featurized.train_test_split(test_size=0.2))
    many = clock("featurize", lambda: sum(len(b["labels"]) for part in parts for b in part.iter_batches(64)))
    predicted = pictures("test", "RGB").map_batches(Classifier, batch_size=100, fn_args=(checkpoint,), workers=2)
    clock("take_batch(5)", lambda: predicted.take_batch(5))
    found = clock("predict", lambda: [int(row["predicted"]) for row in predicted.take_all()])
    return clock, [sorted(row["count"] for row in counts), sorted(kinds), many, sorted(found)]


def theirs(folder: Path, checkpoint: str) -> tuple[Clock, list[Any]]:
    """The same calls on Ray Data."""
    import ray
    from ray.data import ActorPoolStrategy

    clock = Clock()

    def pictures(part: str, mode: str | None = None) -> Any:
        first, second = (ray.data.read_images(str(folder / part / kind), mode=mode) for kind in KINDS)
        return first.union(second)

    two = ActorPoolStrategy(size=2)
    labels = ray.data.read_csv(str(folder / "train" / "labels.csv"))
    labeled = pictures("train").zip(labels)
    clock("schema", labeled.schema)
    clock("take(1)", lambda: labeled.take(1))
    counts = clock("groupby count", lambda: labeled.map(dims).groupby("dims").count().take_all())
    featurized = labeled.filter(has_color).map_batches(Featurizer, batch_size=64, compute=two)
    kinds = clock("unique", lambda: labels.unique("label"))
    parts = clock("train_test_split", lambda: featurized.train_test_split(test_size=0.2))
    many = clock("featurize", lambda: sum(len(b["labels"]) for part in parts for b in part.iter_batches(batch_size=64)))
    predicted = pictures("test", "RGB").map_batches(
        Classifier, batch_size=100, fn_constructor_args=(checkpoint,), compute=two
    )
    clock("take_batch(5)", lambda: predicted.take_batch(5))
    found = clock("predict", lambda: [int(row["predicted"]) for row in predicted.take_all()])
    return clock, [sorted(row["count()"] for row in counts), sorted(kinds), many, sorted(found)]


def start_ray(cores: int) -> float:
    """Start Ray, and warm it up; gives the seconds that took."""
    import ray
    import ray.data

    begun = time.perf_counter()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=cores, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # which its zip relies on
    ray.data.range(10).take_all()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--folder", type=Path, default=None, help="where the pictures go (a temporary one)")
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
        first = ours(folder, str(folder / "model"))  # also a warm-up: the second counts
        mine, here = ours(folder, str(folder / "model"))
        cores = max(4, os.cpu_count() or 1)  # two actors, and what feeds them
        print(f"Ray started in {start_ray(cores):.1f} s, which is not counted")
        peer, there = theirs(folder, str(folder / "model"))
    if not first[1] == here == there:
        sys.exit(f"the two do not agree: {np.array(here, object)} and {np.array(there, object)}")
    print(f"{'step':18}{'penstock':>10}{'Ray Data':>10}{'ratio':>8}")
    for step, seconds in mine.seconds.items():
        print(f"{step:18}{seconds:9.3f}s{peer.seconds[step]:9.2f}s{peer.seconds[step] / seconds:7.0f}x")
    for name, steps in (("looking", LOOKING), ("the whole flow", tuple(mine.seconds))):
        ratio = sum(peer.seconds[step] for step in steps) / sum(mine.seconds[step] for step in steps)
        print(f"{name}: {ratio:.0f}x faster")


if __name__ == "__main__":
    main()
