from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.engines import Program
from penstock.errors import DataError
from penstock.plan import Reader, Source, Traits
from penstock.testing import Numbers


def traits(ds: ps.Dataset) -> Traits:
    [reader] = Program(ds.plan).opened
    return reader.traits


def test_what_is_costly_to_find_out_is_found_out_on_request_only() -> None:
    asked: list[str] = []

    def countable() -> bool:
        asked.append("countable")
        return False

    found = Traits(find_countable=countable, find_features=lambda: {"x": 1})
    assert not asked
    assert not found.countable
    assert found.features == {"x": 1}
    assert asked == ["countable"]
    assert Traits().countable
    assert Traits().features == {}


def test_a_reader_and_a_source_that_say_nothing_have_the_plainest_answers() -> None:
    source = Numbers((2,))
    reader: Reader = source.open()
    assert reader.traits == Traits()
    assert reader.stamp() is None
    reader.suspend()
    plain: Source = source
    assert (plain.random_access, plain.streams, plain.computed, plain.resources) == (False, False, False, None)


def test_a_source_is_remote_if_any_of_its_paths_is(tmp_path: Path) -> None:
    for number in range(3):
        ps.from_items([{"a": f"{number}"}]).write_json(str(tmp_path / f"{number}.jsonl"))
        ps.from_items([{"a": f"{number}"}]).write_json(f"memory://traits/{number}.jsonl")
    local = [str(tmp_path / f"{number}.jsonl") for number in range(3)]
    assert not traits(ps.read_json(local)).remote
    assert traits(ps.read_json(local)).sendable
    mixed = traits(ps.read_json([local[0], "memory://traits/1.jsonl", local[2]]))
    assert mixed.remote
    assert not mixed.sendable


def test_features_come_from_all_files_and_contradictions_are_named(tmp_path: Path) -> None:
    def write(name: str, *names: str) -> str:
        feature = ps.features.ClassLabel(names=names)
        rows = ps.from_huggingface(_labelled(feature))
        rows.write_parquet(tmp_path / name)
        return str(tmp_path / name)

    same = [write("a", "cat", "dog"), write("b", "cat", "dog")]
    assert traits(ps.read_parquet(same)).features == {"label": ps.features.ClassLabel(names=("cat", "dog"))}
    other = [*same, write("c", "dog", "cat")]
    with pytest.raises(DataError, match=r"column 'label' is ClassLabel.*dog.*but ClassLabel.*a/00000-of-00001"):
        _ = traits(ps.read_parquet(other)).features


def _labelled(feature: ps.features.ClassLabel) -> object:
    import datasets

    features = datasets.Features({"label": datasets.ClassLabel(names=list(feature.names))})
    return datasets.Dataset.from_dict({"label": [0, 1]}, features=features)


def test_a_dataset_notices_shards_that_are_added(tmp_path: Path) -> None:
    def write(name: str, count: int) -> None:
        with ps.TarWriter(str(tmp_path / name)) as writer:
            for number in range(count):
                writer.write({"__key__": f"{name[0]}{number}", "txt": "x"})

    write("a.tar", 3)
    ds = ps.read_tar(str(tmp_path))
    assert len(ds) == len(list(ds)) == 3
    assert ds[-1]["__key__"] == "a2"
    write("b.tar", 4)
    assert len(ds) == len(list(ds)) == 7
    assert ds[-1]["__key__"] == "b3"
