"""TFRecord files of ``tf.train.Example``, read and written without TensorFlow; checksums are verified."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DataError, import_extra
from penstock.formats.rows.reader import FileBytes, ReadResult, RowFile
from penstock.formats.rows.row_offsets import RowOffsets
from penstock.order import I64
from penstock.plan import Fields, is_tensor, kind_of

TFRECORD_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")

_RECORDS_PER_OFFSET = 16  # few, since a record is reached by stepping over the lengths of those before it
_BATCH_RECORDS = 1 << 16  # records whose lengths are verified together
_FRAME_BYTES = 16  # around a record: its length, the checksum of the length, the checksum of the record
_LENGTH = struct.Struct("<Q")
_LENGTH_AND_CHECKSUM = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_FLOAT = struct.Struct("<f")
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3  # field numbers in the message tf.train.Feature
_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers

_KEY = "__key__"  # always text in a sample
_MASK_DELTA = np.uint32(0xA282EAD8)

_NOT_AN_EXAMPLE = "the record is not a tf.train.Example"
_LARGE_VARINT = "the tf.train.Example is damaged: an integer has more than 64 bits"


@dataclass(frozen=True, slots=True)
class TfRecordFormat:
    """A record is a sample; fields named in ``lists`` are lists even if they hold one value."""

    lists: tuple[str, ...] = ()

    scan_key = "tfrecord"
    columnar = False
    function_name, suffixes, cheap = "read_tfrecords", TFRECORD_SUFFIXES, False

    def scan(self, data: FileBytes, problem: str | None) -> RowOffsets:
        """Step from length to length; if a record is damaged or truncated, the rest counts as one damaged record."""
        offsets: list[int] = []
        count = at = 0
        while at < len(data):
            starts, at, truncated = _step_over_records(data, at)
            valid = _count_valid_lengths(data, starts)
            offsets += starts[:valid][-count % _RECORDS_PER_OFFSET :: _RECORDS_PER_OFFSET]
            count += valid
            if valid < len(starts):
                at = starts[valid]
                problem = problem or f"the length of record {count} is damaged: the rest of the file cannot be read"
                break
            if truncated:
                problem = problem or f"record {count} is truncated"
                break
        starts_array = np.array(offsets, np.int64)
        return RowOffsets(_RECORDS_PER_OFFSET, count + bool(problem), starts_array, at, problem=problem or "")

    def infer_schema(self, file: RowFile) -> None:
        """Return ``None``: every record names and types its own fields."""

    def key(self, file: RowFile, row: int) -> str:
        return f"record {row}"

    def read(self, file: RowFile, rows: I64, fields: Fields, schema: None) -> ReadResult:
        records, checksums = _find_records(file, rows)
        is_damaged = masked_checksums(records) != np.array(checksums, np.uint32)
        samples: list[Any] = []
        errors: dict[int, DataError] = {}
        for position, (record, damaged) in enumerate(zip(records, is_damaged.tolist(), strict=True)):
            try:
                if damaged:
                    raise ValueError("the record is damaged: its checksum does not match")
                samples.append(parse_example(record, fields, self.lists))
            except (ValueError, IndexError, struct.error) as exc:
                errors[position] = DataError(str(exc), file.url, self.key(file, int(rows[position])))
                samples.append(None)
        return samples, errors


def masked_checksums(records: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of each record as TFRecord files store it: rotated and offset.

    A CRC over bytes that contain their own CRC would be of little use, hence the mask.

    Raises:
        MissingExtra: google-crc32c is not installed.
    """
    crc32c = import_extra("google_crc32c", "TFRecord", "formats").value
    crcs = np.fromiter(map(crc32c, records), np.uint32, len(records))
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + _MASK_DELTA


def _step_over_records(data: FileBytes, at: int) -> tuple[list[int], int, bool]:
    """Return where the next records start, where the last of them ends, and whether the one after it is truncated."""
    starts: list[int] = []
    unpack, size = _LENGTH.unpack_from, len(data)
    while at < size and len(starts) < _BATCH_RECORDS:
        if at + _FRAME_BYTES > size:
            return starts, at, True
        end = at + _FRAME_BYTES + unpack(data, at)[0]
        if end > size:
            length_is_valid = _count_valid_lengths(data, [at])
            return (starts, at, True) if length_is_valid else ([*starts, at], at, False)
        starts.append(at)
        at = end
    return starts, at, False


