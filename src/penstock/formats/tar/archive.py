"""The tar format: reading headers, writing headers, and samples encoded as members.

Reading tolerates what other tools write (v7, ustar, GNU, PAX); writing uses plain ustar headers, with a PAX record only
where they do not suffice. Needs no numpy, so that tools which only copy samples start quickly.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from penstock.blobs.compression import detect
from penstock.errors import DataError

BLOCK = 512  # bytes; headers take one block, data is padded to whole blocks
ZEROS = bytes(BLOCK)
END_MARKER = bytes(2 * BLOCK)
RECORD = 10_240  # bytes that an archive is padded to by default; more zeros may be samples that a power cut erased
MAX_PADDING = 1 << 20  # bytes after the end marker, more than any tape needs; a longer padding is a loss

# Member types, as in the header's typeflag.
_REGULAR_TYPES = frozenset(b"0\x007")
FOLDER = b"/"  # in place of a folder's name
_DATALESS_TYPES = frozenset(b"123456")  # links, devices, folders, pipes: nothing follows their header
_EXTENSION_TYPES = frozenset(b"xXgLK")  # PAX and GNU records about the member that comes next
_GLOBAL_PAX_TYPE = ord("g")
_UNSUPPORTED_TYPES = {
    ord("S"): "sparse members are not supported",
    ord("M"): "multi-volume members are not supported",
}
_MAX_EXTENSION = 1 << 20  # bytes; a name never needs a megabyte: a larger record is damage or an attack

ValueT = TypeVar("ValueT")
_ValueT_co = TypeVar("_ValueT_co", covariant=True)
Member = tuple[bytes, ValueT, str | None]
"""A member: its name, the value that stands for it, and what is wrong with it."""


def padded(size: int) -> int:
    """Return the size of ``size`` bytes in an archive, padding included."""
    return (size + BLOCK - 1) & -BLOCK


# Reading headers


def parse_number(field: bytes) -> int:
    """Parse a numeric header field: octal, or base 256 if its first bit is set.

    Raises:
        ValueError: The field is neither, or the number is negative.
    """
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise ValueError("negative or oversized number")
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise ValueError("not an octal number")
    return int(digits, 8) if digits else 0


def checksum_holds(head: bytes) -> bool:
    """Return whether a header block matches its checksum, computed from unsigned or (old tars) signed bytes."""
    own = head[148:156]
    try:
        declared = parse_number(own)
    except ValueError:
        return False
    # The low half of an Adler-32 is one plus the sum of the bytes, modulo 65,521: the fastest sum there is.
    missing = declared - ((zlib.adler32(head) & 0xFFFF) - 1 - sum(own) + 8 * 32)
    if missing % 65521 == 0:
        return True
    return (missing + 256 * sum(byte > 127 for byte in head[:148] + head[156:])) % 65521 == 0


def compression_of(head: bytes) -> str | None:
    """Recognise the compression of an archive by its first block; a valid tar header is never mistaken for one."""
    return None if len(head) >= BLOCK and checksum_holds(head[:BLOCK]) else detect(head)


def header_name(head: bytes) -> bytes:
    """Return the path in a header; only POSIX headers have a prefix (GNU stores times in its place)."""
    name = head[:100].partition(b"\0")[0]
    prefix = head[345:500].partition(b"\0")[0] if head[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


class Extensions:
    """The PAX and GNU records read so far that apply to the next member.

    Attributes:
        pending: Whether any record applies to the next member.
        records: Those records, by name.
    """

    __slots__ = ("_global", "pending", "records")

    def __init__(self) -> None:
        self._global: dict[bytes, bytes] = {}
        self.clear()

    def clear(self) -> None:
        """Drop the records for one member, after that member or its loss; global records stay."""
        self.records = dict(self._global)
        self.pending = bool(self._global)

    @property
    def orphaned(self) -> bool:
        """Whether records for a member have been read, but not the member."""
        return self.pending and self.records != self._global

    def add(self, typeflag: int, body: bytes) -> None:
        """Add the records in the body of an extension header.

        Raises:
            ValueError: The records are malformed.
        """
        if typeflag == ord("L"):
            self.records[b"path"] = body.partition(b"\0")[0]
        elif typeflag != ord("K"):
            found = _parse_pax(body)
            if typeflag == _GLOBAL_PAX_TYPE:
                self._global |= found
            self.records |= found
        self.pending = True

    def path(self) -> bytes | None:
        """Return the path that the records set, if any."""
        return self.records.get(b"path")

    def size(self, default: int) -> int:
        """Return the size that the records set, or ``default``."""
        return int(self.records.get(b"size", default))

    def problem(self) -> str | None:
        """Return why the member cannot be read, if the records say so."""
        if any(name.startswith(b"GNU.sparse.") for name in self.records):
            return _UNSUPPORTED_TYPES[ord("S")]
        return "the path holds a NUL byte" if b"\0" in self.records.get(b"path", b"") else None


def has_relevant_records(body: bytes) -> bool:
    """Return whether a PAX header may affect how its member is read; most only hold precise times."""
    return b"path=" in body or b"size=" in body or b"GNU.sparse." in body


def _parse_pax(body: bytes) -> dict[bytes, bytes]:
    if not has_relevant_records(body):
        return {}
    found = {}
    at = 0
    while at < len(body):
        length, space, _ = body[at : at + 20].partition(b" ")
        if not space or not length.isdigit():
            raise ValueError("malformed PAX record")
        stop = at + int(length)
        name, equals, value = body[at + len(length) + 1 : max(stop - 1, at)].partition(b"=")
        if not equals or stop > len(body) or body[stop - 1] != 0x0A:
            raise ValueError("malformed PAX record")
        if name in (b"path", b"size") or name.startswith(b"GNU.sparse."):
            found[name] = value
        at = stop
    if not found.get(b"size", b"0").isdigit() or len(found.get(b"size", b"")) > 19:
        raise ValueError("malformed PAX size")
    return found


class HeaderStream(Protocol[_ValueT_co]):
    """An archive that is read front to back.

    Attributes:
        offset: Where the next read begins, in the archive.
    """

    offset: int

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer where the archive ends."""

    def value(self, size: int, name: bytes) -> _ValueT_co | None:
        """Skip the data and padding of a member and return the value that stands for it; None if it is cut off."""

    def resync(self) -> bool:
        """Skip to the next valid header; False if there is none."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Reading stops at the end marker or at damage.

    Attributes:
        problem: What is wrong; None at the end marker.
        recoverable: Valid headers may follow the damage.
    """

    problem: str | None
    recoverable: bool = False


