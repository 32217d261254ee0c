"""The values of an item are stored in fields whose names decode to the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.packing.item_fields import encode_item, image_extension

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
def test_the_name_and_type_of_a_value_decide_its_field(item: dict[str, Any], fields: dict[str, bytes]) -> None:
    assert encode_item(item, "png") == fields


def test_images_are_encoded_and_other_arrays_are_stored_as_npy() -> None:
    fields = encode_item({"image": Image.fromarray(PIXELS), "mask": Image.fromarray(PIXELS), "flow": PIXELS}, "png")
    assert sorted(fields) == ["flow.npy", "mask.png", "png"]


def test_channels_may_come_first() -> None:
    channels_first = np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8)
    assert encode_item({"image": channels_first}, "png") == encode_item(
        {"image": channels_first.transpose(1, 2, 0)}, "png"
    )


def test_the_file_of_an_item_is_stored_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.webp").write_bytes(b"RIFF....WEBP")
    item = {"image": {"bytes": None, "path": str(tmp_path / "a.webp")}}
    assert encode_item(item, "png") == {"webp": b"RIFF....WEBP"}


def test_an_array_that_is_not_an_image_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="float pixels must be in"):
        encode_item({"image": np.full((4, 4, 3), -2.0)}, "png")


@pytest.mark.parametrize(
    ("data", "extension"), [(b"BM..", "bmp"), (b"II*\0", "tif"), (b"", None), (b"RIFFxxxxWAVE", None)]
)
def test_images_are_recognised_by_their_first_bytes(data: bytes, extension: str | None) -> None:
    assert image_extension(data) == extension
