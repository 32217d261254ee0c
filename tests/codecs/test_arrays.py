"""npy, npz, tenbin and pth."""

from __future__ import annotations

import io
import struct
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from webdataset import tenbin

from penstock.codecs import arrays
from penstock.codecs.limits import Limits, OverLimit
from penstock.errors import MissingExtra

Array = npt.NDArray[Any]
LIMITS = Limits()

any_array = hnp.arrays(
    hnp.scalar_dtypes() | hnp.byte_string_dtypes(min_len=1) | hnp.unicode_string_dtypes(min_len=1),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=5),
)
plain_array = hnp.arrays(
    hnp.integer_dtypes(endianness="=") | hnp.unsigned_integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


def is_same(left: Array, right: Array) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def npy_declaring(shape: object, descr: str = "<f4", fortran: object = False, version: int = 1) -> bytes:
    header = repr({"descr": descr, "fortran_order": fortran, "shape": shape}).encode()
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header


def saved(array: Array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@given(any_array)
def test_npy_round_trips_to_a_new_writable_array(array: Array) -> None:
    back = arrays.decode_npy(arrays.encode_npy(array), LIMITS)
    assert is_same(back, array)
    assert back.flags.writeable
    assert back.flags.aligned


@given(any_array)
def test_npy_files_are_exchanged_with_numpy(array: Array) -> None:
    assert is_same(arrays.decode_npy(saved(array), LIMITS), array)
    assert is_same(np.load(io.BytesIO(arrays.encode_npy(array))), array)


def test_npy_keeps_fortran_order_and_structured_dtypes_with_unicode_names() -> None:
    columns = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    back = arrays.decode_npy(saved(columns), LIMITS)
    assert back.flags.f_contiguous
    assert is_same(back, columns)
    table = np.zeros(3, [("größe", "<i4"), ("κ", "<f8", (2,))])
    stream = io.BytesIO()
    np.lib.format.write_array(stream, table, version=(3, 0))
    assert is_same(arrays.decode_npy(stream.getvalue(), LIMITS), table)


def test_npy_written_under_python_2_is_read() -> None:
    header = b"{'descr': '<i2', 'fortran_order': False, 'shape': (2L,), }"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\x01\x00\x02\x00"
    assert arrays.decode_npy(data, LIMITS).tolist() == [1, 2]


@pytest.mark.parametrize("descr", ["<f4", "|S0", "|V0"])
def test_npy_that_declares_a_terabyte_is_refused_before_memory_is_allocated(descr: str) -> None:
    with pytest.raises(OverLimit, match=r"npy array of \d{12,} bytes exceeds the limit"):
        arrays.decode_npy(npy_declaring((10**6, 10**6), descr), LIMITS)


def test_npy_that_declares_more_than_it_has_is_truncated() -> None:
    with pytest.raises(ValueError, match="truncated npy array: 400 bytes declared, 0 present"):
        arrays.decode_npy(npy_declaring((100,)), LIMITS)
    whole = saved(np.arange(10))
    for cut in (7, 9, 40, len(whole) - 1):
        with pytest.raises(ValueError, match="truncated npy"):
            arrays.decode_npy(whole[:cut], LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        npy_declaring((-1,)),
        npy_declaring([3]),
        npy_declaring((True,)),
        npy_declaring((1.5,)),
        npy_declaring((3,), descr="nonsense"),
        npy_declaring((3,), fortran="no"),
        npy_declaring((3,), version=1).replace(b"shape", b"shipe"),
        b"\x93NUMPY\x01\x00\x04\x00[[[[",
        b"\x93NUMPY\x02\x00\xff\xff\xff\x7f",
        b"\x93NUMPY\x09\x00\x04\x00{}  ",
        npy_declaring((2**62, 2**62, 0)),
    ],
)
def test_a_damaged_npy_header_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"npy|array|dimension"):
        arrays.decode_npy(data, LIMITS)


def test_python_objects_are_refused_when_reading_and_writing() -> None:
    objects = np.array([{"a": 1}], dtype=object)
    stream = io.BytesIO()
    np.save(stream, objects, allow_pickle=True)
    with pytest.raises(ValueError, match="refused"):
        arrays.decode_npy(stream.getvalue(), LIMITS)
    with pytest.raises(ValueError, match="refused"):
        arrays.encode_npy(objects)
    stream = io.BytesIO()
    np.savez(stream, a=objects)
    with pytest.raises(ValueError, match="refused"):
        arrays.decode_npz(stream.getvalue(), LIMITS)


