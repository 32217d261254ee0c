"""Arrays and tensors: numpy's npy and npz, WebDataset's tenbin, torch's pth."""

from __future__ import annotations

import ast
import lzma
import math
import pickle
import re
import struct
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.codecs.limits import Limits, OverLimit
from penstock.errors import import_extra
from penstock.plan import kind_of

Array = npt.NDArray[Any]

_NPY_MAGIC = b"\x93NUMPY"
_NPY_HEADER_MAX_BYTES = 10_000  # numpy's own bound: literal_eval is slow, or worse, on long text
# CPython 3.11 can raise SystemError ("AST constructor recursion depth mismatch") if several threads call literal_eval
# at once: they share the depth that it counts, and a garbage collection may switch threads in between.
_NPY_HEADER_LOCK = threading.Lock()
_PYTHON2_LONG = re.compile(rb"(?<=\d)L(?=[,)])")  # numpy under Python 2 wrote shapes as (3L, 4L)

# What zipfile raises for damaged archives; RuntimeError means an encrypted one.
_ARCHIVE_ERRORS = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError),
    *(zlib.error, lzma.LZMAError, struct.error),
)

_ARCHIVE_PIECE_BYTES = 1 << 18

_TENBIN_MAGIC = b"~TenBin~"
_TENBIN_ALIGN = 64
_TENBIN_MAX_DIMS = 9
_TENBIN_DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


def as_array(value: Any) -> Array | None:
    """Return an array or tensor as a numpy array, without a copy if it is on the CPU; ``None`` for any other value."""
    if isinstance(value, np.ndarray):
        return value
    # A value can be a tensor only if torch has been imported already.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        array: Array = value.detach().cpu().numpy()
        return array
    return None


def decode_npy(data: bytes, limits: Limits) -> Array:
    """Return the array in an npy file as a new, writable array.

    Raises:
        OverLimit: The header declares more than ``limits.bytes``.
        ValueError: The data is not an npy file, is truncated, or holds Python objects.
    """
    header = _npy_header(data)
    count = math.prod(header.shape)
    # A dtype of size 0 still costs numpy one byte per element.
    limits.check_bytes(count * max(1, header.dtype.itemsize), "npy array")
    needed, present = count * header.dtype.itemsize, len(data) - header.size
    if present < needed:
        raise ValueError(f"truncated npy array: {needed} bytes declared, {present} present")
    order: Any = "F" if header.fortran else "C"
    return np.ndarray(header.shape, header.dtype, data, header.size, order=order).copy(order="K")


def encode_npy(value: Any) -> bytes:
    """Return an array, tensor or number as an npy file.

    Raises:
        TypeError: The value is none of these.
        ValueError: The array holds Python objects.
    """
    array = as_array(value)
    if array is None:
        if not isinstance(value, bool | int | float | complex | np.generic):
            raise TypeError("expected an array, tensor or number")
        array = np.asarray(value)
    stream = BytesIO()
    _write_npy(stream, array)
    return stream.getvalue()


def decode_npz(data: bytes, limits: Limits) -> dict[str, Any]:
    """Return the arrays in an npz file by name; a member that is not an npy file stays bytes.

    Raises:
        OverLimit: The members together exceed ``limits.bytes``, or ``limits.ratio`` times the size of the file.
        ValueError: The data is not an npz file, is damaged, names an array twice, or holds Python objects.
    """
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            _check_archive(archive, len(data), limits, "npz archive")
            return _npz_members(archive, limits)
    except _ARCHIVE_ERRORS as exc:
        raise ValueError(f"damaged or unsupported npz archive: {exc}") from exc


def encode_npz(value: Any) -> bytes:
    """Return a mapping from names to arrays as a compressed npz file; equal arrays give equal bytes.

    Raises:
        TypeError: The value is not a mapping from strings to arrays.
        ValueError: An array holds Python objects.
    """
    if not isinstance(value, Mapping):
        raise TypeError("expected a dict of arrays")
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in value.items():
            array = as_array(part)
            if array is None or not isinstance(name, str):
                raise TypeError(f"expected string keys and array values; {name!r} holds {kind_of(part)}")
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                _write_npy(member, array)
    return stream.getvalue()


