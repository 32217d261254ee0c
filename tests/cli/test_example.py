"""The example datasets are what the rest of the library reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.cli.example_data import EXAMPLES, PHOTO_CLASSES, SOUND_CLASSES, make_example
from penstock.errors import MissingExtra


def test_the_command_makes_photos_and_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["example", "photos", "photos", "--samples", "8"]) == 0
    out = capsys.readouterr().out
    assert out == "photos: 8 photos, in 4 class folders\nnext: penstock pack photos photos-shards\n"
    assert main(["pack", "photos", "photos-shards"]) == 0
    ds = ps.read_tar("photos-shards").decode("rgb8")
    assert len(ds) == 8
    assert all(sample["jpg"].ndim == 3 for sample in ds)


def test_photos_are_in_class_folders(tmp_path: Path) -> None:
    make_example("photos", tmp_path / "photos", 8)
    ds = ps.read_images(tmp_path / "photos", labels="folder")
    assert [sample["label"] for sample in ds] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(path.name for path in (tmp_path / "photos").iterdir()) == sorted(PHOTO_CLASSES)


def test_without_pillow_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[images\]'"):
        make_example("photos", tmp_path / "photos", 8)
    assert not (tmp_path / "photos").exists()


def test_sounds_are_decoded(tmp_path: Path) -> None:
    make_example("sounds", tmp_path / "sounds", 8)
    ps.pack(tmp_path / "sounds", tmp_path / "shards")
    sounds = [sample["wav"] for sample in ps.read_tar(tmp_path / "shards").decode()]
    assert len(sounds) == 8
    assert all(sound["sampling_rate"] == 16_000 and 0.1 < abs(sound["array"]).max() <= 1 for sound in sounds)
    assert sorted(path.name for path in (tmp_path / "sounds").iterdir()) == sorted(SOUND_CLASSES)


def test_the_table_and_the_text_are_typed_rows(tmp_path: Path) -> None:
    make_example("table", tmp_path / "table", 50)
    trip = ps.read_csv(tmp_path / "table/trips.csv")[3]
    assert [type(trip[name]) for name in ("trip", "city", "distance_km", "price")] == [int, str, float, float]
    make_example("text", tmp_path / "text", 50)
    reviews = ps.read_json(tmp_path / "text/reviews.jsonl")
    assert len(reviews) == 50
    assert {review["label"] for review in reviews} == {0, 1}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_seed_always_makes_the_same_files(kind: str, tmp_path: Path) -> None:
    def contents(name: str, seed: int) -> list[bytes]:
        make_example(kind, tmp_path / name, 5, seed)
        return [path.read_bytes() for path in sorted((tmp_path / name).rglob("*.*"))]

    first = contents("a", 1)
    assert contents("b", 1) == first
    assert contents("c", 2) != first


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["example", "text", str(tmp_path)]) == 1
    assert "is not empty; give a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert main(["example", "text", str(tmp_path / "new"), "--seed", "-1"]) == 1
    assert "give a whole number of at least 0" in capsys.readouterr().err
