"""The stages that decode and encode samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.codecs.stage import field_specs
from penstock.errors import DataError, PlanError
from penstock.testing import fingerprint
from penstock.vision import Resize

SAMPLE = {"__key__": "a", "cls": b"3", "txt": "ä".encode(), "json": b'{"x": [1]}', "bin": b"\x00"}


def decoded(sample: dict[str, Any], *spec: str, **given: Any) -> dict[str, Any]:
    out = ps.from_items([sample]).decode(*spec, **given).first()
    assert isinstance(out, dict)
    return out


def test_fields_are_decoded_by_their_extension() -> None:
    assert decoded(SAMPLE) == {"__key__": "a", "cls": 3, "txt": "ä", "json": {"x": [1]}, "bin": b"\x00"}


def test_the_extension_is_the_last_part_of_the_name() -> None:
    assert decoded({"left.json": b"[]", "right.JSON": b"[1]", "json.bin": b"[]"}) == {
        "left.json": [],
        "right.JSON": [1],
        "json.bin": b"[]",
    }


def test_a_field_that_is_not_bytes_stays_unchanged() -> None:
    assert decoded({"cls": 7, "txt": "done"}) == {"cls": 7, "txt": "done"}


def test_fields_with_a_spec_are_decoded_by_it_and_others_by_extension() -> None:
    out = decoded(SAMPLE, bin=bytes.hex, json="bytes", fields={"txt": "bytes"})
    assert out == {"__key__": "a", "cls": 3, "txt": "ä".encode(), "json": b'{"x": [1]}', "bin": "00"}


def test_a_field_may_be_given_any_codec() -> None:
    assert decoded({"meta": b"[1]", "label": b"4"}, meta="json", label="cls") == {"meta": [1], "label": 4}


def test_fields_and_keywords_are_merged() -> None:
    assert field_specs({"a": "json"}, {"b": "cls"}) == (("a", "json"), ("b", "cls"))
    with pytest.raises(PlanError, match="a is given twice"):
        field_specs({"a": "json"}, {"a": "cls"})


@pytest.mark.parametrize("spec", ["rgb9", "jsn", "json", ""])
def test_an_unknown_spec_is_refused_when_the_stage_is_added(spec: str) -> None:
    with pytest.raises(PlanError, match="unknown decode spec"):
        ps.from_items([]).decode(spec)


def test_an_unknown_spec_of_a_field_is_refused_when_the_stage_is_added() -> None:
    with pytest.raises(PlanError, match="unknown decode spec 'jpgg'"):
        ps.from_items([]).decode(image="jpgg")
    with pytest.raises(PlanError, match=r"decode\(image=3\): give a spec"):
        ps.from_items([]).decode(image=3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="name the field"):
        ps.from_items([]).decode(len)  # type: ignore[arg-type]


def test_a_class_of_transforms_is_refused_where_none_is_constructed() -> None:
    with pytest.raises(PlanError, match=r"needs an instance of Resize: write Resize\(\.\.\.\)"):
        ps.from_items([]).decode(jpg=Resize)
    with pytest.raises(PlanError, match=r"map_tuple needs an instance of Resize"):
        ps.from_items([]).map_tuple(None, Resize)
    assert ps.from_items([{"a": b"1"}]).decode(a=int).take_all() == [{"a": 1}]


def test_a_failure_names_field_shard_and_key() -> None:
    with pytest.raises(DataError, match="decode: field 'cls'") as caught:
        decoded({"__key__": "k", "cls": b"three"})
    assert (caught.value.shard, caught.value.key) == ("items", "k")


def test_the_exception_of_a_users_function_is_the_cause() -> None:
    def fail(data: bytes) -> None:
        raise LookupError("no such word")

    with pytest.raises(DataError, match="field 'bin': no such word") as caught:
        decoded(SAMPLE, bin=fail)
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_sample_without_fields_is_an_error() -> None:
    with pytest.raises(DataError, match="needs a sample with fields, not int"):
        list(ps.from_items([1]).decode())


def test_a_function_for_a_field_may_take_the_samples_generator() -> None:
    def noisy(data: bytes, rng: np.random.Generator) -> int:
        return int(rng.integers(1 << 40))

    ds = ps.from_items([{"bin": b"", "txt": b""}] * 20).decode(bin=noisy)
    expected = [s["bin"] for s in ds.epoch(0).on("serial")]
    assert len(set(expected)) == 20
    for workers in (1, 3):
        again = ps.Dataset(ds.plan).decode(workers=workers).epoch(0)
        assert [s["bin"] for s in again] == expected
    assert [s["bin"] for s in ds.epoch(1)] != expected


def test_pickle_is_refused_unless_it_is_trusted() -> None:
    data = b"\x80\x04K\x03."
    with pytest.raises(DataError, match="trust_pickle"):
        decoded({"pkl": data})
    assert decoded({"pkl": data}, trust_pickle=True) == {"pkl": 3}


def test_limits_apply_to_decoded_fields(tiny_shards: list[Path]) -> None:
    ds = ps.read_tar(str(tiny_shards[0])).select("jpg")
    with pytest.raises(DataError, match="jpg"):
        ds.decode(limits=ps.Limits(pixels=100)).first()


def test_images_are_decoded_as_stored_unless_a_spec_is_given(tiny_shards: list[Path]) -> None:
    ds = ps.read_tar(str(tiny_shards[0])).limit(1)
    plain, forced = ds.decode().first(), ds.decode("rgb8").first()
    assert (plain["jpg"].shape, plain["png"].shape) == ((32, 48, 3), (32, 48))
    assert (forced["jpg"].shape, forced["png"].shape) == ((32, 48, 3), (32, 48, 3))
    assert {plain["jpg"].dtype, plain["png"].dtype, forced["png"].dtype} == {np.dtype(np.uint8)}
    assert (plain["cls"], plain["json"]["number"]) == (0, 0)


def test_fields_that_no_stage_needs_are_not_decoded(tmp_path: Path) -> None:
    decoded_bytes: list[bytes] = []
    with ps.TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "k", "a": b"1", "b": b"2"})
    ds = ps.read_tar(tmp_path / "a.tar").decode(a=decoded_bytes.append, b=decoded_bytes.append).select("a")
    list(ds)
    assert decoded_bytes == [b"1"]


def test_decoding_is_the_same_on_every_engine(tiny_shards: list[Path]) -> None:
    ds = ps.read_tar(str(tiny_shards[0])).decode("rgb8")
    expected = [fingerprint(s) for s in ds.epoch(0).on("serial")]
    assert [fingerprint(s) for s in ds.epoch(0)] == expected


def test_the_stage_is_described_as_the_call_that_created_it() -> None:
    ds = ps.from_items([]).decode("rgb8", meta="json", raw=None, box=json.loads)
    assert "decode('rgb8', meta='json', raw=None, box=loads)" in repr(ds)


def test_a_function_for_a_field_also_gets_values_that_are_not_bytes(tiny_shards: list[Path]) -> None:
    decoded = ps.read_tar(str(tiny_shards[0])).decode("rgb8").decode(png=lambda image: image.shape)
    assert all(len(sample["png"]) == 3 for sample in decoded)
    assert ps.from_items([{"x": 3}]).decode(x=lambda value: value + 1).first()["x"] == 4


def test_the_keys_of_a_table_are_the_keys_of_its_shards(tmp_path: Path) -> None:
    rows = [{"__key__": f"k{n}", "jpg": np.full((8, 8, 3), n, np.uint8), "cls": n} for n in range(3)]
    ps.from_items(rows).write_parquet(tmp_path / "table")  # with features, also of the keys
    ps.read_parquet(tmp_path / "table").write_tar(tmp_path / "shards")
    ps.pack(ps.read_parquet(tmp_path / "table"), tmp_path / "packed", shuffle=False)
    for folder in ("shards", "packed"):
        stored = ps.read_tar(tmp_path / folder).take_all()
        assert [sorted(sample) for sample in stored] == [["__key__", "__url__", "cls", "jpg"]] * 3
        assert [sample["__key__"] for sample in stored] == ["k0", "k1", "k2"]
