"""Augmentation on a device gives what the CPU's transforms give, with the same random draws."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock as ps
from penstock import vision
from penstock.errors import PlanError
from penstock.vision.device import DeviceImage

CROP = vision.RandomResizedCrop(32, flip=True)
TRANSFORMS: dict[str, tuple[Any, ...]] = {
    "crop": (CROP,),
    "plain crop": (vision.RandomResizedCrop(32, flip=True, antialias=False),),
    "shrinks five times": (vision.RandomResizedCrop(12, scale=(0.8, 1)),),
    "shrinks in height only": (vision.Resize((20, 90)),),
    "shrinks in width only": (vision.Resize((90, 20)),),
    "padded crop": (vision.RandomCrop(60, padding=9, pad_if_needed=True, padding_mode="reflect", flip=True),),
    "center": (vision.CenterCrop(30, layout="CHW", normalize="imagenet", dtype="float16"),),
    "flips": (CROP, vision.HorizontalFlip(), vision.VerticalFlip()),
    "gray": (CROP, vision.Grayscale(p=0.5)),
    "one channel": (CROP, vision.Grayscale(1)),
    "jitter": (CROP, vision.ColorJitter(0.4, 0.4, 0.4, 0.3)),
    "jitter without a crop of other size": (vision.CenterCrop(40), vision.ColorJitter(0.8, (0.2, 2), 0.9)),
    "normalize": (CROP, vision.ColorJitter(0.4), vision.Normalize(layout="CHW")),
    "tensor": (CROP, vision.ToTensor(dtype="float16")),
    "tensor of levels": (CROP, vision.ToTensor(dtype="uint8")),
}


def photo(number: int, kind: str = "JPEG") -> bytes:
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
    image = small.resize((100 + 7 * number, 80 + 3 * number), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    image.save(stream, kind, **({"restart_marker_blocks": 1} if number % 2 else {}))
    return stream.getvalue()


SOURCE = ps.from_items([{"jpg": photo(n, ("JPEG", "PNG")[n % 3 == 2]), "cls": n} for n in range(9)]).shuffle().seed(4)


def batches(transform: Any, source: ps.Dataset = SOURCE, **options: Any) -> list[Any]:
    return list(source.decode(jpg=transform, **options).batched(5).loader(epoch=2, format="torch", device="cpu"))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_device_gives_what_the_cpu_gives(name: str) -> None:
    transforms = TRANSFORMS[name]
    wanted, got = batches(vision.Compose(*transforms)), batches(vision.on_device(*transforms), workers=2)
    for want, batch in zip(wanted, got, strict=True):
        assert batch["jpg"].dtype == want["jpg"].dtype
        assert batch["cls"].tolist() == want["cls"].tolist()
        level = 0.02 if want["jpg"].is_floating_point() else 1
        assert batch["jpg"].shape == want["jpg"].shape
        assert (batch["jpg"].float() - want["jpg"].float()).abs().max() <= level


def test_arrays_of_floats_stay_floats() -> None:
    floats = ps.from_items([{"jpg": vision.read_image(photo(n)).astype(np.float32) / 255} for n in range(4)])
    transforms = CROP, vision.ColorJitter(0.4, 0.4, 0.4, 0.2), vision.Grayscale(p=0.5)
    want = next(iter(floats.map(vision.Compose(*transforms)).batched(4).loader(format="torch")))["jpg"]
    got = next(iter(floats.map(vision.on_device(*transforms)).batched(4).loader(format="torch")))["jpg"]
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 1e-4


def test_planes_are_resized_before_they_are_converted() -> None:
    store = vision.Store(short=64, kind="yuv")
    planes = ps.from_items([{"yuv": store(photo(n))} for n in range(4)])
    loaders = [
        planes.decode(yuv=transform).batched(4).loader(format="torch")
        for transform in (vision.Compose(CROP), vision.on_device(CROP))
    ]
    want, got = (next(iter(loader))["yuv"] for loader in loaders)
    assert torch.equal(got, want)


def test_mixing_follows_the_draws_of_the_first_sample() -> None:
    plain = batches(vision.on_device(CROP))
    mixed = batches(vision.on_device(CROP, vision.MixUp(0.4, classes=9)))
    for batch, before in zip(mixed, plain, strict=True):
        share = float(batch["cls"][0, before["cls"][0]])
        want = vision.mixup(before["jpg"].numpy(), share)
        assert (batch["jpg"].int() - torch.from_numpy(want).int()).abs().max() <= 1
        assert torch.allclose(batch["cls"].sum(1), torch.ones(len(batch["cls"])))
    again = batches(vision.on_device(CROP, vision.MixUp(0.4, classes=9)), workers=3)
    assert all(torch.equal(one["jpg"], other["jpg"]) for one, other in zip(mixed, again, strict=True))
    cut = batches(vision.on_device(CROP, vision.Normalize(layout="CHW"), vision.CutMix(classes=9, layout="CHW")))
    assert cut[0]["jpg"].shape == (5, 3, 32, 32)
    assert cut[0]["cls"].shape == (5, 9)


def test_tuples_have_the_requested_types_in_torch_batches() -> None:
    transform = vision.on_device(CROP, vision.Normalize(layout="CHW"))
    pairs = SOURCE.decode(jpg=transform).to_tuple("jpg", "cls")
    images, labels = next(iter(pairs.batched(4).loader(format="torch", dtypes=torch.float16)))
    assert images.dtype == labels.dtype == torch.float16
    assert images.shape == (4, 3, 32, 32)
    images, _ = next(iter(pairs.iter_torch_batches(4, device="cpu")))
    assert images.dtype == torch.float32


def test_a_state_restores_the_rest_with_the_same_pixels() -> None:
    def loader() -> Any:
        return SOURCE.decode(jpg=vision.on_device(CROP, vision.ColorJitter(0.4))).batched(2).loader(format="torch")

    whole, begun, resumed = list(loader()), loader(), loader()
    next(iter(begun))
    resumed.load_state_dict(begun.state_dict())
    begun.close()
    rest = list(resumed)
    assert len(rest) == len(whole) - 1
    assert all(torch.equal(one["jpg"], other["jpg"]) for one, other in zip(rest, whole[1:], strict=True))


def test_batches_of_one_size_are_augmented_where_they_are() -> None:
    images = torch.from_numpy(np.stack([vision.read_image(photo(3))] * 4))
    transform = vision.on_device(CROP, vision.ColorJitter(0.2))
    out = transform({"image": images, "label": torch.arange(4)}, np.random.default_rng(1))
    assert out["image"].shape == (4, 32, 32, 3)
    assert not torch.equal(out["image"][0], out["image"][1])
    assert torch.equal(transform(images, np.random.default_rng(1)), out["image"])
    assert torch.equal(transform((images, 1), np.random.default_rng(1))[0], out["image"])
    seed = int(np.random.default_rng(1).integers(1 << 63, size=4)[2])
    want = vision.Compose(*transform.transforms)(images[2].numpy(), np.random.default_rng(seed))
    assert np.array_equal(out["image"][2].numpy(), want)
    with pytest.raises(ValueError, match="pads images"):
        vision.on_device(vision.CenterCrop(500))(images)


def test_processes_send_parts_of_images() -> None:
    transform = vision.on_device(CROP, vision.ColorJitter(0.4))
    want, got = (batches(transform, on=on, workers=2) for on in ("threads", "processes"))
    assert all(torch.equal(one["jpg"], other["jpg"]) for one, other in zip(want, got, strict=True))


def test_an_image_to_augment_is_a_value_that_says_what_to_do() -> None:
    transform = vision.on_device(CROP)
    assert repr(transform) == f"on_device({CROP!r})"
    assert transform == pickle.loads(pickle.dumps(transform))
    image = transform(photo(1), np.random.default_rng(0))
    assert isinstance(image, DeviceImage)
    assert "batched() and loader(format='torch')" in repr(image)
    assert image.nbytes == image.pixels.nbytes


def test_mistakes_are_named() -> None:
    for transforms, message in (
        ((CROP, CROP), "must be the first transform"),
        ((vision.RandomCrop(8, boxes="boxes"),), "without annotations"),
        ((vision.GaussianBlur(3),), "is not supported"),
        ((vision.Normalize(), vision.ColorJitter(0.1)), "must come before pixels are converted or mixed"),
        ((vision.RandomCrop(8, layout="CHW"), vision.ColorJitter(0.1)), "must come before"),
    ):
        with pytest.raises(PlanError, match=message):
            vision.on_device(*transforms)
    ds = SOURCE.decode(jpg=vision.on_device(CROP))
    with pytest.raises(PlanError, match="format='torch'"):
        next(iter(ds.batched(2).loader(format="numpy")))
    with pytest.raises(ValueError, match=r"add batched\(n\)"):
        next(iter(ds.loader(format="torch")))
    for transform in (vision.ColorJitter(0.1), vision.Resize(20)):
        with pytest.raises(ValueError, match="differ in size"):
            batches(vision.on_device(transform))
