from __future__ import annotations

import io
import json
import wave
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main

Capture = pytest.CaptureFixture[bytes]


def test_output_to_a_pipe_is_plain_and_cannot_control_a_terminal(tmp_path: Path, capfdbinary: Capture) -> None:
    with ps.TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a\x1b[31m", "txt": b"red \x1b[31m\nline " + b"x" * 500, "bin": b"\x00\xff"})
        writer.write({"__key__": "b", "txt": "für".encode(), "bin": b""})
    assert main(["show", str(tmp_path / "a.tar")]) == 0
    out = capfdbinary.readouterr().out.decode()
    assert "\x1b" not in out
    assert "a\\x1b[31m\n" in out
    assert "red \\x1b[31m\\nline xxx" in out
    assert "für" in out
    assert max(map(len, out.splitlines())) <= 90
    assert main(["show", "--json", "-f", "txt", "-c", "1", str(tmp_path / "a.tar")]) == 0
    assert json.loads(capfdbinary.readouterr().out)["fields"] == {"txt": 515}


def test_images_and_waveforms_are_drawn(photo_shards: Path, tmp_path: Path, capfdbinary: Capture) -> None:
    shard = str(photo_shards / "train-0000.tar")
    for protocol, mark in {"blocks": "▀", "iterm": "\x1b]1337;File=inline=1", "kitty": "\x1b_Gf=100,a=T,m="}.items():
        assert main(["show", "-c", "1", "-f", "jpg", "--draw", protocol, "--width", "20", shard]) == 0
        assert mark in capfdbinary.readouterr().out.decode()
    with ps.TarWriter(tmp_path / "s.tar") as writer:
        writer.write({"__key__": "s", "wav": _wav(), "jpg": b"\xff\xd8 damaged"})
    assert main(["show", "--draw", "blocks", "--width", "8", str(tmp_path / "s.tar")]) == 0
    assert "█ 0.10 s, 8,000 Hz" in capfdbinary.readouterr().out.decode()


def _wav() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8000, 800, "NONE", ""))
        file.writeframes(b"".join((number * 40).to_bytes(2, "little") for number in range(800)))
    return out.getvalue()
