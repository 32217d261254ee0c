"""The steps of ``penstock demo``: draw, pack, stream, train, interrupt, resume."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.engines.progress import Progress
from penstock.errors import MissingExtra, PlanError
from penstock.landing import storage_errors

SHAPES = ("circle", "square", "triangle", "cross")
SIDE = 32  # pixels
SHARDS = 8
BATCH = 32
TEST_SHARE = 0.2
PASSES = 10  # for the read rate, because one pass over the shards takes only a few milliseconds
RANKS, RANKS_AFTER = 2, 3

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Batch = tuple[list[str], Images, Labels]
Checksums = list[tuple[str, int]]  # the key of each sample, and the checksum of its augmented pixels


def run_demo(args: argparse.Namespace) -> int:
    """Run all steps and print their results; return 1 if a resume was not exact, else 0.

    Raises:
        MissingExtra: Pillow is not installed.
        PlanError: The folder is not empty.
        StorageError: The folder cannot be written.
    """
    if find_spec("PIL") is None:
        raise MissingExtra("penstock demo", "images")
    began = time.perf_counter()
    with _shard_folder(args.folder) as folder:
        _pack(folder, args.samples, args.seed)
        train, test = ps.read_tar(str(folder)).seed(args.seed).train_test_split(TEST_SHARE, seed=args.seed)
        train = train.shuffle().decode("rgb8").to_tuple("__key__", "png;jpg", "cls")
        train = train.map_tuple(None, augment, None).batched(BATCH)
        whole_epoch = _stream(ps.read_tar(str(folder)).seed(args.seed), train.epoch(args.epochs))
        test_set = EvaluationSet.decode(test)
        net = Net(args.seed)
        _train(train, args.epochs, net, test_set)
        stopped = _stop(train, args.epochs, net)
        exact = _resume(train, args.epochs, net, stopped, whole_epoch)
    _print(f"  after the resume      {test_set.accuracy(net):9.1%}  test accuracy")
    if args.folder is not None:
        _print(f"\nThe shards are in {args.folder}.")
    _print(f"\nDone in {time.perf_counter() - began:.1f} s.")
    return 0 if exact else 1


# The steps, in the order in which they run


def _pack(folder: Path, samples: int, seed: int) -> None:
    _print("Draw and pack")
    blank = [{"__key__": f"{number:06d}", "cls": number % len(SHAPES)} for number in range(samples)]
    drawn = []
    with Progress("drawing", samples) as bar:
        for sample in ps.from_items(blank).seed(seed).map(draw):
            drawn.append(sample)
            bar.add()
    began = time.perf_counter()
    packed = ps.from_items(drawn).write_tar(str(folder), max_samples=-(-samples // SHARDS))
    seconds = time.perf_counter() - began
    _print(f"  images drawn          {packed.samples:>9,}  of {SIDE} x {SIDE}: {', '.join(SHAPES)}")
    _print(f"  shards written        {len(packed.shards):>9,}  with {packed.nbytes / 1e6:.1f} MB")
    _print_rate("encoded and written", packed.samples, seconds, f", {packed.nbytes / 1e6 / seconds:,.1f} MB/s")


def _stream(stored: ps.Dataset, train: ps.Dataset) -> Checksums:
    """Measure reading alone, then all stages of the training set; return what a whole epoch delivers."""
    _print("\nStream")
    began = time.perf_counter()
    count = sum(1 for _ in stored.shuffle().repeat(PASSES))
    _print_rate("read, shuffled", count, time.perf_counter() - began)
    began = time.perf_counter()
    batches = list(train)
    seconds = time.perf_counter() - began
    delivered = [sample for batch in batches for sample in _identify(batch)]
    _print_rate("decoded, augmented", len(delivered), seconds)
    _print(f"  bottleneck: {train.stats().bottleneck}")
    return delivered


def _train(train: ps.Dataset, epochs: int, net: Net, test_set: EvaluationSet) -> None:
    _print("\nTrain")
    accuracies = [test_set.accuracy(net)]
    count = 0
    began = time.perf_counter()
    with Progress("training", epochs * len(train), "batches") as bar:
        for _ in range(epochs):
            for keys, images, labels in train:
                net.learn(images, labels)
                count += len(keys)
                bar.add()
            accuracies.append(test_set.accuracy(net))
    seconds = time.perf_counter() - began
    _print(f"  training images       {count // epochs:>9,}  and {len(test_set.labels):,} test images")
    for epoch, accuracy in enumerate(accuracies):
        name = f"after epoch {epoch}" if epoch else "before training"
        _print(f"  {name:<20}  {accuracy:9.1%}  {'#' * round(40 * accuracy)}")
    _print_rate("trained on", count, seconds)
    _print(f"  bottleneck of the last epoch: {train.stats().bottleneck}")


@dataclass(frozen=True, slots=True)
class StoppedRank:
    """A rank that stopped in mid-epoch: its state as JSON, and what it had delivered."""

    state: str
    delivered: Checksums


def _stop(train: ps.Dataset, epoch: int, net: Net) -> list[StoppedRank]:
    _print(f"\nStop {RANKS} ranks in mid-epoch, at different positions")
    with ExitStack() as stack:
        loaders = [stack.enter_context(closing(_loader(train, rank, RANKS, epoch))) for rank in range(RANKS)]
        batch_counts = [len(loader) * (rank + 1) // (RANKS + 1) for rank, loader in enumerate(loaders)]
        delivered = _train_ranks(
            [islice(loader, batches) for loader, batches in zip(loaders, batch_counts, strict=True)], net
        )
        states = [json.dumps(loader.state_dict()) for loader in loaders]
    for rank, (batches, loader) in enumerate(zip(batch_counts, loaders, strict=True)):
        count = len(delivered[rank])
        _print(f"  rank {rank} of {RANKS}           {count:>9,}  samples, {batches} of {len(loader)} batches")
        _print(f"    its state, {len(states[rank])} bytes: {states[rank]}")
    return [StoppedRank(state, samples) for state, samples in zip(states, delivered, strict=True)]


def _resume(train: ps.Dataset, epoch: int, net: Net, stopped: list[StoppedRank], whole_epoch: Checksums) -> bool:
    """Resume with the same number of ranks and with another one; return whether both deliver exactly the rest."""
    _print(f"\nResume with the same {RANKS} ranks, and with {RANKS_AFTER}")
    verdicts = []
    for rank, before in enumerate(stopped):
        rest, uninterrupted = _resume_rank(train, rank, epoch, before)
        verdicts.append(verdict(before.delivered + rest, uninterrupted, ordered=True))
        _print(f"  rank {rank} of {RANKS}           {len(rest):>9,}  samples, in order: {verdicts[-1]}")
    shares = _resume_with_other_ranks(train, epoch, net, [rank.state for rank in stopped])
    for rank, share in enumerate(shares):
        _print(f"  rank {rank} of {RANKS_AFTER}           {len(share):>9,}  samples")
    parts = [*(rank.delivered for rank in stopped), *shares]
    together = [sample for part in parts for sample in part]
    verdicts.append(verdict(together, whole_epoch, ordered=False))
    _print(f"  before and after      {len(together):>9,}  samples, each once: {verdicts[-1]}")
    return all(text == EXACT for text in verdicts)


# Resuming, and comparing what was delivered


EXACT = "exact"


def verdict(delivered: Checksums, expected: Checksums, *, ordered: bool) -> str:
    """Compare delivered samples with the expected ones; return ``EXACT`` or a description of the difference."""
    missing, surplus = Counter(expected) - Counter(delivered), Counter(delivered) - Counter(expected)
    if missing or surplus:
        return f"NOT EXACT, {missing.total():,} missing and {surplus.total():,} unexpected"
    return EXACT if delivered == expected or not ordered else "NOT EXACT, in another order"


def _loader(train: ps.Dataset, rank: int, world: int, epoch: int) -> ps.Loader:
    return train.loader(rank, world, epoch, uneven="keep")


def _resume_rank(train: ps.Dataset, rank: int, epoch: int, stopped: StoppedRank) -> tuple[Checksums, Checksums]:
    """Return what a rank delivers when it resumes from its own state, and its epoch without an interruption."""
    with closing(_loader(train, rank, RANKS, epoch)) as loader:
        uninterrupted = [sample for batch in loader for sample in _identify(batch)]
    with closing(_loader(train, rank, RANKS, epoch)) as loader:
        loader.load_state_dict(json.loads(stopped.state))
        return [sample for batch in loader for sample in _identify(batch)], uninterrupted


def _resume_with_other_ranks(train: ps.Dataset, epoch: int, net: Net, states: list[str]) -> list[Checksums]:
    """Train on the rest of the epoch with ``RANKS_AFTER`` ranks; return what each of them delivered."""
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(closing(_loader(train, rank, RANKS_AFTER, epoch))) for rank in range(RANKS_AFTER)
        ]
        for loader in loaders:
            loader.load_state_dict(states=[json.loads(state) for state in states])
        return _train_ranks(loaders, net)


def _train_ranks(ranks: Sequence[Iterable[Batch]], net: Net) -> list[Checksums]:
    """Train as ranks that share their gradients do: a step takes one batch from every rank that has one left."""
    delivered: list[Checksums] = [[] for _ in ranks]
    for step in zip_longest(*ranks):
        batches = [batch for batch in step if batch is not None]
        images = np.concatenate([images for _, images, _ in batches])
        net.learn(images, np.concatenate([labels for _, _, labels in batches]))
        for samples, batch in zip(delivered, step, strict=True):
            samples += _identify(batch) if batch is not None else []
    return delivered


def _identify(batch: Batch) -> Checksums:
    keys, images, _ = batch
    return [(key, crc32(image.tobytes())) for key, image in zip(keys, images, strict=True)]


# Images, the network, and the test set


def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Add an image of the sample's class: a noisy shape of random size, position and contrasting colors."""
    from PIL import Image, ImageDraw

    dark, light = (tuple(int(value) for value in rng.integers(*span, 3)) for span in ((0, 110), (145, 256)))
    background, foreground = (dark, light) if rng.random() < 0.5 else (light, dark)
    size = rng.uniform(6, 11)
    x, y = rng.uniform(size + 1, SIDE - size - 1, 2)
    image = Image.new("RGB", (SIDE, SIDE), background)
    _draw_shape(ImageDraw.Draw(image), SHAPES[sample["cls"]], (x, y, size), foreground)
    noisy = np.asarray(image, np.int16) + rng.integers(-20, 21, (SIDE, SIDE, 3), np.int16)
    description = {"shape": SHAPES[sample["cls"]], "x": round(x, 1), "y": round(y, 1), "size": round(size, 1)}
    return {**sample, "png": noisy.clip(0, 255).astype(np.uint8), "json": description}


