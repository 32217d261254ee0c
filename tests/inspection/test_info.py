"""What shards hold is summed up over all of them."""

from __future__ import annotations

from pathlib import Path

import penstock as ps
from penstock.inspection.info import Field, classes_of, fields_of, index_of


def test_fields_and_classes_are_counted(tmp_path: Path) -> None:
    for name, labels in (("cat", 3), ("dog", 5)):
        (tmp_path / "src" / name).mkdir(parents=True)
        for number in range(labels):
            (tmp_path / "src" / name / f"{number}.{'jpg' if number else 'png'}").write_bytes(bytes(number * 10))
    for url in (str(tmp_path / "out"), "memory://describing/out"):
        packed = ps.pack(tmp_path / "src", url, max_samples=3)
        urls = [f"{url}/{name}" for name in packed.shards]
        assert fields_of(map(index_of, urls)) == [
            Field("cls", 8, 1, 1, 1, 8),
            Field("jpg", 6, 10, 20, 40, 130),
            Field("png", 2, 0, 0, 0, 0),
        ]
        assert classes_of(urls) == {"dog": 5, "cat": 3}


def test_samples_without_a_class_are_no_class(tmp_path: Path) -> None:
    ps.from_items([{"txt": "a"}, {"txt": "b", "cls": 7}]).write_tar(str(tmp_path))
    assert classes_of([str(tmp_path / "shard-000000.tar")]) == {"7": 1}
