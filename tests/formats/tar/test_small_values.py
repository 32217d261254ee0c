"""Values of small fields in an index: stored by the packer and on request, found without the shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.cli import main
from penstock.errors import DataError
from penstock.formats.tar.index import Index, read_beside, write_beside
from penstock.formats.tar.small_values import MAX_VALUE_BYTES, FieldValues


@given(st.lists(st.none() | st.binary(max_size=MAX_VALUE_BYTES), max_size=40))
def test_values_come_back(values: list[bytes | None]) -> None:
    stored = FieldValues.of(len(values), {row: value for row, value in enumerate(values) if value is not None})
    assert stored.all() == values
    assert stored.counts().total() == sum(value is not None for value in values)


def test_a_writer_stores_the_fields_that_are_small_in_every_sample(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"{n}", "cls": str(n % 3).encode(), "txt": b"t" * (60 + n), "jpg": bytes(500)} for n in range(8)
    ]
    samples[3]["json"] = b"{}"
    with ps.TarWriter(tmp_path / "a.tar") as writer:
        for sample in samples:
            writer.write(sample)
    index = read_beside(str(tmp_path / "a.tar"))
    assert index is not None
    assert index.values.keys() == {"cls", "json"}
    assert index.values["cls"].all() == [sample["cls"] for sample in samples]
    assert index.values["json"].all() == [sample.get("json") for sample in samples]


def test_the_command_adds_values_to_an_index(tiny_shards: list[Path], tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    shard.write_bytes(tiny_shards[0].read_bytes())
    assert main(["index", str(shard)]) == 0
    index = read_beside(str(shard))
    assert index is not None
    assert not index.values
    assert main(["index", "--values", "cls,jpg,nothing", str(shard)]) == 0
    index = read_beside(str(shard))
    assert index is not None
    assert index.values.keys() == {"cls"}
    assert index.values["cls"].counts() == {b"0": 9, b"1": 8, b"2": 8}
    assert main(["index", str(shard)]) == 0  # and keeps them
    index = read_beside(str(shard))
    assert index is not None
    assert index.values.keys() == {"cls"}
    assert main(["verify", str(shard)]) == 0
    assert len(ps.read_tar(shard).take_all()) == 25


def test_damaged_values_are_refused(tiny_shards: list[Path], tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    shard.write_bytes(tiny_shards[0].read_bytes())
    main(["index", "--values", "cls", str(shard)])
    index = read_beside(str(shard))
    assert index is not None
    long = FieldValues(np.full(25, 100, np.uint8), bytes(2500))
    short = FieldValues(index.values["cls"].lengths, b"")
    for wrong in (long, short):
        with pytest.raises(DataError, match="malformed"):
            Index.from_bytes(replace(index, values={"cls": wrong}).to_bytes())
    write_beside(str(shard), replace(index, values={"cls": short}))
    assert len(ps.read_tar(shard).take_all()) == 25


def test_an_index_whose_samples_change_has_no_values(tiny_shards: list[Path], tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    shard.write_bytes(tiny_shards[0].read_bytes())
    main(["index", "--values", "cls", str(shard)])
    index = read_beside(str(shard))
    assert index is not None
    assert not index.expecting(30, "the manifest").values
