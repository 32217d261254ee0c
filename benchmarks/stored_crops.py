"""The CPU time of crops of photos that are stored in different ways, beside the decoder alone on whole photos.

``python stored_crops.py [rounds]`` prints the figures of the vision guide: medians of rounds in which every row is
measured once, in turn, by the CPU time of one thread, or of the process for pipelines with two workers. Ratios are
medians of the ratios within a round, so that a busy machine slows both sides of each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import data
import numpy as np
import photos

COUNT, LARGE = 150, 20
Row = tuple[str, str, Callable[[], float]]  # a name, the name of the row to compare with, CPU ms of a sample


def rows() -> list[Row]:
    """Return the rows to measure."""
    import simplejpeg

    from penstock import vision

    plain, smooth = (vision.RandomResizedCrop(224, flip=True, antialias=antialias) for antialias in (False, True))
    stored = {way: _images(photos.stored(COUNT, way)) for way in photos.WAYS}
    stored["whole"] = _images(photos.photos(COUNT))
    large = {tiles: _images(photos.large(LARGE, tiles)) for tiles in (False, True)}
    decode = "decoder alone, whole photos"
    out: list[Row] = [(decode, decode, _one_thread(stored["whole"], lambda image, _: simplejpeg.decode_jpeg(image)))]
    for way, beside in (
        ("whole", decode),
        ("tiles", decode),
        ("plain-256", "plain-256"),
        ("tiles-256", "plain-256"),
        ("planes-256", "plain-256"),
    ):
        for kind, transform in (("bilinear", plain), ("antialiased", smooth)):
            other = beside if beside == decode else f"{beside}, {kind}"
            out.append((f"{way}, {kind}", other, _one_thread(stored[way], transform)))
    decode_large, crop = "decoder alone, 2048 x 1024", vision.RandomCrop(512)
    out.append((decode_large, decode_large, _one_thread(large[False], lambda image, _: simplejpeg.decode_jpeg(image))))
    out += [(f"2048 x 1024{', tiles' * tiles}", decode_large, _one_thread(large[tiles], crop)) for tiles in large]
    return out + _pipelines(stored, plain, smooth)


def _images(stored: data.StoredData) -> list[bytes]:
    return [sample.get("jpg") or sample["yuv"] for sample in data.read_samples(stored)]


def _one_thread(images: list[bytes], crop: Callable[[bytes, np.random.Generator], Any]) -> Callable[[], float]:
    def measure() -> float:
        rngs = [np.random.default_rng(number) for number in range(len(images))]
        begun = time.thread_time()
        for image, rng in zip(images, rngs, strict=True):
            crop(image, rng)
        return 1000 * (time.thread_time() - begun) / len(images)

    return measure


def _pipelines(stored: dict[str, list[bytes]], plain: Any, smooth: Any) -> list[Row]:
    """Return the rows of whole pipelines into batches of 50, with two workers."""
    import simplejpeg

    import penstock as ps

    def pipeline(images: list[bytes], transform: Any) -> Callable[[], float]:
        samples = [{"jpg": image} for image in images]
        ds = ps.from_items(samples).repeat(4).decode(jpg=transform, workers=2).batched(50)

        def measure() -> float:
            begun = time.process_time()
            for _ in ds:
                pass
            return 1000 * (time.process_time() - begun) / len(images) / 4

        return measure

    def decode(image: bytes) -> Any:
        return simplejpeg.decode_jpeg(image)[:1, :1]  # the pixels are dropped in the worker

    alone = "two workers: decoder alone, whole photos"
    out: list[Row] = [(alone, alone, pipeline(stored["whole"], decode))]
    for way, beside in (("whole", alone), ("tiles", alone), ("plain-256", ""), ("tiles-256", ""), ("planes-256", "")):
        for kind, transform in (("bilinear", plain), ("antialiased", smooth)):
            other = beside or f"two workers: plain-256, {kind}"
            out.append((f"two workers: {way}, {kind}", other, pipeline(stored[way], transform)))
    return out


def main(rounds: int) -> None:
    """Print the median of every row, and that of its ratio to another row of the same round."""
    measured = rows()
    times: dict[str, list[float]] = {name: [] for name, _, _ in measured}
    for number in range(rounds + 1):
        for name, _, measure in measured:
            taken = measure()
            if number:  # the first round loads and allocates
                times[name].append(taken)
    for name, other, _ in measured:
        ratio = median(theirs / own for own, theirs in zip(times[name], times[other], strict=True))
        sys.stdout.write(f"{name:45} {median(times[name]):7.3f} ms  {ratio:5.2f}x of {other}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
