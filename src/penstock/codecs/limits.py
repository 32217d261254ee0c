"""Limits on the size of decoded fields: the guard against data crafted to exhaust memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.errors import PlanError

# Below this size a high ratio is harmless: a page of zeros compresses a thousandfold.
_RATIO_FREE_BYTES = 1 << 20


class OverLimit(ValueError):
    """A field declares, or expands to, more than its ``Limits`` allow."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a decoded field may be; a larger field is refused before memory is allocated for it.

    Attributes:
        pixels: Width times height of one image. The default is the limit at which Pillow itself refuses an
            image, about 13,400 x 13,400: 0.5 GB as RGB.
        bytes: Size of one field after decompression: gzip, arrays, audio as float32.
        ratio: Decompressed size divided by stored size, for gzip data and archives. The default admits everything
            but runs of a single byte; results up to 1 MiB are never refused for their ratio.

    Raises:
        PlanError: A limit is not a positive integer.
    """

    pixels: int = 179_000_000
    bytes: int = 2_000_000_000
    ratio: int = 1000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"Limits({field.name}={value!r}): a limit must be a positive integer")

    def check_pixels(self, width: int, height: int) -> None:
        """Refuse an image with more than ``pixels`` pixels.

        Raises:
            OverLimit: The image is too large.
        """
        if width * height > self.pixels:
            raise OverLimit(
                f"image of {width}x{height} pixels exceeds the limit of {self.pixels} pixels; "
                "pass decode(limits=ps.Limits(pixels=...))"
            )

    def check_bytes(self, size: int, label: str) -> None:
        """Refuse a value of more than ``bytes`` bytes, called ``label`` in the message.

        Raises:
            OverLimit: The value is too large.
        """
        if size > self.bytes:
            raise OverLimit(
                f"{label} of {size} bytes exceeds the limit of {self.bytes} bytes; "
                "pass decode(limits=ps.Limits(bytes=...))"
            )

    def check_ratio(self, stored: int, size: int, label: str) -> None:
        """Refuse ``stored`` bytes that expand to ``size`` bytes if the ratio is that of a decompression bomb.

        Raises:
            OverLimit: The ratio is above ``ratio`` and the result above 1 MiB.
        """
        if size > self.max_expanded_bytes(stored):
            raise OverLimit(
                f"{label} of {stored} bytes expands to {size} bytes or more, beyond {self.ratio} times its size; "
                "pass decode(limits=ps.Limits(ratio=...))"
            )

    def max_expanded_bytes(self, stored: int) -> int:
        """Return the largest size that ``ratio`` lets ``stored`` bytes expand to."""
        return max(_RATIO_FREE_BYTES, self.ratio * stored)
