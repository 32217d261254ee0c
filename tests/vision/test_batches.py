"""Batches whose images and labels are mixed."""

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


def test_mixup_mixes_each_with_the_one_before_it() -> None:
    share = float(np.random.default_rng(4).beta(0.4, 0.4))
    batch = vision.MixUp(0.4, 5)({"jpg": IMAGES, "cls": LABELS, "txt": ["x"] * 6}, np.random.default_rng(4))
    want = share * IMAGES + (1 - share) * IMAGES[[5, 0, 1, 2, 3, 4]].astype(float)
    assert batch["jpg"].dtype == np.uint8
    assert np.abs(batch["jpg"] - want).max() <= 0.51
    assert np.allclose(batch["cls"], share * ONE_HOT + (1 - share) * ONE_HOT[[5, 0, 1, 2, 3, 4]], atol=1e-6)
    assert batch["txt"] == ["x"] * 6


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_cutmix_puts_a_part_of_the_one_before_it_into_each(layout: Any) -> None:
    images = IMAGES if layout == "HWC" else IMAGES.transpose(0, 3, 1, 2)
    cut = vision.CutMix(1.0, 5, layout=layout)
    for seed in range(6):
        mixed, labels = cut((images, LABELS), np.random.default_rng(seed))
        mixed = mixed if layout == "HWC" else mixed.transpose(0, 2, 3, 1)
        other = (mixed != IMAGES).any(axis=3).any(axis=0)
        share = 1 - other.mean()
        assert np.array_equal(mixed[:, other], np.roll(IMAGES, 1, axis=0)[:, other])
        assert np.allclose(labels, share * ONE_HOT + (1 - share) * np.roll(ONE_HOT, 1, axis=0), atol=0.01)


def test_the_share_that_is_cut_has_torchvisions_distribution() -> None:
    rng = np.random.default_rng(0)
    image = np.zeros((2, 40, 40, 1), np.uint8)
    kept = [vision.CutMix(1.0, 2)((image, np.array([0, 1])), rng)[1][0, 0] for _ in range(800)]
    dice = np.random.default_rng(9)
    want = []
    for _ in range(800):
        reach = 0.5 * np.sqrt(1 - dice.beta(1, 1))
        y, x, half = int(dice.integers(40)), int(dice.integers(40)), int(reach * 40)
        box = (min(40, y + half) - max(0, y - half)) * (min(40, x + half) - max(0, x - half))
        want.append(1 - box / 1600)
    assert abs(np.mean(kept) - np.mean(want)) < 0.03
    assert abs(np.std(kept) - np.std(want)) < 0.03


def test_tensors_stay_tensors_and_soft_labels_are_taken() -> None:
    images, labels = vision.MixUp(1.0)((torch.from_numpy(IMAGES) / 255, torch.from_numpy(ONE_HOT)))
    assert isinstance(images, torch.Tensor)
    assert isinstance(labels, torch.Tensor)
    assert images.dtype == torch.float32
    assert torch.allclose(labels.sum(dim=1), torch.ones(6))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((IMAGES, LABELS), "say classes="),
        (({"a": 1}), "which field is the image"),
        ((list(IMAGES), LABELS), "no batch of one size"),
    ],
)
def test_a_batch_that_cannot_be_mixed_is_an_error(batch: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        vision.MixUp()(batch)
    with pytest.raises(ValueError, match="from 0 to 3"):
        vision.MixUp(classes=4)((IMAGES, LABELS))
    with pytest.raises(TypeError, match="batches"):
        vision.MixUp()(3)


def test_batches_are_mixed_the_same_way_every_time() -> None:
    ds = ps.from_items([{"image": image, "label": int(label)} for image, label in zip(IMAGES, LABELS, strict=True)])
    mixed = ds.batched(3).map(vision.CutMix(1.0, 5))
    for one, other in zip(mixed.epoch(1), mixed.epoch(1).on("serial"), strict=True):
        assert np.array_equal(one["image"], other["image"])
    first, second = (next(iter(mixed.epoch(epoch)))["label"] for epoch in (1, 2))
    assert not np.array_equal(first, second)
