"""Bytes to values and back: images, audio, arrays, text, by extension or as named."""

from penstock.codecs.limits import Limits, OverLimit
from penstock.codecs.registry import Decoder, Spec, check_spec, decoder, encode, explicit, extension, is_image

__all__ = [
    "Decoder",
    "Limits",
    "OverLimit",
    "Spec",
    "check_spec",
    "decoder",
    "encode",
    "explicit",
    "extension",
    "is_image",
]
