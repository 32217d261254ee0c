"""What ``penstock demo`` shows: a dataset drawn, packed, streamed, learned from, interrupted and resumed."""

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
from penstock.errors import MissingExtra, PlanError, StorageError

SHAPES = ("circle", "square", "triangle", "cross")
SIDE = 32  # pixels
SHARDS = 8
BATCH = 32
TEST_SHARE = 0.2
PASSES = 10  # over the shards to time reading, of which one takes a few milliseconds
RANKS, RANKS_AFTER = 2, 3

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Batch = tuple[list[str], Pixels, Labels]
Seen = list[tuple[str, int]]  # keys, and checksums of the pixels as they reached the training


def show(args: argparse.Namespace) -> int:
    """Show the whole way of a dataset on standard output; the exit code is 1 if a resume was not exact.

    Raises:
        MissingExtra: Pillow is not installed.
        PlanError: the folder is not empty.
        StorageError: the folder cannot be written.
    """
    if find_spec("PIL") is None:
        raise MissingExtra("penstock demo", "images")
    began = time.perf_counter()
    with _workplace(args.folder) as folder:
        _pack(folder, args.samples, args.seed)
        train, test = ps.read_tar(str(folder)).seed(args.seed).train_test_split(TEST_SHARE, seed=args.seed)
        train = train.shuffle().decode("rgb8").to_tuple("__key__", "png;jpg", "cls")
        train = train.map_tuple(None, augment, None).batched(BATCH)
        whole = _stream(ps.read_tar(str(folder)).seed(args.seed), train.epoch(args.epochs))
        trial = Trial.of(test)
        net = Net(args.seed)
        _train(train, args.epochs, net, trial)
        stopped = _stop(train, args.epochs, net)
        exact = _resume(train, args.epochs, net, stopped, whole)
    _say(f"  after that epoch      {trial.accuracy(net):9.1%}  of the test images are right")
    if args.folder is not None:
        _say(f"\nThe shards are in {args.folder}.")
    _say(f"\nDone in {time.perf_counter() - began:.1f} s.")
    return 0 if exact else 1


# The steps, in the order in which they are shown


