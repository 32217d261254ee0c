"""TFRecord files of ``tf.train.Example``, read and written by hand: checksums are checked, TensorFlow is not needed."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.formats.rows.crc32c import crc32c_of, masked
from penstock.formats.rows.reader import Answer, Buffer, RowFile
from penstock.formats.rows.row_offsets import RowOffsets
from penstock.order import I64
from penstock.plan import Fields, is_tensor

SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")

_EVERY = 16  # records from one mark to the next: each is a step from length to length
_LOT = 1 << 16  # lengths whose checksums are checked together
_FRAME = 16  # bytes around a record: its length, the length's checksum, its own checksum
_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<QI")
_SUM = struct.Struct("<I")
_FLOAT = struct.Struct("<f")
_BYTES, _FLOATS, _INTS = 1, 2, 3  # the kinds of lists, by their numbers in a Feature
_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class TfRecordLayout:
    """A record is a sample; fields named in ``lists`` stay lists where they hold one value."""

    lists: tuple[str, ...] = ()

    how = "tfrecord"
    columnar = False
    call, suffixes, cheap = "read_tfrecords", SUFFIXES, False

    def scan(self, data: Buffer, problem: str | None) -> RowOffsets:
        """Step from length to length; where that ends before the file does, the rest is one damaged record."""
        starts: list[int] = []
        good = at = 0
        while at < len(data):
            lot, at, cut = _steps(data, at)
            right = _right_lengths(data, lot)
            starts += lot[:right][-good % _EVERY :: _EVERY]
            good += right
            if right < len(lot):
                at, problem = lot[right], problem or f"the length of record {good} is damaged: what follows is lost"
                break
            if cut:
                problem = problem or f"record {good} is cut short"
                break
        return RowOffsets(_EVERY, good + bool(problem), np.array(starts, np.int64), at, bad=problem or "")

    def learn(self, file: RowFile) -> None:
        """Nothing: every record says what it holds."""

    def key(self, file: RowFile, row: int) -> str:
        return f"record {row}"

    def read(self, file: RowFile, rows: I64, fields: Fields, learnt: None) -> Answer:
        records, told = _records(file, rows)
        wrong = masked(crc32c_of(records)) != np.array(told, np.uint32)
        out: list[Any] = []
        bad: dict[int, DataError] = {}
        for place, (record, damaged) in enumerate(zip(records, wrong.tolist(), strict=True)):
            try:
                if damaged:
                    raise ValueError("its checksum is wrong: the record is damaged")
                out.append(parse_example(record, fields, self.lists))
            except (ValueError, IndexError, struct.error) as exc:
                bad[place] = DataError(str(exc), file.url, self.key(file, int(rows[place])))
                out.append(None)
        return out, bad


def _steps(data: Buffer, at: int) -> tuple[list[int], int, bool]:
    """Where the next records begin, where they end, and whether the file ends within the one that follows."""
    begins: list[int] = []
    unpack, size = _LENGTH.unpack_from, len(data)
    while at < size and len(begins) < _LOT:
        if at + _FRAME > size:
            return begins, at, True
        behind = at + _FRAME + unpack(data, at)[0]
        if behind > size:
            right = _right_lengths(data, [at])
            return (begins, at, True) if right else ([*begins, at], at, False)
        begins.append(at)
        at = behind
    return begins, at, False


def _right_lengths(data: Buffer, begins: list[int]) -> int:
    """How many records in a row have a length whose checksum is right."""
    heads = [data[at : at + _HEAD.size] for at in begins]
    told = np.array([_SUM.unpack_from(head, 8)[0] for head in heads], np.uint32)
    wrong = np.flatnonzero(masked(crc32c_of([head[:8] for head in heads])) != told)
    return int(wrong[0]) if len(wrong) else len(begins)


def _records(file: RowFile, rows: I64) -> tuple[list[bytes], list[int]]:
    """The bytes of records, and what their checksums should be."""
    found: dict[int, tuple[int, int]] = {}
    marks, data = file.marks, file.data
    wanted = set(rows.tolist())
    for mark in np.unique(rows // marks.every).tolist():
        at = int(marks.start[mark])
        for row in range(mark * marks.every, min((mark + 1) * marks.every, marks.readable)):
            length = _LENGTH.unpack_from(data, at)[0]
            if row in wanted:
                found[row] = (at + _HEAD.size, length)
            at += _FRAME + length
    spots = [found[row] for row in rows.tolist()]
    return [data[at : at + size] for at, size in spots], [_SUM.unpack_from(data, at + size)[0] for at, size in spots]


def parse_example(record: bytes, fields: Fields, lists: tuple[str, ...] = ()) -> dict[str, Any]:
    """Take a ``tf.train.Example`` apart: one value as it is, several as an array (of bytes: a list).

    Raises:
        ValueError: it is none.
    """
    out: dict[str, Any] = {}
    for number, wire, low, high in _parts(record, 0, len(record)):
        if number != 1 or wire != _LEN:
            raise ValueError("it is no tf.train.Example")
        for entry, _, start, stop in _parts(record, low, high):
            if entry != 1:
                raise ValueError("it is no tf.train.Example")
            name, feature = _entry(record, start, stop)
            if fields.wants(name):
                out[name] = _value(record, feature, name in lists)
    return out


def _entry(record: bytes, start: int, stop: int) -> tuple[str, tuple[int, int]]:
    name, feature = "", (0, 0)
    for number, wire, low, high in _parts(record, start, stop):
        if wire != _LEN:
            raise ValueError("it is no tf.train.Example")
        if number == 1:
            name = record[low:high].decode()
        elif number == 2:
            feature = (low, high)
    return name, feature


def _value(record: bytes, feature: tuple[int, int], as_list: bool) -> Any:
    kind, values = 0, []
    for number, _, low, high in _parts(record, *feature):
        kind = number
        values += [(wire, start, stop) for _, wire, start, stop in _parts(record, low, high)]
    if kind == _BYTES:
        parts = [record[low:high] for _, low, high in values]
        return parts[0] if len(parts) == 1 and not as_list else parts
    if kind in (_FLOATS, _INTS) and len(values) == 1 and not as_list:
        _, low, high = values[0]  # most fields hold one number, for which an array is a long way round
        if kind == _FLOATS and high - low == 4:
            return _FLOAT.unpack_from(record, low)[0]
        if kind == _INTS and low < high:
            whole, end = _varint(record, low)
            if end == high:
                whole &= (1 << 64) - 1
                return whole - (1 << 64) if whole >> 63 else whole
    if kind == _FLOATS:
        array: Any = np.frombuffer(b"".join(record[low:high] for _, low, high in values), "<f4").astype(np.float32)
    elif kind == _INTS:
        array = _varints(b"".join(record[low:high] for _, low, high in values))
    elif kind == 0:
        return None
    else:
        raise ValueError(f"a feature of the unknown kind {kind}")
    return array[0].item() if len(array) == 1 and not as_list else array


def _parts(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, kind of wire, and where the content lies."""
    while at < stop:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == _LEN:
            size, at = _varint(data, at)
        elif wire == _VARINT:
            size = _varint(data, at)[1] - at
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError("it is no tf.train.Example")
        if at + size > stop:
            raise ValueError("a tf.train.Example that ends in the middle of a value")
        yield tag >> 3, wire, at, at + size
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _varints(data: bytes) -> I64:
    """Whole numbers in a row."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == len(raw):
        return raw.astype(np.int64)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise ValueError("a list of numbers that ends in the middle of one")
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = np.diff(starts, append=len(raw))
    if int(sizes.max()) > 10:
        raise ValueError("a number of more than 64 bits")
    shifts = (np.arange(len(raw)) - np.repeat(starts, sizes)).astype(np.uint64) * np.uint64(7)
    whole = np.bitwise_or.reduceat((raw & 0x7F).astype(np.uint64) << shifts, starts)
    return whole.view(np.int64)


def example(sample: Mapping[str, Any]) -> bytes:
    """Give a sample as a ``tf.train.Example``: numbers, bytes and text, and lists or arrays with one axis of them.

    Raises:
        ValueError: a value has no place in one.
    """
    entries = []
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        try:
            feature = b"" if value is None else _feature(value)
        except (TypeError, OverflowError, ValueError) as exc:
            raise ValueError(f"field {name!r}: {exc}") from exc
        entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
    return _field(1, b"".join(entries))


def _feature(value: Any) -> bytes:
    if isinstance(value, bytes | str):
        return _field(_BYTES, _texts([value]))
    if isinstance(value, list | tuple) and value and all(isinstance(one, bytes | str) for one in value):
        return _field(_BYTES, _texts(value))
    array = value.detach().cpu().numpy() if is_tensor(value) else np.asarray(value)
    if array.ndim > 1 or array.dtype.kind not in "biuf" or (array.dtype.kind == "u" and array.dtype.itemsize == 8):
        shape = f" of the shape {array.shape}" if array.ndim > 1 else f" of {array.dtype}"
        raise TypeError(f"a {type(value).__name__}{shape} has no place in a tf.train.Example; encode it to bytes")
    flat = array.reshape(-1)
    if array.dtype.kind == "f":
        return _field(_FLOATS, _field(1, flat.astype("<f4").tobytes()))
    small = not len(flat) or (int(flat.min()) >= 0 and int(flat.max()) < 0x80)
    packed = flat.astype(np.uint8).tobytes() if small else b"".join(map(_number, flat.tolist()))
    return _field(_INTS, _field(1, packed))


def _texts(values: Any) -> bytes:
    return b"".join(_field(1, value.encode() if isinstance(value, str) else value) for value in values)


def _field(number: int, content: bytes) -> bytes:
    return _number(number << 3 | _LEN) + _number(len(content)) + content


def _number(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def framed(records: list[bytes]) -> list[bytes]:
    """Records as they stand in a file: with their lengths and checksums."""
    lengths = [_LENGTH.pack(len(record)) for record in records]
    sums = masked(crc32c_of([*lengths, *records])).astype("<u4")
    many = len(records)
    return [
        b"".join((length, sums[n].tobytes(), record, sums[many + n].tobytes()))
        for n, (length, record) in enumerate(zip(lengths, records, strict=True))
    ]
