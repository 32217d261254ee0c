"""Decode bytes to values and encode values to bytes: images, audio, arrays, text, documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.codecs.limits import Limits as Limits
    from penstock.codecs.limits import OverLimit as OverLimit
    from penstock.codecs.registry import Decoder as Decoder
    from penstock.codecs.registry import Spec as Spec
    from penstock.codecs.registry import check_spec as check_spec
    from penstock.codecs.registry import decoder as decoder
    from penstock.codecs.registry import decoder_by_spec as decoder_by_spec
    from penstock.codecs.registry import encode as encode
    from penstock.codecs.registry import extension as extension
    from penstock.codecs.registry import is_image as is_image
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