def _pack(folder: Path, samples: int, seed: int) -> None:
    _say("Draw and pack")
    blank = [{"__key__": f"{number:06d}", "cls": number % len(SHAPES)} for number in range(samples)]
    drawn = []
    with Progress("drawing", samples) as bar:
        for sample in ps.from_items(blank).seed(seed).map(draw):
            drawn.append(sample)
            bar.add()
    began = time.perf_counter()
    packed = ps.from_items(drawn).write_tar(str(folder), max_samples=-(-samples // SHARDS))
    seconds = time.perf_counter() - began
    _say(f"  images drawn          {packed.samples:>9,}  of {SIDE} x {SIDE}: {', '.join(SHAPES)}")
    _say(f"  shards written        {len(packed.shards):>9,}  with {packed.nbytes / 1e6:.1f} MB")
    _rate("encoded and written", packed.samples, seconds, f", {packed.nbytes / 1e6 / seconds:,.1f} MB/s")


def _stream(stored: ps.Dataset, train: ps.Dataset) -> Seen:
    """Time reading alone and all of the training's stages; return what a whole epoch of them holds."""
    _say("\nStream")
    began = time.perf_counter()
    count = sum(1 for _ in stored.shuffle().repeat(PASSES))
    _rate("read, shuffled", count, time.perf_counter() - began)
    began = time.perf_counter()
    batches = list(train)
    seconds = time.perf_counter() - began
    seen = [one for batch in batches for one in _seen(batch)]
    _rate("decoded, augmented", len(seen), seconds)
    _say(f"  bottleneck: {train.stats().bottleneck}")
    return seen


def _train(train: ps.Dataset, epochs: int, net: Net, trial: Trial) -> None:
    _say("\nTrain")
    accuracies = [trial.accuracy(net)]
    count = 0
    began = time.perf_counter()
    with Progress("training", epochs * len(train), "batches") as bar:
        for _ in range(epochs):
            for keys, images, labels in train:
                net.learn(images, labels)
                count += len(keys)
                bar.add()
            accuracies.append(trial.accuracy(net))
    seconds = time.perf_counter() - began
    _say(f"  images to learn from  {count // epochs:>9,}  and {len(trial.labels):,} to test on")
    for epoch, accuracy in enumerate(accuracies):
        name = f"after epoch {epoch}" if epoch else "before"
        _say(f"  {name:<20}  {accuracy:9.1%}  {'#' * round(40 * accuracy)}")
    _rate("trained on", count, seconds)
    _say(f"  bottleneck of the last epoch: {train.stats().bottleneck}")


@dataclass(frozen=True, slots=True)
class Stopped:
    """One rank that stopped in mid-epoch: its state as it would be stored, and what it had delivered."""

    state: str
    seen: Seen


def _stop(train: ps.Dataset, epoch: int, net: Net) -> list[Stopped]:
    _say(f"\nStop {RANKS} ranks in mid-epoch, at different places")
    with ExitStack() as stack:
        loaders = [stack.enter_context(closing(_loader(train, rank, RANKS, epoch))) for rank in range(RANKS)]
        depths = [len(loader) * (rank + 1) // (RANKS + 1) for rank, loader in enumerate(loaders)]
        seen = _learn_together([islice(each, depth) for each, depth in zip(loaders, depths, strict=True)], net)
        states = [json.dumps(loader.state_dict()) for loader in loaders]
    for rank, (depth, loader) in enumerate(zip(depths, loaders, strict=True)):
        _say(f"  rank {rank} of {RANKS}           {len(seen[rank]):>9,}  samples, {depth} of {len(loader)} batches")
        _say(f"    its state, {len(states[rank])} bytes: {states[rank]}")
    return [Stopped(state, mine) for state, mine in zip(states, seen, strict=True)]


def _resume(train: ps.Dataset, epoch: int, net: Net, stopped: list[Stopped], whole: Seen) -> bool:
    """Resume both ways and compare with epochs that nobody stopped; say whether both are exact."""
    _say(f"\nResume, as the same ranks and as {RANKS_AFTER}")
    verdicts = []
    for rank, one in enumerate(stopped):
        rest, unstopped = _rest(train, rank, epoch, one)
        verdicts.append(verdict(one.seen + rest, unstopped, ordered=True))
        _say(f"  rank {rank} of {RANKS}           {len(rest):>9,}  samples, in order: {verdicts[-1]}")
    shares = _shares(train, epoch, net, [one.state for one in stopped])
    for rank, share in enumerate(shares):
        _say(f"  rank {rank} of {RANKS_AFTER}           {len(share):>9,}  samples")
    together = [seen for part in ([one.seen for one in stopped], shares) for each in part for seen in each]
    verdicts.append(verdict(together, whole, ordered=False))
    _say(f"  before and after      {len(together):>9,}  samples, each once: {verdicts[-1]}")
    return all(words == EXACT for words in verdicts)


# What the steps are made of


EXACT = "exact"


def verdict(got: Seen, expected: Seen, *, ordered: bool) -> str:
    """Compare samples, pixels and all, with what they should be: ``EXACT``, or words for how they differ."""
    missing, surplus = Counter(expected) - Counter(got), Counter(got) - Counter(expected)
    if missing or surplus:
        return f"NOT EXACT, {missing.total():,} missing and {surplus.total():,} that do not belong"
    return EXACT if got == expected or not ordered else "NOT EXACT, another order"


def _loader(train: ps.Dataset, rank: int, world: int, epoch: int) -> ps.Loader:
    return train.loader(rank, world, epoch, uneven="keep")


def _rest(train: ps.Dataset, rank: int, epoch: int, stopped: Stopped) -> tuple[Seen, Seen]:
    """What a rank gives when it goes on from its own state, and its epoch when nobody stops it."""
    with closing(_loader(train, rank, RANKS, epoch)) as loader:
        unstopped = [one for batch in loader for one in _seen(batch)]
    with closing(_loader(train, rank, RANKS, epoch)) as loader:
        loader.load_state_dict(json.loads(stopped.state))
        return [one for batch in loader for one in _seen(batch)], unstopped


def _shares(train: ps.Dataset, epoch: int, net: Net, states: list[str]) -> list[Seen]:
    """Learn the rest of the epoch under another number of ranks; return what each of them got."""
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(closing(_loader(train, rank, RANKS_AFTER, epoch))) for rank in range(RANKS_AFTER)
        ]
        for loader in loaders:
            loader.load_state_dict(states=[json.loads(state) for state in states])
        return _learn_together(loaders, net)


def _learn_together(ranks: Sequence[Iterable[Batch]], net: Net) -> list[Seen]:
    """Learn as ranks do that share their gradients: each step is one batch of every rank that has one."""
    seen: list[Seen] = [[] for _ in ranks]
    for step in zip_longest(*ranks):
        batches = [batch for batch in step if batch is not None]
        net.learn(np.concatenate([images for _, images, _ in batches]), np.concatenate([b[2] for b in batches]))
        for mine, batch in zip(seen, step, strict=True):
            mine += _seen(batch) if batch is not None else []
    return seen


def _seen(batch: Batch) -> Seen:
    keys, images, _ = batch
    return [(key, crc32(image.tobytes())) for key, image in zip(keys, images, strict=True)]


def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Add the picture of a sample's class: any colours that differ, anywhere, of any size, with noise."""
    from PIL import Image, ImageDraw

    dark, light = (tuple(int(v) for v in rng.integers(*span, 3)) for span in ((0, 110), (145, 256)))
    back, ink = (dark, light) if rng.random() < 0.5 else (light, dark)
    size = rng.uniform(6, 11)
    x, y = rng.uniform(size + 1, SIDE - size - 1, 2)
    image = Image.new("RGB", (SIDE, SIDE), back)
    _shape(ImageDraw.Draw(image), SHAPES[sample["cls"]], (x, y, size), ink)
    noisy = np.asarray(image, np.int16) + rng.integers(-20, 21, (SIDE, SIDE, 3), np.int16)
    about = {"shape": SHAPES[sample["cls"]], "x": round(x, 1), "y": round(y, 1), "size": round(size, 1)}
    return {**sample, "png": noisy.clip(0, 255).astype(np.uint8), "json": about}


def _shape(pen: Any, name: str, place: tuple[float, float, float], ink: tuple[int, ...]) -> None:
    x, y, size = place
    near, thin = 0.85 * size, 0.35 * size
    if name == "circle":
        pen.ellipse((x - size, y - size, x + size, y + size), fill=ink)
    elif name == "square":
        pen.rectangle((x - near, y - near, x + near, y + near), fill=ink)
    elif name == "triangle":
        pen.polygon([(x, y - size), (x - size, y + near), (x + size, y + near)], fill=ink)
    else:
        pen.rectangle((x - size, y - thin, x + size, y + thin), fill=ink)
        pen.rectangle((x - thin, y - size, x + thin, y + size), fill=ink)


def augment(image: Pixels, rng: np.random.Generator) -> Pixels:
    """Mirror an image or not, and move it by up to two pixels."""
    down, right = rng.integers(-2, 3, 2)
    mirrored = image[:, ::-1] if rng.random() < 0.5 else image
    return np.roll(mirrored, (down, right), (0, 1))


class Net:
    """Two layers that learn by gradient descent with momentum; all of it follows from the seed."""

    # So few that numpy multiplies without threads of its own, which would take the cores from the decoders.
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
        self._speeds = [np.zeros_like(weight) for weight in self._weights]

    def learn(self, images: Pixels, labels: Labels) -> None:
        """Take one step towards these labels."""
        inputs = _contrast(images)
        hidden, error = self._forward(inputs)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        below = (error @ self._weights[2].T) * (hidden > 0)
        slopes = (inputs.T @ below, below.sum(0), hidden.T @ error, error.sum(0))
        for weight, speed, slope in zip(self._weights, self._speeds, slopes, strict=True):
            speed *= self.MOMENTUM
            speed -= self.RATE * slope
            weight += speed

    def guess(self, images: Pixels) -> Labels:
        """The likeliest class of each image."""
        return np.asarray(self._forward(_contrast(images))[1].argmax(1), np.int64)

    def _forward(self, inputs: Floats) -> tuple[Floats, Floats]:
        """The hidden layer, and the probability of each class."""
        first, first_bias, second, second_bias = self._weights
        hidden = np.maximum(inputs @ first + first_bias, 0)
        scores = hidden @ second + second_bias
        odds = np.exp(scores - scores.max(1, keepdims=True))
        return hidden, odds / odds.sum(1, keepdims=True)


def _contrast(images: Pixels) -> Floats:
    """How far each 2 x 2 patch is from the image's border: what tells shapes apart, whatever their colours."""
    gray = images.mean(-1, dtype=np.float32)
    border = np.concatenate([gray[:, 0], gray[:, -1], gray[:, :, 0], gray[:, :, -1]], axis=1)
    patches = gray.reshape(len(gray), SIDE // 2, 2, SIDE // 2, 2).mean((2, 4)).reshape(len(gray), -1)
    far = np.abs(patches - np.median(border, axis=1, keepdims=True))
    return np.asarray(far / far.max(1, keepdims=True).clip(1) - 0.3, np.float32)


@dataclass(frozen=True, slots=True)
class Trial:
    """The images kept from training."""

    images: Pixels
    labels: Labels

    @classmethod
    def of(cls, test: ps.Dataset) -> Trial:
        """Decode all of ``test``."""
        return cls(*test.decode("rgb8").to_tuple("png;jpg", "cls").take_batch(len(test)))

    def accuracy(self, net: Net) -> float:
        """The share that ``net`` gets right."""
        return float((net.guess(self.images) == self.labels).mean())


# Where it works, and what it says


@contextmanager
def _workplace(folder: str | None) -> Iterator[Path]:
    """A folder for the shards that is gone afterwards, or gets its name when all went well."""
    with ExitStack() as stack:
        with _writing(folder):
            target = None if folder is None else _vacant(folder)
            # Beside the target, so that a change of name moves the shards and their indexes stay valid.
            beside = None if target is None else next(place for place in target.parents if place.exists())
            kept = tempfile.TemporaryDirectory(prefix=".penstock-demo-", dir=beside)
            shards = Path(stack.enter_context(kept)) / "shards"
        yield shards
        if target is not None:
            with _writing(folder):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(shards, target)


def _vacant(folder: str) -> Path:
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PlanError(f"{folder} is not an empty folder; name one that is new or empty")
    return target


@contextmanager
def _writing(folder: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StorageError(f"cannot write: {exc.strerror or exc}", folder or tempfile.gettempdir()) from exc


def _rate(what: str, count: int, seconds: float, more: str = "") -> None:
    _say(f"  {what:<20}  {count / seconds:>9,.0f}  samples/s{more}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