def decode_tenbin(data: bytes) -> list[Array]:
    """Return the arrays in a tenbin file as new, writable arrays.

    Raises:
        ValueError: The data is not tenbin, is truncated, or a header contradicts its array.
    """
    chunks = list(_tenbin_chunks(memoryview(data)))
    if len(chunks) % 2:
        raise ValueError("truncated tenbin data: the last array has only a header")
    return [_tenbin_array(header, body) for header, body in zip(chunks[::2], chunks[1::2], strict=True)]


def encode_tenbin(value: Any) -> bytes:
    """Return an array, or a list of arrays, as tenbin; WebDataset reads the result, except for uint32 arrays.

    Raises:
        TypeError: The value is neither, or tenbin cannot hold a dtype: it has floats, signed and unsigned integers.
        ValueError: An array has more than nine dimensions.
    """
    parts: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    written = bytearray()
    for part in parts:
        array = as_array(part)
        if array is None:
            raise TypeError(f"expected arrays, not {type(part).__name__}")
        kind = f"{array.dtype.kind}{array.dtype.itemsize}"
        if kind not in _TENBIN_DTYPES:
            raise TypeError(f"tenbin cannot hold {array.dtype}; cast the array first")
        if array.ndim > _TENBIN_MAX_DIMS:
            raise ValueError(f"tenbin holds at most {_TENBIN_MAX_DIMS} dimensions, not {array.ndim}")
        header = struct.pack(f"<8s8sq{array.ndim}q", kind.encode("ascii"), b"", array.ndim, *array.shape)
        body = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        for chunk in (header, body):
            written += _TENBIN_MAGIC + struct.pack("<q", len(chunk)) + chunk
            written += bytes(-len(chunk) % _TENBIN_ALIGN)
    return bytes(written)


def pth_decoder(limits: Limits, *, trust_pickle: bool = False) -> Callable[[bytes], Any]:
    """Return a function that decodes files written by ``torch.save``.

    Raises:
        MissingExtra: torch is not installed.
    """
    _torch("pth files")
    return partial(decode_pth, limits=limits, trust_pickle=trust_pickle)


def decode_pth(data: bytes, limits: Limits, trust_pickle: bool = False) -> Any:
    """Return what ``torch.save`` stored, on the CPU: only tensors and plain values, unless pickle is trusted.

    Raises:
        OverLimit: The archive expands beyond the limits.
        ValueError: The data is not a pth file, or holds other objects and ``trust_pickle`` is false.
        MissingExtra: torch is not installed.
    """
    torch = _torch("pth files")
    try:
        # The older format of torch is not an archive, so it does not expand.
        if data.startswith(b"PK"):
            with zipfile.ZipFile(BytesIO(data)) as archive:
                _check_archive(archive, len(data), limits, "pth archive")
        return torch.load(BytesIO(data), map_location="cpu", weights_only=not trust_pickle)
    except pickle.UnpicklingError as exc:
        raise ValueError(
            "the pth file is damaged, or holds objects other than tensors and plain values: such objects are pickled, "
            "can run code and are refused; pass decode(trust_pickle=True) if you trust this data"
        ) from exc
    except OverLimit:
        raise
    except Exception as exc:  # torch raises almost any exception for damaged data
        raise ValueError(f"damaged pth file: {exc}") from exc


def encode_pth(value: Any) -> bytes:
    """Return a value as ``torch.save`` stores it.

    Raises:
        MissingExtra: torch is not installed.
    """
    stream = BytesIO()
    _torch("pth files").save(value, stream)
    return stream.getvalue()