def read_member(source: HeaderStream[ValueT], extensions: Extensions) -> Member[ValueT] | Halt | None:
    """Read the next header and step over its data; None if it was an extension header.

    The name of a member that cannot belong to a sample is FOLDER or, for a link or a device, empty.
    """
    offset = source.offset
    head = source.take(BLOCK)
    if len(head) < BLOCK:
        return Halt(truncated_archive(offset, source.offset))
    if head == ZEROS:
        return Halt(None)
    if not checksum_holds(head):
        return Halt(damaged_header(offset), recoverable=True)
    typeflag = head[156]
    try:
        size = 0 if typeflag in _DATALESS_TYPES else parse_number(head[124:136])
    except ValueError:
        return Halt(f"damaged header at offset {offset}: its size is not a number", recoverable=True)
    if typeflag in _EXTENSION_TYPES:
        return _read_extension(source, extensions, typeflag, size, offset)
    is_file = typeflag in _REGULAR_TYPES or typeflag in _UNSUPPORTED_TYPES
    other_name = FOLDER if typeflag == ord("5") else b""
    name = (extensions.path() or header_name(head)) if is_file else other_name
    problem = extensions.problem() or _UNSUPPORTED_TYPES.get(typeflag)
    size = extensions.size(size) if typeflag not in _DATALESS_TYPES else 0
    extended = typeflag == ord("S") and head[482] != 0
    while extended:  # old GNU sparse maps continue in further blocks
        more = source.take(BLOCK)
        extended = len(more) == BLOCK and more[504] != 0
    extensions.clear()
    value = source.value(size, b"" if problem else name)
    if value is None:
        return Halt(truncated_member(size, offset, source.offset))
    return name, value, problem if is_file and name else None


