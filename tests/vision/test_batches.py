"""MixUp and CutMix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock import vision

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 20, 30, 3), np.uint8)
LABELS = np.array([0, 1, 2, 3, 4, 0])
ONE_HOT = np.eye(5, dtype=np.float32)[LABELS]


def test_mixup_blends_each_image_with_the_one_before_it() -> None:
    share = float(np.random.default_rng(4).beta(0.4, 0.4))
    batch = vision.MixUp(0.4, 5)({"jpg": IMAGES, "cls": LABELS, "txt": ["x"] * 6}, np.random.default_rng(4))
    want = share * IMAGES + (1 - share) * IMAGES[[5, 0, 1, 2, 3, 4]].astype(float)
    assert batch["jpg"].dtype == np.uint8
    assert np.abs(batch["jpg"] - want).max() <= 0.51
    assert np.allclose(batch["cls"], share * ONE_HOT + (1 - share) * ONE_HOT[[5, 0, 1, 2, 3, 4]], atol=1e-6)
    assert batch["txt"] == ["x"] * 6


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_cutmix_replaces_a_box_by_that_of_the_image_before_it(layout: Any) -> None:
    images = IMAGES if layout == "HWC" else IMAGES.transpose(0, 3, 1, 2)
    cut = vision.CutMix(1.0, 5, layout=layout)
    for seed in range(6):
        mixed, labels = cut((images, LABELS), np.random.default_rng(seed))
        mixed = mixed if layout == "HWC" else mixed.transpose(0, 2, 3, 1)
        replaced = (mixed != IMAGES).any(axis=3).any(axis=0)
        share = 1 - replaced.mean()
        assert np.array_equal(mixed[:, replaced], np.roll(IMAGES, 1, axis=0)[:, replaced])
        assert np.allclose(labels, share * ONE_HOT + (1 - share) * np.roll(ONE_HOT, 1, axis=0), atol=0.01)


def test_the_area_of_cutmix_has_torchvisions_distribution() -> None:
    rng = np.random.default_rng(0)
    image = np.zeros((2, 40, 40, 1), np.uint8)
    shares = [vision.CutMix(1.0, 2)((image, np.array([0, 1])), rng)[1][0, 0] for _ in range(800)]
    reference = np.random.default_rng(9)
    want = []
    for _ in range(800):
        half_side = 0.5 * np.sqrt(1 - reference.beta(1, 1))
        y, x, half = int(reference.integers(40)), int(reference.integers(40)), int(half_side * 40)
        box = (min(40, y + half) - max(0, y - half)) * (min(40, x + half) - max(0, x - half))
        want.append(1 - box / 1600)
    assert abs(np.mean(shares) - np.mean(want)) < 0.03
    assert abs(np.std(shares) - np.std(want)) < 0.03


def test_tensors_stay_tensors_and_soft_labels_are_accepted() -> None:
    images, labels = vision.MixUp(1.0)((torch.from_numpy(IMAGES) / 255, torch.from_numpy(ONE_HOT)))
    assert isinstance(images, torch.Tensor)
    assert isinstance(labels, torch.Tensor)
    assert images.dtype == torch.float32
    assert torch.allclose(labels.sum(dim=1), torch.ones(6))


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ((IMAGES, LABELS), "set classes="),
        (({"a": 1}), "which field is the image"),
        ((list(IMAGES), LABELS), "images of one size"),
    ],
)
def test_a_batch_that_cannot_be_mixed_is_an_error(batch: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        vision.MixUp()(batch)
    with pytest.raises(ValueError, match="from 0 to 3"):
        vision.MixUp(classes=4)((IMAGES, LABELS))
    with pytest.raises(TypeError, match="batches"):
        vision.MixUp()(3)


def test_the_same_epoch_mixes_batches_in_the_same_way() -> None:
    ds = ps.from_items([{"image": image, "label": int(label)} for image, label in zip(IMAGES, LABELS, strict=True)])
    mixed = ds.batched(3).map(vision.CutMix(1.0, 5))
    for batch, again in zip(mixed.epoch(1), mixed.epoch(1).on("serial"), strict=True):
        assert np.array_equal(batch["image"], again["image"])
    first, second = (next(iter(mixed.epoch(epoch)))["label"] for epoch in (1, 2))
    assert not np.array_equal(first, second)
