"""Every augmentation yields the same bytes on threads, on processes, on Ray and after a restart."""

from __future__ import annotations

import io
import os
from itertools import islice
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock import vision
from penstock.testing import fingerprint
from penstock.vision.planes import encode_planes

FULL = os.environ.get("PENSTOCK_FULL") == "1"
CROP = vision.RandomResizedCrop(16, flip=True)
TRANSFORMS: dict[str, Any] = {
    "random resized crop": CROP,
    "random resized crop, plain": vision.RandomResizedCrop(16, flip=True, antialias=False),
    "resize": vision.Resize(12, max_size=20),
    "center crop": vision.CenterCrop(20, layout="CHW", normalize="imagenet", dtype="float16"),
    "random crop": vision.RandomCrop(24, padding=4, padding_mode="reflect", flip=True),
    "flips": vision.Compose(CROP, vision.HorizontalFlip(), vision.VerticalFlip()),
    "jitter": vision.Compose(CROP, vision.ColorJitter(0.4, 0.4, 0.4, 0.2)),
    "gray": vision.Compose(CROP, vision.Grayscale(p=0.5)),
    "blur": vision.Compose(CROP, vision.GaussianBlur(5, p=0.5)),
    "erasing": vision.Compose(CROP, vision.RandomErasing(0.7, value="random")),
    "normalize": vision.Compose(CROP, vision.Normalize(layout="CHW")),
}


def photo(number: int) -> bytes:
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
    image = small.resize((48 + number, 40), Image.Resampling.BICUBIC)
    kind = ("JPEG", "PNG", "WEBP", "tiles", "planes")[number % 5]
    if kind == "planes":
        return encode_planes(np.asarray(image))
    stream = io.BytesIO()
    if kind == "tiles":
        image.save(stream, "JPEG", restart_marker_blocks=1)
    else:
        image.save(stream, kind)
    return stream.getvalue()


SOURCE = ps.from_items([{"__key__": f"{n:02}", "jpg": photo(n), "cls": n % 4} for n in range(21)]).shuffle().seed(3)


def stream(ds: Any) -> list[Any]:
    return [fingerprint(item) for item in ds]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_threads_and_a_restart_yield_what_serial_yields(name: str) -> None:
    ds = SOURCE.decode(jpg=TRANSFORMS[name], workers=3).epoch(2)
    want = stream(ds.on("serial"))
    assert stream(ds) == want
    loader = SOURCE.decode(jpg=TRANSFORMS[name], workers=2).loader(epoch=2)
    assert stream(islice(loader, 8)) == want[:8]
    state = loader.state_dict()
    loader.close()
    restored = SOURCE.decode(jpg=TRANSFORMS[name]).loader()
    restored.load_state_dict(state)
    assert stream(restored) == want[8:]


def test_processes_yield_what_serial_yields() -> None:
    def apply_all(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        jpg = sample["jpg"]
        results = {
            name: transform(jpg, rng) if transform.random else transform(jpg) for name, transform in TRANSFORMS.items()
        }
        return {"jpg": CROP(jpg, rng), "cls": sample["cls"], **results}

    ds = SOURCE.map(apply_all, workers=2, on="processes").batched(7).map(vision.MixUp(0.3, 4)).epoch(1)
    assert stream(ds) == stream(ds.on("serial"))


def test_threads_mix_batches_as_serial_does() -> None:
    for mixing in (vision.MixUp(0.3, 4), vision.CutMix(1.0, 4)):
        ds = SOURCE.decode(jpg=CROP, workers=3).batched(6).map(mixing, workers=2).epoch(1)
        assert stream(ds) == stream(ds.on("serial"))


def stored(way: str) -> ps.Dataset:
    """Return photos that are stored in tiles or planes: large enough to be decoded in parts."""
    rng = np.random.default_rng(5)
    samples = []
    for number in range(12):
        small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        stream = io.BytesIO()
        small.resize((200 + 16 * number, 150), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
        data = vision.tile_jpeg(stream.getvalue())
        samples.append({"jpg": data if way == "tiles" else vision.Store(short=128, kind="yuv")(data), "cls": number})
    return ps.from_items(samples).shuffle().seed(1)


def augmented(way: str, workers: int, on: Any = "threads") -> ps.Dataset:
    crop = vision.RandomResizedCrop(96, flip=True)
    # Batches of 5 MB, which crops are computed in.
    plain = vision.RandomResizedCrop(300, flip=True, antialias=False, layout="CHW", normalize="imagenet")
    ds = stored(way).map(lambda sample: {**sample, "png": sample["jpg"]})
    return ds.decode(jpg=crop, png=plain, workers=workers, on=on).batched(5).epoch(3)


def check_engines(way: str, *plans: ps.Dataset) -> None:
    """Compare each plan, and each that continues from the state of the one before it, with the serial engine."""
    want = stream(augmented(way, 1).on("serial"))
    for plan, other in zip(plans, (*plans[1:], plans[0]), strict=True):
        assert stream(plan) == want
        loader, restored = plan.loader(), other.loader()
        assert stream(islice(loader, 1)) == want[:1]
        restored.load_state_dict(loader.state_dict())
        loader.close()
        assert stream(restored) == want[1:]


@pytest.mark.parametrize("way", ["tiles", "planes"])
def test_tiles_and_planes_yield_the_same_batches_on_threads_and_processes(way: str) -> None:
    check_engines(way, augmented(way, 3), augmented(way, 2, "processes"))


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("way", ["tiles", "planes"] if FULL else ["tiles"])
def test_tiles_and_planes_yield_the_same_batches_on_ray(way: str) -> None:
    check_engines(way, augmented(way, 2 if FULL else 1).on("ray"), augmented(way, 2))
