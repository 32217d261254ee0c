"""Images for training: decoding, cropping and augmentation, with the same bytes on every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.vision.batches import CutMix as CutMix
    from penstock.vision.batches import MixUp as MixUp
    from penstock.vision.batches import cutmix as cutmix
    from penstock.vision.batches import mixup as mixup
    from penstock.vision.color import ColorJitter as ColorJitter
    from penstock.vision.color import GaussianBlur as GaussianBlur
    from penstock.vision.color import Grayscale as Grayscale
    from penstock.vision.color import Normalize as Normalize
    from penstock.vision.color import RandomErasing as RandomErasing
    from penstock.vision.color import ToTensor as ToTensor
    from penstock.vision.color import adjust_brightness as adjust_brightness
    from penstock.vision.color import adjust_contrast as adjust_contrast
    from penstock.vision.color import adjust_hue as adjust_hue
    from penstock.vision.color import adjust_saturation as adjust_saturation
    from penstock.vision.color import gaussian_blur as gaussian_blur
    from penstock.vision.color import grayscale as grayscale
    from penstock.vision.color import normalize as normalize
    from penstock.vision.decoding import read_image as read_image
    from penstock.vision.device import on_device as on_device
    from penstock.vision.geometry import CenterCrop as CenterCrop
    from penstock.vision.geometry import HorizontalFlip as HorizontalFlip
    from penstock.vision.geometry import RandomCrop as RandomCrop
    from penstock.vision.geometry import RandomResizedCrop as RandomResizedCrop
    from penstock.vision.geometry import Resize as Resize
    from penstock.vision.geometry import VerticalFlip as VerticalFlip
    from penstock.vision.resampling import resize as resize
    from penstock.vision.store import Store as Store
    from penstock.vision.tiles import tile_jpeg as tile_jpeg
    from penstock.vision.transform import Compose as Compose
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