def test_npy_encodes_tensors_and_numbers_but_not_lists() -> None:
    assert arrays.decode_npy(arrays.encode_npy(torch.arange(3)), LIMITS).tolist() == [0, 1, 2]
    assert arrays.decode_npy(arrays.encode_npy(2.5), LIMITS).tolist() == 2.5
    with pytest.raises(TypeError, match="array"):
        arrays.encode_npy([1, 2])


@given(st.dictionaries(st.text("abcfile_.", min_size=1, max_size=5), any_array, max_size=3))
def test_npz_round_trips(value: dict[str, Array]) -> None:
    back = arrays.decode_npz(arrays.encode_npz(value), LIMITS)
    assert list(back) == list(value)
    assert all(is_same(back[name], value[name]) for name in value)


def test_npz_files_are_exchanged_with_numpy_and_reproducible() -> None:
    value = {"a": np.arange(3), "b": np.eye(2)}
    stream = io.BytesIO()
    np.savez(stream, **value)  # type: ignore[arg-type]
    assert is_same(arrays.decode_npz(stream.getvalue(), LIMITS)["b"], np.eye(2))
    with np.load(io.BytesIO(arrays.encode_npz(value))) as loaded:
        assert is_same(loaded["a"], np.arange(3))
    assert arrays.encode_npz(value) == arrays.encode_npz(value)


def test_an_npz_bomb_is_refused() -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, a=np.zeros(30_000_000, np.uint8))
    with pytest.raises(OverLimit, match="beyond 100 times"):
        arrays.decode_npz(stream.getvalue(), Limits(ratio=100))
    with pytest.raises(OverLimit, match="npz archive of 30000128 bytes exceeds"):
        arrays.decode_npz(stream.getvalue(), Limits(bytes=20_000_000))


def test_an_npz_member_with_a_wrong_size_is_an_error() -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, a=np.zeros(5_000_000, np.uint8))
    data = bytearray(stream.getvalue())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = struct.pack("<I", 1000)
    with pytest.raises(ValueError, match=r"npz|npy"):
        arrays.decode_npz(bytes(data), LIMITS)


def test_a_damaged_npz_is_an_error() -> None:
    whole = arrays.encode_npz({"a": np.arange(1000)})
    corrupted = bytearray(whole)
    corrupted[60:80] = bytes(20)
    for data in (b"", b"PK\x03\x04", whole[:-30], bytes(corrupted)):
        with pytest.raises(ValueError, match="damaged or unsupported npz"):
            arrays.decode_npz(data, LIMITS)


def test_an_npz_that_names_an_array_twice_is_an_error() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.npy", saved(np.arange(2)))
        archive.writestr("a", b"other")
    with pytest.raises(ValueError, match="two members named 'a'"):
        arrays.decode_npz(stream.getvalue(), LIMITS)


@pytest.mark.parametrize("value", [np.arange(3), {"a": [1]}, {1: np.arange(3)}])
def test_npz_encodes_only_a_mapping_from_names_to_arrays(value: Any) -> None:
    with pytest.raises(TypeError, match="array"):
        arrays.encode_npz(value)


@given(st.lists(plain_array, max_size=3))
def test_tenbin_round_trips_to_new_writable_arrays(value: list[Array]) -> None:
    back = arrays.decode_tenbin(arrays.encode_tenbin(value))
    assert len(back) == len(value)
    for left, right in zip(back, value, strict=True):
        assert left.shape == right.shape
        assert np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
        assert left.flags.writeable


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u8"])
def test_tenbin_bytes_equal_those_of_webdataset(dtype: str) -> None:
    value = [np.arange(12, dtype=dtype).reshape(3, 4), np.arange(5, dtype=dtype)]
    assert arrays.encode_tenbin(value) == bytes(tenbin.encode_buffer(value))
    for left, right in zip(tenbin.decode_buffer(arrays.encode_tenbin(value)), value, strict=True):
        assert is_same(left, right)
    for left, right in zip(arrays.decode_tenbin(bytes(tenbin.encode_buffer(value))), value, strict=True):
        assert is_same(left, right)


def test_tenbin_files_written_by_webdataset_are_read(tmp_path: Path) -> None:
    tenbin.save(str(tmp_path / "a.ten"), np.arange(100), np.ones((2, 2), "f4"), infos=["first", "second"])
    back = arrays.decode_tenbin((tmp_path / "a.ten").read_bytes())
    assert [part.shape for part in back] == [(100,), (2, 2)]


