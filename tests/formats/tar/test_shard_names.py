"""A writer's target is a folder, a pattern or one archive."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PlanError, StorageError
from penstock.formats.tar.shard_names import on_disk, parse_target, suffix_compression


@pytest.mark.parametrize(
    ("path", "compress", "want"),
    [
        ("out", None, ("out", "shard-%06d.tar", False)),
        ("out", "gz", ("out", "shard-%06d.tar.gz", False)),
        ("s3://b/out", None, ("s3://b/out", "shard-%06d.tar", False)),
        ("s3://b/x-%d.tar.zst", "zst", ("s3://b", "x-%d.tar.zst", False)),
        ("http://h/my%20data", None, ("http://h/my%20data", "shard-%06d.tar", False)),
        ("a.tgz", None, (".", "a.tgz", True)),
        ("d/a.tar", "xz", ("d", "a.tar.xz", True)),
    ],
)
def test_a_target_is_parsed(path: str, compress: str | None, want: tuple[str, str, bool]) -> None:
    assert parse_target(path, compress) == want


def test_a_folder_whose_subfolders_have_shards_says_how_to_name_them(tmp_path: Path) -> None:
    ps.from_items([{"__key__": "a", "txt": "b"}]).write_tar(tmp_path / "train")
    with pytest.raises(StorageError, match="in this folder; those of its subfolders are ") as caught:
        ps.read_tar(tmp_path).first()
    pattern = str(caught.value).partition("subfolders are ")[2].partition(" ")[0]
    assert ps.read_tar(pattern).count() == 1


@pytest.mark.parametrize(
    "name", ["x-%s-%s", "%%d", "x-%5d", "x-%i", "x-%s", "x-%u", "%x", "%-4d", "%+d", "% d", "%d%d"]
)
def test_a_pattern_has_one_number_that_readers_of_the_folder_find_again(name: str) -> None:
    with pytest.raises(PlanError, match="is not a pattern"):
        parse_target(f"{name}.tar", None)


@pytest.mark.parametrize(("name", "compress"), [("x-%04d", None), ("x-%04d", "gz"), ("x-%d.TAR", None)])
def test_a_pattern_ends_in_a_suffix_that_readers_of_the_folder_look_for(name: str, compress: str | None) -> None:
    with pytest.raises(PlanError, match="is not a pattern"):
        parse_target(name, compress)


def test_a_suffix_selects_a_compression() -> None:
    assert [suffix_compression(name) for name in ("a.tar", "a.tgz", "a.tar.bz2")] == [None, "gz", "bz2"]


def test_only_paths_and_file_urls_are_on_disk() -> None:
    assert [on_disk(url) for url in ("a/b", "/a", "file:/a", "memory://a", "s3://b/c")] == [
        True,
        True,
        True,
        False,
        False,
    ]
