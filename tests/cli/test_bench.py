from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock.cli import main
from penstock.cli.bench import advice
from penstock.errors import MissingExtra
from penstock.inspection.bench import BenchReport, BenchResult

QUICK = ["--seconds", "0.05", "--batch", "4", "--size", "32"]


def photos(folder: Path, side: int = 48) -> str:
    rng = np.random.default_rng(0)

    def jpg() -> bytes:
        out = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(out, "JPEG")
        return out.getvalue()

    ps.from_items([{"jpg": jpg(), "cls": n} for n in range(12)]).write_tar(str(folder), max_samples=6)
    return str(folder)


def report(
    rates: dict[str, float], together: float = 50.0, side: int | None = None, *, remote: bool = False
) -> BenchReport:
    """A made-up report; rates named "limit: ..." are limits."""
    results = [BenchResult(name, rate) for name, rate in rates.items()]
    limits = tuple(result for result in results if result.name.startswith("limit"))
    steps = tuple(result for result in results if not result.name.startswith("limit"))
    image = None if side is None else "jpg"
    return BenchReport(1, 1000.0, image, side, 224, 2, remote, limits, steps, BenchResult("all together", together), ())


def test_every_step_is_printed_with_its_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", photos(tmp_path / "out"), *QUICK]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 shards, ")
    assert "jpg of 48 px on the long side; " in out
    steps = [line.rsplit(None, 2)[0].strip() for line in out.split("\n\n")[1].splitlines()[1:]]
    expected = ["limit: plain reads", "limit: decoder alone", "read", "decode", "augment", "batch", "all together"]
    assert [step for step, name in zip(steps, expected, strict=True) if not step.startswith(name)] == []
    assert "All together: " in out.split("\n\n")[2]
    ways = [line[:24].strip() for line in out.split("\n\n")[3].splitlines()]
    ways = [way for way in ways if way != "in tiles"]  # needs jpegtran
    assert ways == ["crops, images stored", "as they are", "256 px, in tiles", "256 px, planes"]


def test_json_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", photos(tmp_path / "out"), *QUICK, "--json", "--decode", "l8", "--no-antialias"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["shards"], printed["image"], printed["side"], printed["size"]) == (2, "jpg", 48, 32)
    assert [step["name"] for step in printed["steps"]] == ["read", "decode", "augment", "batch"]
    assert all(step["samples_s"] > 0 for step in (*printed["limits"], *printed["steps"], printed["together"]))
    assert printed["bottleneck"] == min(printed["steps"], key=lambda step: step["samples_s"])["name"]
    assert printed["advice"][0].startswith("All together: ")
    assert [way["name"] for way in printed["stored"]][-1] == "256 px, planes"
    assert all(way["samples_s"] > 0 and way["bytes_s"] > 0 for way in printed["stored"])


def test_shards_without_images_have_nothing_to_augment(capsys: pytest.CaptureFixture[str]) -> None:
    ps.from_items([{"txt": "a", "cls": 1}] * 200).write_tar("memory://cli-bench/out")
    assert main(["bench", "memory://cli-bench/out", *QUICK, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [step["name"] for step in printed["steps"]] == ["read", "decode", "batch"]
    assert (printed["remote"], printed["image"]) == (True, None)


def test_tables_of_numbers_have_nothing_to_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ps.from_items([{"x": n} for n in range(100)]).write_parquet(tmp_path / "out")
    assert main(["bench", str(tmp_path / "out"), *QUICK, "--json"]) == 0
    assert [step["name"] for step in json.loads(capsys.readouterr().out)["steps"]] == ["read", "batch"]


def test_a_decoder_that_is_not_installed_is_a_note_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise MissingExtra("simplejpeg", "vision")

    monkeypatch.setattr("penstock.vision.decoding.simplejpeg", missing)
    assert main(["bench", photos(tmp_path / "out"), *QUICK, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [limit["name"] for limit in printed["limits"]] == ["limit: read"]
    assert any("vision" in note for note in printed["advice"])


@pytest.mark.parametrize(
    ("measured", "sentence"),
    [
        (report({"limit: read": 100, "read": 90, "decode": 500}), "move the shards to a faster disk"),
        (report({"limit: read": 100, "read": 90, "decode": 500}, remote=True), "cache=ps.Cache(folder)"),
        (report({"limit: read": 900, "read": 90, "decode": 500}), "`penstock index`"),
        (
            report({"read": 900, "limit: decode": 100, "decode": 90}, side=1024),
            "--max-side 256` stores 16.0 times",
        ),
        (report({"read": 900, "limit: decode": 100, "decode": 90}, side=256), "only more cores"),
        (report({"read": 900, "limit: decode": 100, "decode": 50}, side=256), "With 2 workers it could get closer"),
        (report({"read": 900, "decode": 500, "augment": 60}), "antialias=False"),
        (report({"read": 900, "decode": 500, "batch": 60}), "Batching is limited by memory bandwidth"),
        (report({"read": 900, "decode": 500}, together=900), "contradict each other"),
        (report({"read": 900, "decode": 500}, together=100), "would reach 321"),
    ],
)
def test_advice_names_the_bottleneck_and_what_helps(measured: BenchReport, sentence: str) -> None:
    assert sentence in "\n".join(advice(measured))


def test_advice_does_not_suggest_to_shrink_small_images() -> None:
    assert "--max-side" not in "\n".join(advice(report({"read": 900, "decode": 90}, side=300)))


@pytest.mark.parametrize(
    "options", [["--batch", "0"], ["--seconds", "-1"], ["--size", "x"], ["--workers", "0"]], ids=str
)
def test_numbers_that_make_no_sense_are_a_usage_error(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "somewhere/", *options])
    assert exit_.value.code == 2
    assert f"argument {options[0]}" in capsys.readouterr().err


def test_missing_shards_are_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path / "nothing")]) == 1
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert "nothing" in captured.err


def test_shards_without_samples_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.tar").write_bytes(bytes(1024))
    assert main(["bench", str(tmp_path / "empty.tar")]) == 1
    assert "the dataset has no sample to measure" in capsys.readouterr().err


def test_a_damaged_image_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ps.from_items([{"__key__": "bad", "jpg": b"\xff\xd8\xff" + bytes(50)}]).write_tar(str(tmp_path / "out"))
    assert main(["bench", str(tmp_path / "out"), *QUICK]) == 1
    assert "bad" in capsys.readouterr().err
