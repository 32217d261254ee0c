from __future__ import annotations

from pathlib import Path

import penstock as ps
from penstock.inspection.info import FieldSizes, count_classes, load_shard_index, measure_fields


def test_fields_and_classes_are_counted_over_all_shards(tmp_path: Path) -> None:
    for name, labels in (("cat", 3), ("dog", 5)):
        (tmp_path / "src" / name).mkdir(parents=True)
        for number in range(labels):
            (tmp_path / "src" / name / f"{number}.{'jpg' if number else 'png'}").write_bytes(bytes(number * 10))
    for url in (str(tmp_path / "out"), "memory://inspection-info/out"):
        packed = ps.pack(tmp_path / "src", url, max_samples=3)
        urls = [f"{url}/{name}" for name in packed.shards]
        assert measure_fields(map(load_shard_index, urls)) == [
            FieldSizes("cls", 8, 1, 1, 1, 8),
            FieldSizes("jpg", 6, 10, 20, 40, 130),
            FieldSizes("png", 2, 0, 0, 0, 0),
        ]
        assert count_classes(urls) == {"dog": 5, "cat": 3}


def test_samples_without_a_class_are_not_counted(tmp_path: Path) -> None:
    ps.from_items([{"txt": "a"}, {"txt": "b", "cls": 7}]).write_tar(str(tmp_path))
    assert count_classes([str(tmp_path / "shard-000000.tar")]) == {"7": 1}