def _count_valid_lengths(data: FileBytes, starts: list[int]) -> int:
    """Return how many records come before the first whose length does not match its checksum."""
    headers = [data[at : at + _LENGTH_AND_CHECKSUM.size] for at in starts]
    checksums = np.array([_CHECKSUM.unpack_from(header, 8)[0] for header in headers], np.uint32)
    damaged = np.flatnonzero(masked_checksums([header[:8] for header in headers]) != checksums)
    return int(damaged[0]) if len(damaged) else len(starts)


def _find_records(file: RowFile, rows: I64) -> tuple[list[bytes], list[int]]:
    """Return the bytes and the stored checksums of records."""
    found: dict[int, tuple[int, int]] = {}
    offsets, data = file.offsets, file.data
    wanted = set(rows.tolist())
    for entry in np.unique(rows // offsets.interval).tolist():
        at = int(offsets.starts[entry])
        for row in range(entry * offsets.interval, min((entry + 1) * offsets.interval, offsets.readable_rows)):
            length = _LENGTH.unpack_from(data, at)[0]
            if row in wanted:
                found[row] = (at + _LENGTH_AND_CHECKSUM.size, length)
            at += _FRAME_BYTES + length
    spans = [found[row] for row in rows.tolist()]
    checksums = [_CHECKSUM.unpack_from(data, at + size)[0] for at, size in spans]
    return [data[at : at + size] for at, size in spans], checksums


def parse_example(record: bytes, fields: Fields, lists: tuple[str, ...] = ()) -> dict[str, Any]:
    """Decode a ``tf.train.Example``: a single value as it is, several as an array (several bytes as a list).

    Raises:
        ValueError: The record is not a ``tf.train.Example``, or is damaged.
        IndexError: The record ends in the middle of an integer.
    """
    sample: dict[str, Any] = {}
    for number, wire_type, low, high in message_fields(record, 0, len(record)):
        if number != 1 or wire_type != _LEN:
            raise ValueError(_NOT_AN_EXAMPLE)
        for entry, _, start, stop in message_fields(record, low, high):
            if entry != 1:
                raise ValueError(_NOT_AN_EXAMPLE)
            name, feature = _parse_entry(record, start, stop)
            if fields.wants(name):
                sample[name] = _parse_feature(record, feature, name in lists)
    if isinstance(key := sample.get(_KEY), bytes):
        sample[_KEY] = key.decode("utf-8", "surrogateescape")
    return sample


def _parse_entry(record: bytes, start: int, stop: int) -> tuple[str, tuple[int, int]]:
    """Return the name of a field and the byte range of its feature."""
    name, feature = "", (0, 0)
    for number, wire_type, low, high in message_fields(record, start, stop):
        if wire_type != _LEN:
            raise ValueError(_NOT_AN_EXAMPLE)
        if number == 1:
            name = record[low:high].decode()
        elif number == 2:
            feature = (low, high)
    return name, feature


def _parse_feature(record: bytes, feature: tuple[int, int], as_list: bool) -> Any:
    kind, values = 0, []
    for number, _, low, high in message_fields(record, *feature):
        kind = number
        values += [(start, stop) for _, _, start, stop in message_fields(record, low, high)]
    if kind == _BYTES_LIST:
        parts = [record[low:high] for low, high in values]
        return parts[0] if len(parts) == 1 and not as_list else parts
    if kind in (_FLOAT_LIST, _INT64_LIST) and len(values) == 1 and not as_list:
        low, high = values[0]  # most fields hold one number, which is faster to decode without an array
        if kind == _FLOAT_LIST and high - low == 4:
            return _FLOAT.unpack_from(record, low)[0]
        if kind == _INT64_LIST and low < high:
            value, end = _parse_varint(record, low)
            if end == high:
                value &= (1 << 64) - 1
                return value - (1 << 64) if value >> 63 else value
    if kind == _FLOAT_LIST:
        array: Any = np.frombuffer(b"".join(record[low:high] for low, high in values), "<f4").astype(np.float32)
    elif kind == _INT64_LIST:
        array = _parse_varints(b"".join(record[low:high] for low, high in values))
    elif kind == 0:
        return None
    else:
        raise ValueError(f"a feature of the tf.train.Example has the unknown kind {kind}")
    return array[0].item() if len(array) == 1 and not as_list else array


def message_fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the fields of a protocol buffer message: number, wire type, start and end of the content."""
    while at < stop:
        tag, at = _parse_varint(data, at)
        wire_type = tag & 7
        if wire_type == _LEN:
            size, at = _parse_varint(data, at)
        elif wire_type == _VARINT:
            size = _parse_varint(data, at)[1] - at
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError(_NOT_AN_EXAMPLE)
        if at + size > stop:
            raise ValueError("the tf.train.Example is truncated in the middle of a value")
        yield tag >> 3, wire_type, at, at + size
        at += size


def _parse_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at a position, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(_LARGE_VARINT)


def _parse_varints(data: bytes) -> I64:
    """Return consecutive integers."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == len(raw):
        return raw.astype(np.int64)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise ValueError("the tf.train.Example is damaged: a list ends in the middle of an integer")
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = np.diff(starts, append=len(raw))
    if int(sizes.max()) > 10:
        raise ValueError(_LARGE_VARINT)
    shifts = (np.arange(len(raw)) - np.repeat(starts, sizes)).astype(np.uint64) * np.uint64(7)
    values = np.bitwise_or.reduceat((raw & 0x7F).astype(np.uint64) << shifts, starts)
    return values.view(np.int64)


def encode_example(sample: Mapping[str, Any]) -> bytes:
    """Return a sample as a ``tf.train.Example``: numbers, bytes, text, and lists or one-dimensional arrays of them.

    ``__key__`` is a feature like any other; other fields named ``__like_this__`` are left out.

    Raises:
        ValueError: A value cannot be stored in a ``tf.train.Example``.
    """
    entries = []
    for name, value in sample.items():
        if name.startswith("__") and name != _KEY:
            continue
        if name == _KEY and isinstance(value, str):
            value = value.encode("utf-8", "surrogateescape")  # a key is a path, which may be any bytes
        try:
            feature = b"" if value is None else _encode_feature(value)
        except (TypeError, OverflowError, ValueError) as exc:
            raise ValueError(f"field {name!r}: {exc}") from exc
        entries.append(_encode_field(1, _encode_field(1, name.encode()) + _encode_field(2, feature)))
    return _encode_field(1, b"".join(entries))


def _encode_feature(value: Any) -> bytes:
    if isinstance(value, bytes | str):
        return _encode_field(_BYTES_LIST, _encode_bytes([value]))
    if isinstance(value, list | tuple) and value and all(isinstance(item, bytes | str) for item in value):
        return _encode_field(_BYTES_LIST, _encode_bytes(value))
    array = value.detach().cpu().numpy() if is_tensor(value) else np.asarray(value)
    if array.ndim > 1 or array.dtype.kind not in "biuf" or (array.dtype.kind == "u" and array.dtype.itemsize == 8):
        kind = f"of shape {array.shape}" if array.ndim > 1 else f"of {array.dtype}"
        raise TypeError(f"{kind_of(value)} {kind} cannot be stored in a tf.train.Example; encode it to bytes first")
    flat = array.reshape(-1)
    if array.dtype.kind == "f":
        return _encode_field(_FLOAT_LIST, _encode_field(1, flat.astype("<f4").tobytes()))
    fits_in_bytes = not len(flat) or (int(flat.min()) >= 0 and int(flat.max()) < 0x80)
    packed = flat.astype(np.uint8).tobytes() if fits_in_bytes else b"".join(map(_encode_varint, flat.tolist()))
    return _encode_field(_INT64_LIST, _encode_field(1, packed))


def _encode_bytes(values: Any) -> bytes:
    return b"".join(_encode_field(1, value.encode() if isinstance(value, str) else value) for value in values)


def _encode_field(number: int, content: bytes) -> bytes:
    return _encode_varint(number << 3 | _LEN) + _encode_varint(len(content)) + content


def _encode_varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def frame_records(records: list[bytes]) -> list[bytes]:
    """Return records as a file stores them: each with its length and its checksums."""
    lengths = [_LENGTH.pack(len(record)) for record in records]
    checksums = masked_checksums([*lengths, *records]).astype("<u4")
    count = len(records)
    return [
        b"".join((length, checksums[n].tobytes(), record, checksums[count + n].tobytes()))
        for n, (length, record) in enumerate(zip(lengths, records, strict=True))
    ]