def _read_extension(
    source: HeaderStream[ValueT], extensions: Extensions, typeflag: int, size: int, offset: int
) -> Halt | None:
    if size > _MAX_EXTENSION:
        return Halt(f"damaged header at offset {offset}: an extension header declares {size} bytes", recoverable=True)
    body = source.take(padded(size))
    if len(body) < size:
        return Halt(truncated_member(size, offset, source.offset))
    try:
        extensions.add(typeflag, body[:size])
    except ValueError as exc:
        return Halt(f"damaged header at offset {offset}: {exc}", recoverable=True)
    return None


def damaged_header(offset: int) -> str:
    """Return the message for a header at ``offset`` whose checksum is wrong."""
    return f"damaged header at offset {offset}" if offset else "damaged header at offset 0: not a tar archive?"


def truncated_archive(offset: int, total: int) -> str:
    """Return the message for an archive of ``total`` bytes that ends where a header should be, at ``offset``."""
    if not total:
        return "the shard is empty (0 bytes)"
    where = "without an end marker" if offset >= total else "inside a header"
    return f"truncated: the archive ends {where} at offset {total}"


def truncated_member(size: int, offset: int, total: int) -> str:
    """Return the message for a member of ``size`` bytes, its header at ``offset``, in an archive of ``total`` bytes."""
    remaining = max(total - offset - BLOCK, 0)
    return f"truncated: the member at offset {offset} declares {size} bytes, {remaining} are left"


def orphaned_extension(offset: int) -> str:
    """Return the message for an extension header that ends at ``offset``, at the end marker."""
    return f"an extension header has no member: the archive ends at offset {offset}"


def trailing_bytes(offset: int) -> str:
    """Return the message for data after the end marker at ``offset``."""
    problem = "bytes follow the end marker, as in concatenated archives: only the first archive was read"
    return f"{problem}; it ends at offset {offset}"


def excess_padding(offset: int) -> str:
    """Return the message for too many zeros after the end marker at ``offset``."""
    return f"more than {MAX_PADDING} bytes follow the end marker at offset {offset}: samples may be lost"


def long_padding(padding: int) -> str:
    """Return the message for more zeros after the end marker than an archive is padded with."""
    return f"{padding:,} bytes of zeros follow its end marker: samples may be lost, as after a power cut"


# Writing headers

_MAX_OCTAL_SIZE = 8**11  # a header holds 11 octal digits
_PAX_NAME = b"././@PaxHeader"
_OWNER = b"0000644\0" + b"0000000\0" * 2  # mode, user, group
_TIME = b"00000000000\0"
_MAGIC = b"ustar\00000" + bytes(64) + b"0000000\0" * 2  # magic, version, names of user and group, device
_FIXED_SUM = sum(_OWNER) + sum(_TIME) + sum(_MAGIC) + 8 * 32  # of every header; the checksum counts as spaces
_PLAIN_TAIL = b"0" + bytes(100) + _MAGIC + bytes(155 + 12)


def member_header(name: bytes, size: int) -> bytes:
    """Return the header of a member, preceded by a PAX header if a POSIX header cannot hold the name or the size."""
    if len(name) <= 100 and size < _MAX_OCTAL_SIZE and name.isascii():  # nearly always
        digits = b"%011o\0" % size
        total = _FIXED_SUM + 48 + sum(name) + sum(digits)
        return b"%b%b%b%b%06o\0 %b" % (name.ljust(100, b"\0"), _OWNER, digits, _TIME, total, _PLAIN_TAIL)
    records = []
    place = _split_name(name)
    if place is None:
        records.append(_pax_record(b"path", name))
        place = b"", name[:100]
    if size >= _MAX_OCTAL_SIZE:
        records.append(_pax_record(b"size", b"%d" % size))
    if not records:
        return _ustar_header(place[1], size, prefix=place[0])
    body = b"".join(records)
    pax = _ustar_header(_PAX_NAME, len(body), b"x") + body + bytes(padded(len(body)) - len(body))
    return pax + _ustar_header(place[1], size if size < _MAX_OCTAL_SIZE else 0, prefix=place[0])


def _ustar_header(name: bytes, size: int, typeflag: bytes = b"0", prefix: bytes = b"") -> bytes:
    front = name.ljust(100, b"\0") + _OWNER + b"%011o\0" % size + _TIME
    back = typeflag + bytes(100) + _MAGIC + prefix.ljust(155, b"\0") + bytes(12)
    return b"%b%06o\0 %b" % (front, sum(front) + sum(back) + 8 * 32, back)


