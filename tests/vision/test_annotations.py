"""Boxes, masks and keypoints, compared with what is drawn into the image itself."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock import vision
from penstock.errors import PlanError
from penstock.testing import fingerprint

BOX = (30, 20, 60, 50)  # left, top, right, bottom


def sample() -> dict[str, Any]:
    """Return an image with a white rectangle, its box, its mask, and its corners as keypoints."""
    image = np.zeros((90, 120, 3), np.uint8)
    left, top, right, bottom = BOX
    image[top:bottom, left:right] = 255
    points = [[left, top, 2], [right - 1, bottom - 1, 1], [5, 80, 2]]
    return {"image": image, "boxes": [BOX, (100, 70, 119, 89)], "mask": (image[:, :, 0] // 255) * 7, "points": points}


NAMES: dict[str, Any] = {"boxes": "boxes", "masks": "mask", "keypoints": "points"}
TRANSFORMS = [
    vision.RandomResizedCrop(64, scale=(0.4, 1), flip=True, **NAMES),
    vision.RandomResizedCrop((40, 80), flip=True, antialias=False, **NAMES),
    vision.RandomCrop(70, padding=8, flip=True, **NAMES),
    vision.HorizontalFlip(1, **NAMES),
    vision.VerticalFlip(0.5, **NAMES),
    vision.Compose(vision.HorizontalFlip(**NAMES), vision.RandomResizedCrop(50, flip=True, **NAMES)),
]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_annotations_stay_on_what_they_describe(transform: Any) -> None:
    seen = 0
    for seed in range(20):
        out = transform(sample(), rng=np.random.default_rng(seed))
        bright = out["image"][:, :, 0] > 127
        assert out["mask"].shape == out["image"].shape[:2]
        assert ((out["mask"] == 7) != bright).mean() < 0.03
        assert set(np.unique(out["mask"])) <= {0, 7}
        left, _, right, _ = out["boxes"][0]
        if not bright.any():
            continue
        rows, columns = np.flatnonzero(bright.any(axis=1)), np.flatnonzero(bright.any(axis=0))
        assert np.abs(np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]) - out["boxes"][0]).max() <= 2
        assert out["boxes"].dtype == np.float32
        for x, y, visible in out["points"][:2]:
            inside = 0 <= x < bright.shape[1] and 0 <= y < bright.shape[0]
            assert bool(visible) == inside
            assert left - 2 <= x <= right + 2 or not inside
            seen += inside
    assert seen > 10


def test_fixed_transforms_scale_annotations() -> None:
    out = vision.Resize((45, 240), **NAMES)(sample())
    assert out["boxes"].tolist() == [[60, 10, 120, 25], [200, 35, 238, 44.5]]
    assert out["points"][0].tolist() == [60, 10, 2]
    centered = vision.CenterCrop(100, **NAMES)(sample())
    assert centered["boxes"][0].tolist() == [20, 25, 50, 55]
    assert not centered["mask"][:5].any()
    plain = vision.Resize((45, 240))({**sample(), "boxes": "kept"})
    assert (plain["boxes"], plain["image"].shape) == ("kept", (45, 240, 3))


def test_a_box_outside_of_the_crop_keeps_its_place_without_area() -> None:
    out = vision.CenterCrop(20, **NAMES)({**sample(), "boxes": [(0, 0, 5, 5), (50, 40, 70, 60)]})
    (left, top, right, bottom), second = out["boxes"]
    assert (right - left) * (bottom - top) == 0
    assert second.tolist() == [0, 5, 20, 20]
    assert vision.CenterCrop(20, **NAMES)({**sample(), "boxes": []})["boxes"].shape == (0, 4)


def test_masks_follow_the_padding_of_the_image() -> None:
    crop = vision.RandomCrop(110, padding=15, padding_mode="reflect", masks="mask")
    for seed in range(5):
        out = crop(sample(), np.random.default_rng(seed))
        assert np.array_equal(out["mask"] == 7, out["image"][:, :, 0] == 255)


def test_a_plan_moves_annotations_with_the_sample_s_own_generator() -> None:
    def encoded(kind: str, pixels: Any) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, kind)
        return stream.getvalue()

    one = sample()
    fields = {"jpg": encoded("JPEG", one["image"]), "mask.png": encoded("PNG", one["mask"]), "boxes": [BOX]}
    ds = ps.from_items([{"__key__": str(number), **fields} for number in range(8)]).seed(1)
    crop = vision.RandomResizedCrop(48, flip=True, boxes="boxes", masks="mask.png")
    plan = ds.map(crop, workers=2).batched(4)
    got = [fingerprint(batch) for batch in plan.epoch(1)]
    assert got == [fingerprint(batch) for batch in plan.epoch(1).on("serial")]
    batch = plan.first()
    assert (batch["jpg"].shape, batch["mask.png"].shape, batch["boxes"].shape) == (
        (4, 48, 48, 3),
        (4, 48, 48),
        (4, 1, 4),
    )
    with pytest.raises(PlanError, match=r"needs the whole sample: use it in map\(\)"):
        ds.decode(jpg=crop).first()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"boxes": [[1, 2, 3]]}, "field 'boxes'.*4 numbers"),
        ({"points": [1, 2]}, "field 'points'.*2 or 3 numbers"),
        ({"mask": [1, 2]}, "field 'mask'.*shape of the image"),
        ({"image": None, "boxes": None}, "pixels|image"),
    ],
)
def test_annotations_of_another_shape_are_an_error(change: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        vision.Resize(20, **NAMES)({**sample(), **change})


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="no field 'boxes'; it has image"):
        vision.Resize(20, boxes="boxes")({"image": sample()["image"]})
    with pytest.raises(ValueError, match="which field is the image"):
        vision.Resize(20)({"photo": 1})
    assert vision.Resize(20, image="photo")({"photo": sample()["image"]})["photo"].shape == (20, 26, 3)
    with pytest.raises(PlanError, match="boxes="):
        vision.Resize(20, boxes=(3,))  # type: ignore[arg-type]