def _draw_shape(canvas: Any, name: str, geometry: tuple[float, float, float], color: tuple[int, ...]) -> None:
    x, y, size = geometry
    near, thin = 0.85 * size, 0.35 * size
    if name == "circle":
        canvas.ellipse((x - size, y - size, x + size, y + size), fill=color)
    elif name == "square":
        canvas.rectangle((x - near, y - near, x + near, y + near), fill=color)
    elif name == "triangle":
        canvas.polygon([(x, y - size), (x - size, y + near), (x + size, y + near)], fill=color)
    else:
        canvas.rectangle((x - size, y - thin, x + size, y + thin), fill=color)
        canvas.rectangle((x - thin, y - size, x + thin, y + size), fill=color)


def augment(image: Images, rng: np.random.Generator) -> Images:
    """Flip an image horizontally or not, and shift it by up to two pixels."""
    down, right = rng.integers(-2, 3, 2)
    flipped = image[:, ::-1] if rng.random() < 0.5 else image
    return np.roll(flipped, (down, right), (0, 1))


class Net:
    """A network of two layers, trained by gradient descent with momentum; deterministic for a seed."""

    # Few enough that numpy multiplies without threads of its own, which would take the cores from the decoders.
    HIDDEN = 32
    RATE, MOMENTUM = 0.05, 0.9

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        inputs = (SIDE // 2) ** 2
        shapes = [(inputs, self.HIDDEN), (1, self.HIDDEN), (self.HIDDEN, len(SHAPES)), (1, len(SHAPES))]
        self._weights = [
            rng.normal(0, (2 / rows) ** 0.5 if rows > 1 else 0, (rows, columns)).astype(np.float32)
            for rows, columns in shapes
        ]
        self._velocities = [np.zeros_like(weight) for weight in self._weights]

    def learn(self, images: Images, labels: Labels) -> None:
        """Take one step of gradient descent on a batch."""
        inputs = _contrast(images)
        hidden, error = self._forward(inputs)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        hidden_error = (error @ self._weights[2].T) * (hidden > 0)
        gradients = (inputs.T @ hidden_error, hidden_error.sum(0), hidden.T @ error, error.sum(0))
        for weight, velocity, gradient in zip(self._weights, self._velocities, gradients, strict=True):
            velocity *= self.MOMENTUM
            velocity -= self.RATE * gradient
            weight += velocity

    def predict(self, images: Images) -> Labels:
        """Return the most likely class of each image."""
        return np.asarray(self._forward(_contrast(images))[1].argmax(1), np.int64)

    def _forward(self, inputs: Floats) -> tuple[Floats, Floats]:
        """Return the hidden layer and the probability of each class."""
        first, first_bias, second, second_bias = self._weights
        hidden = np.maximum(inputs @ first + first_bias, 0)
        scores = hidden @ second + second_bias
        odds = np.exp(scores - scores.max(1, keepdims=True))
        return hidden, odds / odds.sum(1, keepdims=True)


def _contrast(images: Images) -> Floats:
    """Return how much each 2 x 2 patch differs from the image's border: the shape, whatever its colors."""
    gray = images.mean(-1, dtype=np.float32)
    border = np.concatenate([gray[:, 0], gray[:, -1], gray[:, :, 0], gray[:, :, -1]], axis=1)
    patches = gray.reshape(len(gray), SIDE // 2, 2, SIDE // 2, 2).mean((2, 4)).reshape(len(gray), -1)
    difference = np.abs(patches - np.median(border, axis=1, keepdims=True))
    return np.asarray(difference / difference.max(1, keepdims=True).clip(1) - 0.3, np.float32)


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """The images and labels that are held back from training, in memory."""

    images: Images
    labels: Labels

    @classmethod
    def decode(cls, test: ps.Dataset) -> EvaluationSet:
        """Decode all samples of ``test``."""
        return cls(*test.decode("rgb8").to_tuple("png;jpg", "cls").take_batch(len(test)))

    def accuracy(self, net: Net) -> float:
        """Return the share of images that ``net`` classifies correctly."""
        return float((net.predict(self.images) == self.labels).mean())


# The folder of the shards, and the output


@contextmanager
def _shard_folder(folder: str | None) -> Iterator[Path]:
    """Provide a temporary folder for the shards; it is renamed to ``folder``, if given, when the block succeeds."""
    with ExitStack() as stack:
        with storage_errors(folder or tempfile.gettempdir()):
            target = None if folder is None else _vacant(folder)
            # On the disk of the target, so that a rename moves the shards and their indexes stay valid.
            parent = None if target is None else next(path for path in target.parents if path.exists())
            temporary = tempfile.TemporaryDirectory(prefix=".penstock-demo-", dir=parent)
            shards = Path(stack.enter_context(temporary)) / "shards"
        yield shards
        if target is not None:
            with storage_errors(folder or tempfile.gettempdir()):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(shards, target)


def _vacant(folder: str) -> Path:
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PlanError(f"{folder} is not an empty folder; name one that is new or empty")
    return target


def _print_rate(label: str, count: int, seconds: float, suffix: str = "") -> None:
    _print(f"  {label:<20}  {count / seconds:>9,.0f}  samples/s{suffix}")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
