"""Lists of arrays as bytes, in the format of ``ten`` fields."""

from penstock.codecs.arrays import decode_tenbin as decode_buffer
from penstock.codecs.arrays import encode_tenbin as encode_buffer

__all__ = ["decode_buffer", "encode_buffer"]
