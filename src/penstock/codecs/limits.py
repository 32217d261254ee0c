"""How far a field may grow while it is decoded: the guard against data made to exhaust memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.errors import PlanError

# Below this a high ratio is no danger: a page of zeros compresses a thousandfold and is harmless.
_RATIO_FREE_BYTES = 1 << 20


class OverLimit(ValueError):
    """A field declares, or grew to, more than its ``Limits`` allow."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a decoded field may be; larger ones are refused before memory is spent on them.

    Attributes:
        pixels: Width times height of one image. The default is where Pillow itself refuses an image,
            about 13,400 x 13,400: 0.5 GB as RGB.
        bytes: Size of one field after decompression: gzip, arrays, audio as float32.
        ratio: Decompressed size over stored size of gzip data and archives. The default passes all but
            runs of a single byte; results up to 1 MiB are never refused for their ratio.

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
                raise PlanError(f"Limits({field.name}={value!r}): a limit is a positive integer")

    def check_pixels(self, width: int, height: int) -> None:
        """Refuse an image of this size if it is too large.

        Raises:
            OverLimit: It has more than ``pixels`` pixels.
        """
        if width * height > self.pixels:
            raise OverLimit(
                f"image of {width}x{height} pixels exceeds the limit of {self.pixels} pixels; "
                "pass decode(limits=ps.Limits(pixels=...))"
            )

    def check_bytes(self, size: int, what: str) -> None:
        """Refuse a value of ``size`` bytes, called ``what`` in the message, if it is too large.

        Raises:
            OverLimit: It has more than ``bytes`` bytes.
        """
        if size > self.bytes:
            raise OverLimit(
                f"{what} of {size} bytes exceeds the limit of {self.bytes} bytes; "
                "pass decode(limits=ps.Limits(bytes=...))"
            )

    def check_ratio(self, stored: int, size: int, what: str) -> None:
        """Refuse ``stored`` bytes that unfold to ``size`` if the ratio is that of a bomb.

        Raises:
            OverLimit: The ratio is above ``ratio`` and the result above 1 MiB.
        """
        if size > self.unfolded(stored):
            raise OverLimit(
                f"{what} of {stored} bytes unfolds to {size} or more, beyond {self.ratio} times its size; "
                "pass decode(limits=ps.Limits(ratio=...))"
            )

    def unfolded(self, stored: int) -> int:
        """The largest size that ``ratio`` lets ``stored`` bytes unfold to."""
        return max(_RATIO_FREE_BYTES, self.ratio * stored)
