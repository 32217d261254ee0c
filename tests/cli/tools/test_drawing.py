from __future__ import annotations

import io
import wave

import pytest
from PIL import Image

from penstock.cli.tools.drawing import draw_image, draw_waveform, escape, image_protocol


def _png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (10, 20, 30)).save(out, "PNG")
    return out.getvalue()


def _wav(values: list[int], channels: int = 1) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((channels, 2, 100, len(values), "NONE", ""))
        file.writeframes(b"".join(value.to_bytes(2, "little", signed=True) for value in values))
    return out.getvalue()


@pytest.mark.parametrize(
    ("text", "max_length", "expected"),
    [
        ("plain ü", 0, "plain ü"),
        ("a\x1b[31m\n", 0, "a\\x1b[31m\\n"),
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abcde…"),
    ],
)
def test_text_is_escaped_and_cut_off(text: str, max_length: int, expected: str) -> None:
    assert escape(text, max_length) == expected


@pytest.mark.parametrize(
    ("variables", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"KITTY_WINDOW_ID": "1", "TERM": "xterm"}, "kitty"),
        ({"TERM": "xterm", "TERM_PROGRAM": "WezTerm"}, "iterm"),
        ({"TERM": "xterm"}, "blocks"),
    ],
)
def test_the_protocol_is_chosen_by_the_terminal(
    variables: dict[str, str], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KITTY_WINDOW_ID", "TERM", "TERM_PROGRAM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert image_protocol() == protocol


def test_a_half_block_is_two_pixels() -> None:
    drawn = draw_image(_png(4, 3), "blocks", 8)
    assert drawn is not None
    lines = drawn.splitlines()
    assert [line.count("▀") for line in lines] == [4, 4]
    assert "38;2;10;20;30" in lines[0]
    assert "48;2;10;20;30" in lines[0]
    assert "48;2" not in lines[1]  # the last row has no pixel below


def test_data_that_is_not_an_image_is_not_drawn() -> None:
    assert draw_image(b"\xff\xd8 damaged", "blocks", 8) is None


def test_a_waveform_shows_peaks_and_duration_of_the_first_channel() -> None:
    assert draw_waveform(_wav([0, 0, 1000, -1000]), 2) == " █ 0.04 s, 100 Hz"
    assert draw_waveform(_wav([500, 0, 500, 0], channels=2), 8) == "██ 0.02 s, 100 Hz"


def test_data_that_is_not_audio_is_not_drawn() -> None:
    assert draw_waveform(b"noise", 8) is None
    assert draw_waveform(_wav([]), 8) is None
