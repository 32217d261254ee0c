"""Images stored as planes: luma at full and chroma at half resolution, not compressed. Nothing is left to decode.

The format is that of a decoded JPEG before its colours are converted: a header of 20 bytes, then the planes Y, U and V
row by row, one byte a sample. U and V have half the height and width, rounded up (4:2:0); each of their samples is at
the center of four samples of Y. Crops resize the planes, and convert only the result to RGB.

The header: ``b"\\x89YUV420\\n"``, one byte for the matrix (1: BT.601 with the full range, as in JPEG), three zero
bytes, and the height and the width as big-endian integers of four bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

import numpy as np

from penstock.vision.resampling import Decoded, Pixels, Rect, opencv, resize, shrink
from penstock.vision.segments import Box

PLANES_MAGIC = b"\x89YUV420\n"
_HEADER = Struct(">8sB3xII")
_MATRIX = 1  # BT.601, full range


def encode_planes(pixels: Pixels) -> bytes:
    """Return an image, height x width x 3, uint8, as planes.

    Raises:
        MissingExtra: OpenCV is not installed.
    """
    cv2 = opencv()
    height, width = pixels.shape[:2]
    y, v, u = cv2.split(cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2YCrCb))
    half = (-(-width // 2), -(-height // 2))
    chroma = [
        cv2.resize(
            cv2.copyMakeBorder(plane, 0, height % 2, 0, width % 2, cv2.BORDER_REPLICATE),
            half,
            interpolation=cv2.INTER_AREA,
        )
        for plane in (u, v)
    ]
    return b"".join((_HEADER.pack(PLANES_MAGIC, _MATRIX, height, width), y, *chroma))


@dataclass(frozen=True, slots=True)
class PlanesImage:
    """An image that is stored as planes."""

    y: Pixels
    u: Pixels
    v: Pixels

    @classmethod
    def of(cls, data: bytes) -> PlanesImage:
        """Return the planes of a stored image; they are views of ``data``.

        Raises:
            ValueError: The data are damaged or truncated, or have another matrix.
        """
        if len(data) < _HEADER.size:
            raise ValueError("damaged or truncated planes: the header is not complete")
        _, matrix, height, width = _HEADER.unpack_from(data)
        half_height, half_width = -(-height // 2), -(-width // 2)
        luma, chroma = height * width, half_height * half_width
        if matrix != _MATRIX:
            raise ValueError(f"planes with the color matrix {matrix}: only 1, BT.601 with the full range, is supported")
        if not luma or len(data) != _HEADER.size + luma + 2 * chroma:
            raise ValueError(f"damaged or truncated planes: {len(data)} bytes for {width}x{height} pixels")
        samples = np.frombuffer(data, np.uint8, offset=_HEADER.size)
        u, v = samples[luma:].reshape(2, half_height, half_width)
        return cls(samples[:luma].reshape(height, width), u, v)

    @property
    def size(self) -> tuple[int, int]:
        """The height and width."""
        height, width = self.y.shape
        return height, width

    def decode(self, shrink_factor: float, needed: Box | None = None) -> Decoded:
        """Return the pixels of the image, or of a part that covers what is needed."""
        height, width = self.size
        top, left, bottom, right = needed or Box(0, 0, height, width)
        # With a margin of one sample of chroma, the colours at the edges are those of the whole image.
        rows = slice(max(0, top // 2 - 1), -(-bottom // 2) + 1)
        columns = slice(max(0, left // 2 - 1), -(-right // 2) + 1)
        top, left = 2 * rows.start, 2 * columns.start
        luma = self.y[top : 2 * rows.stop, left : 2 * columns.stop]
        chroma = []
        for plane in (self.v[rows, columns], self.u[rows, columns]):
            even = resize(plane, (2 * plane.shape[0], 2 * plane.shape[1]), False)
            chroma.append(even[: luma.shape[0], : luma.shape[1]])
        return Decoded(_to_rgb(luma, *chroma), 1, top, left)

    def resized(
        self, box: Box, size: tuple[int, int], antialias: bool, flip: bool, out: Pixels | None = None
    ) -> Pixels:
        """Return the RGB pixels of a part at another size, in ``out`` if it is given.

        Without antialiasing, a part with odd edges takes the chroma of the even ones around it.
        """
        top, left, bottom, right = box
        rows, columns = slice(top // 2, -(-bottom // 2)), slice(left // 2, -(-right // 2))
        luma, chroma = self.y[top:bottom, left:right], (self.v[rows, columns], self.u[rows, columns])
        if antialias:
            inside = Rect(top % 2 / 2, left % 2 / 2, (bottom - top) / 2, (right - left) / 2)
            planes = [resize(luma, size), *(shrink(plane, inside, size, False) for plane in chroma)]
        else:
            planes = [opencv().resize(plane, size[::-1]) for plane in (luma, *chroma)]
        rgb = _to_rgb(planes[0], planes[1], planes[2], out)
        return opencv().flip(rgb, 1, rgb) if flip else rgb


def _to_rgb(y: Pixels, v: Pixels, u: Pixels, out: Pixels | None = None) -> Pixels:
    cv2 = opencv()
    rgb: Pixels = cv2.cvtColor(cv2.merge((y, v, u)), cv2.COLOR_YCrCb2RGB, out)
    return rgb
