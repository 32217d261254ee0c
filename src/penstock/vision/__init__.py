"""Images for training: decoded and cut in one step, then changed at random; the same bytes wherever it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.later import later

if TYPE_CHECKING:
    from penstock.vision.batches import CutMix, MixUp, cutmix, mixup
    from penstock.vision.colours import (
        ColorJitter,
        GaussianBlur,
        Grayscale,
        Normalize,
        RandomErasing,
        ToTensor,
        adjust_brightness,
        adjust_contrast,
        adjust_hue,
        adjust_saturation,
        gaussian_blur,
        grayscale,
        normalize,
    )
    from penstock.vision.geometry import (
        CenterCrop,
        HorizontalFlip,
        RandomCrop,
        RandomResizedCrop,
        Resize,
        VerticalFlip,
    )
    from penstock.vision.reading import read_image
    from penstock.vision.resampling import resize
    from penstock.vision.storing import Store
    from penstock.vision.transform import Compose

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "GaussianBlur",
    "Grayscale",
    "HorizontalFlip",
    "MixUp",
    "Normalize",
    "RandomCrop",
    "RandomErasing",
    "RandomResizedCrop",
    "Resize",
    "Store",
    "ToTensor",
    "VerticalFlip",
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "adjust_saturation",
    "cutmix",
    "gaussian_blur",
    "grayscale",
    "mixup",
    "normalize",
    "read_image",
    "resize",
]

__getattr__ = later(
    __name__,
    {
        "CenterCrop": "geometry",
        "ColorJitter": "colours",
        "Compose": "transform",
        "CutMix": "batches",
        "GaussianBlur": "colours",
        "Grayscale": "colours",
        "HorizontalFlip": "geometry",
        "MixUp": "batches",
        "Normalize": "colours",
        "RandomCrop": "geometry",
        "RandomErasing": "colours",
        "RandomResizedCrop": "geometry",
        "Resize": "geometry",
        "Store": "storing",
        "ToTensor": "colours",
        "VerticalFlip": "geometry",
        "adjust_brightness": "colours",
        "adjust_contrast": "colours",
        "adjust_hue": "colours",
        "adjust_saturation": "colours",
        "cutmix": "batches",
        "gaussian_blur": "colours",
        "grayscale": "colours",
        "mixup": "batches",
        "normalize": "colours",
        "read_image": "reading",
        "resize": "resampling",
    },
)
