"""Small synthetic datasets: drawn photos and sounds in class folders, a table of trips, and reviews as text."""

from __future__ import annotations

import csv
import json
import math
import os
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import MissingExtra, PlanError

PHOTO_CLASSES = ("circle", "cross", "square", "triangle")
SOUND_CLASSES = ("chirp", "noise", "pulse", "tone")
RATE_HZ = 16_000
CITIES = ("Berlin", "Lagos", "Lima", "Osaka", "Porto")
OPINIONS = (  # negative, positive
    ("dull", "flat", "hard to follow", "much too long", "a waste of an evening"),
    ("moving", "sharp", "beautifully shot", "over too soon", "worth every minute"),
)
SUBJECTS = ("The plot", "The acting", "The music", "The ending", "The first half")

Photo = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Example:
    """A kind of dataset, and what to say about it."""

    noun: str
    contents: str
    next_step: str
    samples: int  # by default
    write: Callable[[Path, int, np.random.Generator], None]


def make_example(kind: str, folder: str | os.PathLike[str], samples: int | None = None, seed: int = 0) -> int:
    """Write a dataset into a new or empty folder, the same for the same seed; return how many samples it has.

    Raises:
        MissingExtra: Photos need Pillow, which is not installed.
        OSError: The folder cannot be written.
        PlanError: The folder is not empty, or ``seed`` is negative.
    """
    target, example = Path(folder), EXAMPLES[kind]
    if seed < 0:
        raise PlanError(f"seed={seed}: give a whole number of at least 0")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PlanError(f"{target} is not empty; give a new folder")
    if kind == "photos":
        _import_image()  # before a folder is made
    target.mkdir(parents=True, exist_ok=True)
    count = example.samples if samples is None else samples
    example.write(target, count, np.random.default_rng(seed))
    return count


def _import_image() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as exc:
        raise MissingExtra("penstock example photos", "images") from exc
    return Image


def _write_photos(folder: Path, count: int, rng: np.random.Generator) -> None:
    image = _import_image()
    for number in range(count):
        shape = PHOTO_CLASSES[number % len(PHOTO_CLASSES)]
        (folder / shape).mkdir(exist_ok=True)
        image.fromarray(draw_photo(shape, rng)).save(folder / shape / f"{number:05d}.jpg", quality=90)


def draw_photo(shape: str, rng: np.random.Generator) -> Photo:
    """Draw a shape over a background with the gradients and the grain of a photo."""
    height, width = int(rng.integers(180, 260)), int(rng.integers(240, 340))
    y, x = np.mgrid[:height, :width].astype(np.float32)
    slope = rng.uniform(-0.4, 0.4, (2, 3)).astype(np.float32)
    picture = rng.uniform(60, 190, 3).astype(np.float32) + y[..., None] * slope[0] + x[..., None] * slope[1]
    size = rng.uniform(0.18, 0.38) * height
    angle = rng.uniform(0, math.pi / 2)
    right, down = x - rng.uniform(0.35, 0.65) * width, y - rng.uniform(0.35, 0.65) * height
    u = (right * math.cos(angle) + down * math.sin(angle)) / size
    v = (down * math.cos(angle) - right * math.sin(angle)) / size
    picture[_inside(shape, u, v)] = rng.uniform(0, 255, 3)
    picture += rng.normal(0, 6, (height, width, 1)).astype(np.float32)
    pixels: Photo = picture.clip(0, 255).astype(np.uint8)
    return pixels


def _inside(shape: str, u: npt.NDArray[np.float32], v: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    square = np.maximum(abs(u), abs(v)) < 1
    if shape == "circle":
        return u * u + v * v < 1
    if shape == "cross":
        return square & (np.minimum(abs(u), abs(v)) < 0.35)
    return square if shape == "square" else (v > -0.5) & (v < 1 - 1.7 * abs(u))


def _write_sounds(folder: Path, count: int, rng: np.random.Generator) -> None:
    for number in range(count):
        kind = SOUND_CLASSES[number % len(SOUND_CLASSES)]
        (folder / kind).mkdir(exist_ok=True)
        samples = (make_sound(kind, rng) * 32_767).astype("<i2")
        with wave.open(os.fspath(folder / kind / f"{number:05d}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE_HZ)
            file.writeframes(samples.tobytes())


def make_sound(kind: str, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return a sound between half a second and one and a half, between -1 and 1."""
    seconds = np.arange(int(rng.uniform(0.5, 1.5) * RATE_HZ)) / RATE_HZ
    pitch = rng.uniform(200, 900)
    if kind == "noise":
        signal = rng.uniform(-1, 1, len(seconds))
    elif kind == "chirp":
        signal = np.sin(2 * np.pi * pitch * (1 + seconds) * seconds)
    else:
        signal = np.sin(2 * np.pi * pitch * seconds)
        signal = np.sign(signal) if kind == "pulse" else signal
    fade = np.minimum(1, 20 * np.minimum(seconds, seconds[::-1]))
    faded: npt.NDArray[np.float64] = 0.6 * signal * fade
    return faded


def _write_table(folder: Path, count: int, rng: np.random.Generator) -> None:
    with open(folder / "trips.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("trip", "city", "day", "distance_km", "minutes", "price", "tip"))
        for trip in range(count):
            distance = round(float(rng.gamma(2, 3)), 2)
            minutes = round(distance * float(rng.uniform(1.5, 4)), 1)
            day = np.datetime64("2026-01-01") + int(rng.integers(365))
            tip = round(float(rng.exponential(2)), 2) if rng.random() < 0.6 else ""  # often missing
            city = CITIES[int(rng.integers(len(CITIES)))]
            rows.writerow((trip, city, day, distance, minutes, round(2.5 + 1.4 * distance, 2), tip))


def _write_text(folder: Path, count: int, rng: np.random.Generator) -> None:
    with open(folder / "reviews.jsonl", "w", encoding="utf-8") as file:
        for number in range(count):
            label = int(rng.integers(2))
            chosen = rng.permutation(len(SUBJECTS))[: int(rng.integers(1, 4))]
            text = " ".join(f"{SUBJECTS[n]} was {OPINIONS[label][int(rng.integers(5))]}." for n in chosen.tolist())
            row: dict[str, Any] = {"review": number, "text": text, "label": label}
            file.write(f"{json.dumps(row)}\n")


EXAMPLES = {
    "photos": Example(
        "photo", f"in {len(PHOTO_CLASSES)} class folders", "penstock pack {folder} {folder}-shards", 400, _write_photos
    ),
    "sounds": Example(
        "sound", f"in {len(SOUND_CLASSES)} class folders", "penstock pack {folder} {folder}-shards", 100, _write_sounds
    ),
    "table": Example(
        "row", "in trips.csv", "penstock convert {folder}/trips.csv {folder}-parquet", 10_000, _write_table
    ),
    "text": Example("line", "in reviews.jsonl", "penstock info {folder}/reviews.jsonl", 10_000, _write_text),
}
