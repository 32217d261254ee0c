"""The inputs and outputs of transforms, and how they are composed."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock as ps
from penstock import vision
from penstock.errors import PlanError

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("normalize", [None, (MEAN, STD), "imagenet"])
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_layout_normalize_and_dtype_set_the_output_format(layout: Any, normalize: Any, dtype: Any) -> None:
    got = vision.CenterCrop((8, 6), layout=layout, normalize=normalize, dtype=dtype)(IMAGE)
    want: Any = IMAGE[6:14, 12:18]
    if normalize is not None or dtype is not None:
        mean, std = {None: ((0,) * 3, (1,) * 3), "imagenet": vision.transform.IMAGENET}.get(normalize, normalize)
        want = ((want / 255 - np.array(mean)) / np.array(std)).astype(dtype or np.float32)
    want = want if layout == "HWC" else want.transpose(2, 0, 1)
    assert got.dtype == want.dtype
    assert got.flags.c_contiguous
    assert np.allclose(got, want, atol=1e-6 if got.dtype == np.float32 else 2e-3)


def test_results_are_tensors_on_request() -> None:
    tensor = vision.Resize(10, to="torch", layout="CHW")(IMAGE)
    assert isinstance(tensor, torch.Tensor)
    assert tuple(tensor.shape) == (3, 10, 15)
    assert tensor.dtype == torch.uint8
    floats = vision.ToTensor()(IMAGE)
    assert torch.allclose(floats, torch.from_numpy(IMAGE).permute(2, 0, 1) / 255)
    assert vision.Normalize(to="torch", dtype="float16")(IMAGE).dtype == torch.float16


def test_arrays_and_pil_images_are_accepted() -> None:
    resize = vision.Resize(10)
    assert np.array_equal(resize(IMAGE), resize(Image.fromarray(IMAGE)))
    assert resize(IMAGE[:, :, 0]).shape == (10, 15, 1)
    assert resize((IMAGE / 255).astype(np.float32)).dtype == np.float32
    for wrong in (IMAGE[None], IMAGE.astype(np.int64), 3, np.empty((0, 3, 3), np.uint8)):
        with pytest.raises(TypeError):
            resize(wrong)


def test_a_generator_decides_and_without_one_results_differ() -> None:
    crop = vision.RandomResizedCrop(8)
    rng = np.random.default_rng
    assert np.array_equal(crop(IMAGE, rng(1)), crop(IMAGE, rng=rng(1)))
    assert len({crop(IMAGE).tobytes() for _ in range(8)}) > 1


def test_compose_applies_transforms_in_order() -> None:
    rng = np.random.default_rng
    steps: Any = (vision.RandomCrop(16), vision.HorizontalFlip(), np.negative, vision.Normalize(layout="CHW"))
    got = vision.Compose(*steps)(IMAGE, rng(5))
    draws = rng(5)
    want = steps[3](np.negative(steps[1](steps[0](IMAGE, draws), draws)))
    assert np.array_equal(got, want)
    as_list: Any = list(steps)
    assert vision.Compose(as_list) == vision.Compose(*steps)
    assert np.array_equal(vision.Compose()(IMAGE), IMAGE)


def test_a_transform_is_a_value() -> None:
    crop = vision.RandomResizedCrop(224, flip=True, antialias=False)
    assert crop == vision.RandomResizedCrop(224, flip=True, antialias=False)
    assert crop != vision.RandomResizedCrop(224)
    assert hash(crop) == hash(pickle.loads(pickle.dumps(crop)))
    assert repr(crop) == "RandomResizedCrop(224, flip=True, antialias=False)"
    assert repr(vision.Compose(vision.Resize(8), vision.ColorJitter(0.4))) == "Compose(Resize(8), ColorJitter(0.4))"
    assert vision.RandomResizedCrop([8, 9], scale=[0.1, 1]) == vision.RandomResizedCrop([8, 9], scale=(0.1, 1))  # type: ignore[arg-type]
    assert "decode(jpg=Resize(8))" in repr(ps.from_items([{"jpg": b""}]).decode(jpg=vision.Resize(8)))


ANY: Any = vision  # hides wrong arguments from the type checker


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ANY.RandomResizedCrop(0), "size=0"),
        (lambda: ANY.RandomResizedCrop("224"), "size='224'"),
        (lambda: ANY.RandomResizedCrop(8, scale=(1, 0.5)), "scale"),
        (lambda: ANY.RandomResizedCrop(8, scale=(0.5, 2)), "scale"),
        (lambda: ANY.RandomResizedCrop(8, ratio=(0, 1)), "ratio"),
        (lambda: ANY.RandomResizedCrop(8, flip=2), "flip=2"),
        (lambda: ANY.RandomResizedCrop(8, layout="WHC"), "layout='WHC'"),
        (lambda: ANY.RandomResizedCrop(8, dtype="int8"), "dtype='int8'"),
        (lambda: ANY.RandomResizedCrop(8, normalize=(0.5, 0.5)), "normalize"),
        (lambda: ANY.RandomResizedCrop(8, normalize=((0.5,), (0,))), "normalize"),
        (lambda: ANY.RandomResizedCrop(8, normalize="imagenet", dtype="uint8"), "dtype='uint8'"),
        (lambda: ANY.RandomResizedCrop(8, to="jax"), "to='jax'"),
        (lambda: ANY.RandomResizedCrop(8, truncated="maybe"), "truncated='maybe'"),
        (lambda: ANY.Resize((3, 4), max_size=9), "max_size=9"),
        (lambda: ANY.Resize(8, max_size=8), "max_size=8"),
        (lambda: ANY.RandomCrop(8, padding=(1, 2, 3)), "padding"),
        (lambda: ANY.RandomCrop(8, padding_mode="wrap"), "padding_mode='wrap'"),
        (lambda: ANY.HorizontalFlip(1.5), "p=1.5"),
        (lambda: ANY.VerticalFlip(-1), "p=-1"),
        (lambda: ANY.ColorJitter(-1), "brightness=-1"),
        (lambda: ANY.ColorJitter(hue=0.6), "hue=0.6"),
        (lambda: ANY.GaussianBlur(4), "size=4"),
        (lambda: ANY.GaussianBlur(3, 0), "sigma"),
        (lambda: ANY.Grayscale(2), "channels=2"),
        (lambda: ANY.RandomErasing(value="noise"), "value='noise'"),
        (lambda: ANY.Normalize((0.5,), (0.5, 0.5)), "normalize"),
        (lambda: ANY.MixUp(0), "alpha=0"),
        (lambda: ANY.CutMix(classes=0), "classes=0"),
        (lambda: ANY.Store(0), "max_side=0"),
        (lambda: ANY.Store(8, 101), "quality=101"),
        (lambda: ANY.Store(), "max_side=None, short=None"),
        (lambda: ANY.Store(8, short=8), "max_side=8, short=8"),
        (lambda: ANY.Store(short=0), "short=0"),
        (lambda: ANY.Store(8, tiles=3), "tiles=3"),
        (lambda: ANY.Store(8, kind="rgb"), "kind='rgb'"),
        (lambda: ANY.Compose(ANY.Resize(8), 3), "Compose: 3"),
    ],
)
def test_arguments_are_checked_where_they_are_written(make: Any, problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert problem in str(caught.value)


class _LikeTorchvision(torch.nn.Module):
    """A transform like those of torchvision: a module that takes PIL images or tensors."""

    def forward(self, image: Any) -> Any:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)[:, :8, :8] / 255


class _LikeAlbumentations:
    """A transform like those of albumentations: a function of named arrays that returns a dict."""

    def __call__(self, *, image: Any) -> dict[str, Any]:
        return {"image": image[::-1].copy()}


def test_transforms_of_other_libraries_work_in_map_and_map_tuple() -> None:
    ds = ps.from_items([{"image": IMAGE, "label": number} for number in range(4)])
    flipped = ds.map(lambda sample: {**sample, **_LikeAlbumentations()(image=sample["image"])}).first()
    assert np.array_equal(flipped["image"], IMAGE[::-1])
    transformed = ds.map(lambda sample: (Image.fromarray(sample["image"]), sample["label"])).map_tuple(
        _LikeTorchvision()
    )
    image, label = transformed.first()
    assert tuple(image.shape) == (3, 8, 8)
    assert label == 0
    batch = transformed.batched(4).first()
    assert tuple(batch[0].shape) == (4, 3, 8, 8)
    cropped = ds.to_tuple("image", "label").map_tuple(vision.RandomCrop(8), None).batched(4).first()
    assert cropped[0].shape == (4, 8, 8, 3)
