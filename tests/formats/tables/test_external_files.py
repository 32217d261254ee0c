"""Images and audio that a table stores by path: recognised, and embedded with their bytes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.codecs.features import Audio, Feature, Image, Sequence, Struct, Value, arrow_type
from penstock.formats.tables.external_files import embed_files, has_external_files, has_media, read_external_file

SHOTS = Sequence(Image())
SCENE = Struct((("name", Value("string")), ("shots", SHOTS)))


def column(values: list[Any], feature: Feature) -> pa.Array:
    return pa.array(values, arrow_type(feature))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(name.encode() * 9)
    return [str(tmp_path / "a.png"), str(tmp_path / "b.png")]


def test_media_are_found_inside_lists_and_structs() -> None:
    assert all(map(has_media, (Image(), Audio(), SHOTS, SCENE)))
    assert not any(map(has_media, (Value("int8"), Sequence(Value("string")), Struct((("n", Value("int8")),)))))


def test_a_path_without_bytes_is_an_external_file() -> None:
    embedded, external = {"bytes": b"x", "path": "x.png"}, {"bytes": None, "path": "x.png"}
    empty = {"bytes": None, "path": None}
    assert has_external_files(column([embedded, external], Image()), Image())
    assert not has_external_files(column([embedded, empty, None], Image()), Image())
    scenes = [{"name": "s", "shots": [embedded]}, {"name": "t", "shots": [embedded, external]}]
    assert has_external_files(column(scenes, SCENE), SCENE)
    assert not has_external_files(column(scenes[:1], SCENE), SCENE)


def test_files_are_embedded_under_their_base_names(files: list[str]) -> None:
    array = column([{"bytes": None, "path": path} for path in files], Image())
    want = [{"bytes": b"a" * 9, "path": "a.png"}, {"bytes": b"b" * 9, "path": "b.png"}]
    assert embed_files(array, Image()).to_pylist() == want
    assert embed_files(array.slice(1), Image()).to_pylist() == want[1:]


def test_a_column_is_embedded_only_if_all_its_values_are_readable_files(files: list[str]) -> None:
    external = {"bytes": None, "path": files[0]}
    for other in ({"bytes": b"x", "path": files[1]}, {"bytes": None, "path": None}, None):
        assert embed_files(column([external, other], Image()), Image()) is None
    assert embed_files(column([{"bytes": None, "path": files[0] + ".gone"}], Image()), Image()) is None
    assert embed_files(column([[external]], SHOTS), SHOTS) is None


def test_files_inside_archives_are_read(tmp_path: Path, files: list[str]) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(files[0], "inner/a.png")
    assert read_external_file(files[0]) == b"a" * 9
    assert read_external_file(f"zip://inner/a.png::{tmp_path / 'all.zip'}") == b"a" * 9
    with pytest.raises(FileNotFoundError):
        read_external_file(files[0] + ".gone")
