"""Values are stored under names that decode to the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.packing.item_fields import as_fields, sniffed

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


@pytest.mark.parametrize(
    ("item", "fields"),
    [
        ({"label": 3}, {"cls": b"3"}),
        ({"label": np.int64(3)}, {"cls": b"3"}),
        ({"label": np.array(3)}, {"cls": b"3"}),
        ({"label": "cat"}, {"label.txt": b"cat"}),
        ({"text": "cat"}, {"txt": b"cat"}),
        ({"score": 0.5}, {"score.json": b"0.5"}),
        ({"Box Size": [1, 2]}, {"box_size.json": b"[1, 2]"}),
        ({"image": b"\xff\xd8\xff."}, {"jpg": b"\xff\xd8\xff."}),
        ({"mask": b"\x89PNG\r\n\x1a\n"}, {"mask.png": b"\x89PNG\r\n\x1a\n"}),
        ({"blob": b"?"}, {"blob.bin": b"?"}),
        ({"label": 1, "target": 2}, {"cls": b"1", "target.cls": b"2"}),
        ({"label": 1, "note": None}, {"cls": b"1"}),
        ({"image": {"bytes": b"GIF89a", "path": "x.gif"}}, {"gif": b"GIF89a"}),
        ({"audio": {"bytes": b"fLaC", "path": "x.FLAC"}}, {"audio.flac": b"fLaC"}),
    ],
    ids=str,
)
def test_what_a_value_is_decides_its_field(item: dict[str, Any], fields: dict[str, bytes]) -> None:
    assert as_fields(item, "png") == fields


def test_images_are_encoded_and_other_arrays_kept_as_arrays() -> None:
    fields = as_fields({"image": Image.fromarray(PIXELS), "mask": Image.fromarray(PIXELS), "flow": PIXELS}, "png")
    assert sorted(fields) == ["flow.npy", "mask.png", "png"]


def test_channels_may_come_first() -> None:
    turned = np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8)
    assert as_fields({"image": turned}, "png") == as_fields({"image": turned.transpose(1, 2, 0)}, "png")


def test_a_file_behind_an_item_is_kept_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.webp").write_bytes(b"RIFF....WEBP")
    item = {"image": {"bytes": None, "path": str(tmp_path / "a.webp")}}
    assert as_fields(item, "png") == {"webp": b"RIFF....WEBP"}


def test_an_image_that_is_none_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="float pixels must be in"):
        as_fields({"image": np.full((4, 4, 3), -2.0)}, "png")


@pytest.mark.parametrize(("data", "kind"), [(b"BM..", "bmp"), (b"II*\0", "tif"), (b"", None), (b"RIFFxxxxWAVE", None)])
def test_images_are_told_by_their_first_bytes(data: bytes, kind: str | None) -> None:
    assert sniffed(data) == kind