@dataclass(frozen=True, slots=True)
class _NpyHeader:
    """The header of an npy file; ``size`` is the number of bytes before the array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    size: int


def _npy_header(data: bytes) -> _NpyHeader:
    if not data.startswith(_NPY_MAGIC):
        raise ValueError(f"not an npy file: it starts with {bytes(data[:8])!r}")
    major = data[6] if len(data) > 6 else 0
    start = 10 if major == 1 else 12
    if major not in (1, 2, 3) or len(data) < start:
        raise ValueError(f"truncated npy header, or unknown version {major}")
    size = int.from_bytes(data[8:start], "little")
    if size > _NPY_HEADER_MAX_BYTES:
        raise ValueError(f"npy header of {size} bytes is longer than {_NPY_HEADER_MAX_BYTES}")
    if len(data) < start + size:
        raise ValueError("truncated npy header")
    return _parsed_npy_header(data[start : start + size], "latin-1" if major < 3 else "utf-8", start + size)


def _parsed_npy_header(raw: bytes, charset: str, size: int) -> _NpyHeader:
    try:
        text = _PYTHON2_LONG.sub(b"", raw).decode(charset)
        with _NPY_HEADER_LOCK:
            header = ast.literal_eval(text)
        shape, fortran = header["shape"], header["fortran_order"]
        dtype = np.lib.format.descr_to_dtype(header["descr"])
    except (ValueError, TypeError, SyntaxError, KeyError, IndexError, RecursionError, MemoryError) as exc:
        raise ValueError(f"damaged npy header: {exc}") from exc
    shape_is_valid = isinstance(shape, tuple) and all(type(length) is int and length >= 0 for length in shape)
    if not shape_is_valid or type(fortran) is not bool:
        raise ValueError(f"damaged npy header: shape {shape!r}, fortran_order {fortran!r}")
    if dtype.hasobject:
        raise ValueError("the npy array holds Python objects, which are pickled, can run code and are refused")
    return _NpyHeader(shape, dtype, fortran, size)


def _write_npy(stream: Any, array: Array) -> None:
    if array.dtype.hasobject:
        raise ValueError("an array of Python objects can only be stored as pickle, which is refused")
    np.lib.format.write_array(stream, array, allow_pickle=False)


def _check_archive(archive: zipfile.ZipFile, stored_bytes: int, limits: Limits, label: str) -> None:
    """Check the declared sizes, and that the archive can be read in pieces: zipfile decompresses other kinds whole."""
    for member in archive.infolist():
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{label} with a member that is neither stored nor deflated: {member.filename!r}")
    expanded_bytes = sum(member.file_size for member in archive.infolist())
    limits.check_bytes(expanded_bytes, label)
    limits.check_ratio(stored_bytes, expanded_bytes, label)


def _npz_members(archive: zipfile.ZipFile, limits: Limits) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"the npz archive has two members named {name!r}")
        raw = _read_member(archive, member)
        members[name] = decode_npy(raw, limits) if raw.startswith(_NPY_MAGIC) else raw
    return members


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return the bytes of a member, decompressed in pieces: no more than its declared size, which is checked."""
    out = bytearray()
    with archive.open(member) as file:
        while piece := file.read(_ARCHIVE_PIECE_BYTES):
            out += piece
    return bytes(out)


def _tenbin_chunks(data: memoryview) -> Iterator[memoryview]:
    offset = 0
    while offset < len(data):
        if data[offset : offset + 8] != _TENBIN_MAGIC:
            raise ValueError(f"not tenbin data: no chunk starts at byte {offset}")
        start = offset + 16
        size = int.from_bytes(data[offset + 8 : start], "little", signed=True)
        if size < 0 or start + size > len(data):
            raise ValueError(f"truncated tenbin data: a chunk of {size} bytes at byte {offset}")
        yield data[start : start + size]
        offset = start + size + -size % _TENBIN_ALIGN


def _tenbin_array(header: memoryview, body: memoryview) -> Array:
    if len(header) < 24 or len(header) % 8:
        raise ValueError(f"damaged tenbin header of {len(header)} bytes")
    kind = bytes(header[:8]).rstrip(b"\0").decode("ascii", "replace")
    ndim, *shape = struct.unpack(f"<{len(header) // 8 - 2}q", header[16:])
    if kind not in _TENBIN_DTYPES:
        raise ValueError(f"tenbin header names an unknown dtype {kind!r}")
    if ndim != len(shape) or ndim > _TENBIN_MAX_DIMS or any(size < 0 for size in shape):
        raise ValueError(f"damaged tenbin header: {ndim} dimensions, shape {tuple(shape)}")
    dtype = np.dtype(f"<{kind}")
    if math.prod(shape) * dtype.itemsize != len(body):
        raise ValueError(f"damaged tenbin data: {len(body)} bytes for a {dtype} array of shape {tuple(shape)}")
    return np.ndarray(tuple(shape), dtype, body).copy()


def _torch(feature: str) -> Any:
    return import_extra("torch", feature, "torch")