def _split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Split a path into the prefix and name of a POSIX header; None if it does not fit."""
    if not name.isascii():
        return None
    if len(name) <= 100:
        return b"", name
    cut = name.rfind(b"/", 0, 156)
    return (name[:cut], name[cut + 1 :]) if cut > 0 and len(name) - cut - 1 <= 100 else None


def _pax_record(name: bytes, value: bytes) -> bytes:
    length = bare = len(name) + len(value) + 3
    while length != bare + len(str(length)):  # the length counts its own digits
        length = bare + len(str(length))
    return b"%d %b=%b\n" % (length, name, value)


# Samples as members

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN_FIELD = re.compile(r"[a-z0-9_-]+")


def is_plain_key(key: Any) -> bool:
    """Return whether a key has only letters, digits, dashes and underscores, as nearly all keys."""
    return isinstance(key, str) and _PLAIN_KEY.fullmatch(key) is not None


def check_key(key: Any) -> None:
    """Refuse keys that would be read back as another key, or that lead out of a folder.

    Raises:
        DataError: The key is one of those, or is not text.
    """
    if is_plain_key(key):
        return
    if not isinstance(key, str):
        raise DataError(f"a key must be text, not {type(key).__name__}", key=repr(key))
    folders, _, name = key.rpartition("/")
    problem = None
    if not key:
        problem = "the key is empty"
    elif not name:
        problem = "the key ends with a slash"
    elif "." in name:
        problem = "the key has a dot in its last part, where the field begins"
    elif key.startswith(("/", "./")) or ".." in folders.split("/"):
        problem = "the key is an absolute path or leads out of its folder"
    elif "\0" in key:
        problem = "the key holds a NUL character"
    if problem:
        raise DataError(problem, key=key)


def field_bytes(value: Any, field: str, key: str) -> bytes:
    """Return the bytes of a field, refusing names and values that cannot be stored.

    Raises:
        DataError: The name is not a valid field name, or the value is not bytes.
    """
    if not _PLAIN_FIELD.fullmatch(field) and (
        not field or field[0] == "." or field != field.lower() or "/" in field or "\0" in field
    ):
        raise DataError(f"{field!r} cannot be a field name: use lower case, without a slash or a leading dot", key=key)
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)  # a copy: the caller may reuse the buffer before it is written
    raise DataError(f"the field {field!r} must be bytes, not {type(value).__name__}", key=key)


def encode_value(value: Any, field: str, key: str) -> bytes:
    """Encode a value by the extension of its field.

    Raises:
        DataError: The extension cannot store the value.
    """
    from penstock.codecs import encode  # imported here so that writers of bytes do not load the codecs

    try:
        return encode(field, value)
    except (TypeError, ValueError) as exc:
        raise DataError(str(exc), key=key) from exc


class EncodedSamples(NamedTuple):
    """Samples with the same fields, ready to be written: headers, data and padding.

    Attributes:
        keys: Their keys.
        field_names: Their fields, in member order.
        pieces: Their bytes: buffers and ranges of files, to be written one after the other.
        starts: Where the data of each field begins, from the first byte of the first piece.
        sizes: The size of each field.
        nbytes: The size of all pieces.
    """

    keys: list[str]
    field_names: tuple[str, ...]
    pieces: list[Any]
    starts: list[int]
    sizes: list[int]
    nbytes: int


def encode_sample(key: str, fields: Mapping[str, bytes]) -> EncodedSamples:
    """Encode a sample, with its fields in the order of their names.

    Raises:
        DataError: The key or a field cannot be stored as it is.
    """
    check_key(key)
    field_names = tuple(sorted(fields))
    if not field_names:
        raise DataError("a sample without fields cannot be stored", None, key)
    stem = key.encode("utf-8", "surrogateescape")
    pieces: list[Any] = []
    starts: list[int] = []
    at = 0
    for field in field_names:
        data = field_bytes(fields[field], field, key)
        head = member_header(stem + b"." + field.encode("utf-8", "surrogateescape"), len(data))
        pieces += (head, data, ZEROS[: -len(data) % BLOCK])
        starts.append(at + len(head))
        at += len(head) + padded(len(data))
    return EncodedSamples([key], field_names, pieces, starts, [len(fields[field]) for field in field_names], at)