def test_tenbin_encodes_an_array_or_tensor_in_any_memory_order() -> None:
    assert len(arrays.decode_tenbin(arrays.encode_tenbin(np.arange(3)))) == 1
    swapped = np.arange(6, dtype=">i4").reshape(2, 3).T
    assert arrays.decode_tenbin(arrays.encode_tenbin([swapped]))[0].tolist() == swapped.tolist()
    assert arrays.decode_tenbin(arrays.encode_tenbin(torch.ones(2)))[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [np.array([True]), np.array(["a"]), np.array([1j]), [1, 2], [[1]], "x"])
def test_tenbin_refuses_other_values(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cast the array|expected arrays"):
        arrays.encode_tenbin(value)


def chunk(content: bytes, size: int | None = None) -> bytes:
    length = len(content) if size is None else size
    return b"~TenBin~" + struct.pack("<q", length) + content + bytes(-len(content) % 64)


def header(kind: bytes, ndim: int, *shape: int) -> bytes:
    return struct.pack(f"<8s8s{1 + len(shape)}q", kind, b"", ndim, *shape)


@pytest.mark.parametrize(
    "data",
    [
        b"rubbish" * 10,
        chunk(header(b"f4", 1, 2)),  # only a header
        chunk(header(b"f4", 1, 2)) + chunk(bytes(4)),  # half of the array
        chunk(header(b"f4", 1, 2)) + chunk(bytes(12)),  # more bytes than the array has
        chunk(header(b"f4", 2, 2)) + chunk(bytes(8)),  # a dimension is missing
        chunk(header(b"f4", -1)) + chunk(bytes(4)),
        chunk(header(b"f4", 2, -1, -2)) + chunk(bytes(8)),
        chunk(header(b"O8", 1, 1)) + chunk(bytes(8)),
        chunk(header(b"\xff\xff", 1, 1)) + chunk(bytes(8)),
        chunk(header(b"f4", 1, 2)) + chunk(bytes(8), size=-8),
        chunk(header(b"f4", 1, 2)) + chunk(bytes(8), size=2**62),
        chunk(b"short") + chunk(bytes(8)),
        chunk(header(b"f4", 10, *[1] * 10)) + chunk(bytes(4)),
        arrays.encode_tenbin(np.arange(100))[:-200],
    ],
)
def test_damaged_tenbin_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="tenbin"):
        arrays.decode_tenbin(data)


def test_pth_round_trips_tensors_and_plain_values() -> None:
    value: dict[str, Any] = {"w": torch.arange(6.0).reshape(2, 3), "step": 3, "names": ["a", "b"]}
    back = arrays.pth_decoder(LIMITS)(arrays.encode_pth(value))
    assert torch.equal(back["w"], value["w"])
    assert back["step"] == 3
    assert back["names"] == ["a", "b"]


class PrintsWhenUnpickled:
    def __reduce__(self) -> Any:
        return (print, ("this must not run",))


def test_pth_with_objects_is_refused_unless_pickle_is_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    data = arrays.encode_pth({"a": PrintsWhenUnpickled()})
    with pytest.raises(ValueError, match="refused; pass decode\\(trust_pickle=True\\)"):
        arrays.decode_pth(data, LIMITS)
    assert capsys.readouterr().out == ""
    arrays.decode_pth(data, LIMITS, trust_pickle=True)
    assert capsys.readouterr().out == "this must not run\n"


def test_a_pth_bomb_is_refused_before_torch_loads_it() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(30_000_000))
    with pytest.raises(OverLimit, match="pth archive"):
        arrays.decode_pth(stream.getvalue(), Limits(bytes=20_000_000))


def test_a_damaged_pth_is_an_error() -> None:
    whole = arrays.encode_pth(torch.arange(100))
    for data in (b"", b"rubbish", whole[:100], whole[:-50]):
        with pytest.raises(ValueError, match="pth"):
            arrays.decode_pth(data, LIMITS)


def test_without_torch_pth_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"penstock\[torch\]"):
        arrays.pth_decoder(LIMITS)


def _zip_bomb(compression: int, declared: int) -> bytes:
    """An archive of one member that expands to 16 MB, but declares a smaller size."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("x", bytes(16 << 20))
    real, claimed = (16 << 20).to_bytes(4, "little"), declared.to_bytes(4, "little")
    return stream.getvalue().replace(real, claimed)


@pytest.mark.parametrize("declared", [100, 1 << 20])
def test_an_npz_file_expands_to_no_more_than_it_declares(declared: int) -> None:
    data = _zip_bomb(zipfile.ZIP_DEFLATED, declared)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="npz archive"):  # its checksum is that of the whole member
            arrays.decode_npz(data, Limits())
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_npz_file_that_cannot_be_read_in_pieces_is_refused(compression: int) -> None:
    data = _zip_bomb(compression, 100)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="neither stored nor deflated"):
            arrays.decode_npz(data, Limits())
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
