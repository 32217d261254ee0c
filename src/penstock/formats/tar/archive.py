"""Tar archives: headers read and written, and which names and values a member can have."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from penstock.blobs.compression import detect
from penstock.errors import DataError

BLOCK = 512
ZEROS = bytes(BLOCK)
REGULAR = frozenset(b"0\x007")
EMPTY = frozenset(b"123456")  # links, devices, folders, pipes: nothing follows their header
EXTENDING = frozenset(b"xXgLK")  # PAX and GNU records about the member that comes next
GLOBAL = ord("g")
REFUSED = {ord("S"): "sparse members are not supported", ord("M"): "multi-volume members are not supported"}
MAX_EXTENSION = 1 << 20  # a name never needs a megabyte: a larger record is damage or an attack
MAX_PADDING = 64 << 20  # more padding than any tape needs is not read through, but reported


V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)
Member = tuple[bytes, V, str | None]
"""Name, the member's value, and what is wrong with it."""

_MAX_OCTAL = 8**11
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN_FIELD = re.compile(r"[a-z0-9_-]+")
_PAX_NAME = b"././@PaxHeader"
_MIDDLE = b"0000644\0" + b"0000000\0" * 2  # mode, user, group
_TIME = b"00000000000\0"
_TAIL = b"ustar\00000" + bytes(64) + b"0000000\0" * 2  # magic, version, names of user and group, device
_FIXED = sum(_MIDDLE) + sum(_TIME) + sum(_TAIL) + 8 * 32  # what is in every header; the checksum counts as spaces
_PLAIN = b"0" + bytes(100) + _TAIL + bytes(155 + 12)


def padded(size: int) -> int:
    """Give the room that ``size`` bytes take in an archive."""
    return (size + BLOCK - 1) & -BLOCK


def number(field: bytes) -> int:
    """Read a numeric header field: octal, or base 256 when its first bit is set.

    Raises:
        ValueError: It is neither, or negative.
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
    """Tell whether a header block carries its own checksum, of unsigned or (old tars) of signed bytes."""
    own = head[148:156]
    try:
        declared = number(own)
    except ValueError:
        return False
    # The low half of an Adler-32 is one plus the sum of the bytes, modulo 65,521: the fastest sum there is.
    missing = declared - ((zlib.adler32(head) & 0xFFFF) - 1 - sum(own) + 8 * 32)
    if missing % 65521 == 0:
        return True
    return (missing + 256 * sum(byte > 127 for byte in head[:148] + head[156:])) % 65521 == 0


def compression_of(head: bytes) -> str | None:
    """Recognise how an archive is compressed by its first block; a good tar header is never taken for compression."""
    return None if len(head) >= BLOCK and checksum_holds(head[:BLOCK]) else detect(head)


def header_name(head: bytes) -> bytes:
    """Give the path in a header; the prefix belongs to it in POSIX headers only (GNU keeps times there)."""
    name = head[:100].partition(b"\0")[0]
    prefix = head[345:500].partition(b"\0")[0] if head[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


class Extensions:
    """PAX and GNU records that wait for the member they describe."""

    __slots__ = ("_always", "pending", "records")

    def __init__(self) -> None:
        self._always: dict[bytes, bytes] = {}
        self.forget()

    def forget(self) -> None:
        """Drop what waits: its member has come, or is lost."""
        self.records = dict(self._always)
        self.pending = bool(self._always)

    @property
    def orphaned(self) -> bool:
        """Tell whether records wait for a member."""
        return self.pending and self.records != self._always

    def read(self, kind: int, body: bytes) -> None:
        """Take in the body of an extension header.

        Raises:
            ValueError: The records are malformed.
        """
        if kind == ord("L"):
            self.records[b"path"] = body.partition(b"\0")[0]
        elif kind != ord("K"):
            found = _pax(body)
            if kind == GLOBAL:
                self._always |= found
            self.records |= found
        self.pending = True

    def path(self) -> bytes | None:
        """Give the path these records set, if they set one."""
        return self.records.get(b"path")

    def size(self, otherwise: int) -> int:
        """Give the size these records set, or the one in the header."""
        return int(self.records.get(b"size", otherwise))

    def problem(self) -> str | None:
        """Say why the member they describe cannot be read, if it cannot."""
        if any(name.startswith(b"GNU.sparse.") for name in self.records):
            return REFUSED[ord("S")]
        return "the path holds a NUL byte" if b"\0" in self.records.get(b"path", b"") else None


def matters(body: bytes) -> bool:
    """Tell whether a PAX header says anything of interest here; most hold finer times and nothing else."""
    return b"path=" in body or b"size=" in body or b"GNU.sparse." in body


def _pax(body: bytes) -> dict[bytes, bytes]:
    """Read the PAX records that matter here."""
    if not matters(body):
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


class HeaderStream(Protocol[V_co]):
    """An archive that is read front to back."""

    offset: int

    def take(self, size: int) -> bytes:
        """Give the next bytes; fewer where the archive ends."""

    def value(self, size: int, name: bytes) -> V_co | None:
        """Step over a member's bytes and their padding and give what stands for it; None if it is cut off."""

    def resync(self) -> bool:
        """Go on to the next good header, if there is one."""


@dataclass(frozen=True, slots=True)
class Halt:
    """The walk cannot simply go on.

    Attributes:
        problem: What is wrong; None at the end marker.
        goes_on: Good headers may follow.
    """

    problem: str | None
    goes_on: bool = False


def step(source: HeaderStream[V], extensions: Extensions) -> Member[V] | Halt | None:
    """Read one header and what belongs to it; None where there is nothing to tell."""
    offset = source.offset
    head = source.take(BLOCK)
    if len(head) < BLOCK:
        return Halt(cut_short(offset, source.offset))
    if head == ZEROS:
        return Halt(None)
    if not checksum_holds(head):
        return Halt(damaged(offset), goes_on=True)
    kind = head[156]
    try:
        size = 0 if kind in EMPTY else number(head[124:136])
    except ValueError:
        return Halt(f"damaged header at offset {offset}: its size is no number", goes_on=True)
    if kind in EXTENDING:
        return _extend(source, extensions, kind, size, offset)
    name = (extensions.path() or header_name(head)) if kind in REGULAR or kind in REFUSED else b""
    problem = extensions.problem() or REFUSED.get(kind)
    size = extensions.size(size) if kind not in EMPTY else 0
    extended = kind == ord("S") and head[482] != 0
    while extended:  # old GNU sparse maps go on in further blocks
        more = source.take(BLOCK)
        extended = len(more) == BLOCK and more[504] != 0
    extensions.forget()
    value = source.value(size, b"" if problem else name)
    if value is None:
        return Halt(beyond(size, offset, source.offset))
    return name, value, problem if name else None


def _extend(source: HeaderStream[V], extensions: Extensions, kind: int, size: int, offset: int) -> Halt | None:
    if size > MAX_EXTENSION:
        return Halt(f"damaged header at offset {offset}: an extension of {size} bytes", goes_on=True)
    body = source.take(padded(size))
    if len(body) < size:
        return Halt(beyond(size, offset, source.offset))
    try:
        extensions.read(kind, body[:size])
    except ValueError as exc:
        return Halt(f"damaged header at offset {offset}: {exc}", goes_on=True)
    return None


def damaged(offset: int) -> str:
    """Say that the header at ``offset`` is damaged."""
    return f"damaged header at offset {offset}" if offset else "damaged header at offset 0: no tar archive?"


def cut_short(offset: int, total: int) -> str:
    """Say that an archive of ``total`` bytes ends where a header should begin."""
    if not total:
        return "the shard is empty (0 bytes)"
    where = "without an end marker" if offset >= total else "inside a header"
    return f"truncated: the archive ends {where} at offset {total}"


def beyond(size: int, offset: int, total: int) -> str:
    """Say that the member with its header at ``offset`` goes beyond the end of the archive."""
    left = max(total - offset - BLOCK, 0)
    return f"truncated: the member at offset {offset} declares {size} bytes, {left} are left"


def trailing(offset: int) -> str:
    """Say that there is more behind an end marker than padding."""
    why = "bytes follow the end marker, as in concatenated archives: only the first was read"
    return f"{why}; it ends at offset {offset}"


def overpadded(offset: int) -> str:
    """Say that there are more zeros behind an end marker than anybody writes."""
    return f"more than {MAX_PADDING} bytes follow the end marker at offset {offset}"


def member_header(name: bytes, size: int) -> bytes:
    """Make the header of a member, with a PAX record before it for what a POSIX header cannot say."""
    if len(name) <= 100 and size < _MAX_OCTAL and name.isascii():  # nearly always
        digits = b"%011o\0" % size
        total = _FIXED + 48 + sum(name) + sum(digits)
        return b"%b%b%b%b%06o\0 %b" % (name.ljust(100, b"\0"), _MIDDLE, digits, _TIME, total, _PLAIN)
    records = []
    place = _placed(name)
    if place is None:
        records.append(_record(b"path", name))
        place = b"", name[:100]
    if size >= _MAX_OCTAL:
        records.append(_record(b"size", b"%d" % size))
    if not records:
        return _header(place[1], size, prefix=place[0])
    body = b"".join(records)
    pax = _header(_PAX_NAME, len(body), b"x") + body + bytes(padded(len(body)) - len(body))
    return pax + _header(place[1], size if size < _MAX_OCTAL else 0, prefix=place[0])


def _header(name: bytes, size: int, kind: bytes = b"0", prefix: bytes = b"") -> bytes:
    """Make a POSIX header block that says nothing but name and size."""
    front = name.ljust(100, b"\0") + _MIDDLE + b"%011o\0" % size + _TIME
    back = kind + bytes(100) + _TAIL + prefix.ljust(155, b"\0") + bytes(12)
    return b"%b%06o\0 %b" % (front, sum(front) + sum(back) + 8 * 32, back)


def _placed(name: bytes) -> tuple[bytes, bytes] | None:
    """Split a name into prefix and name as POSIX headers hold them, if they can."""
    if not name.isascii():
        return None
    if len(name) <= 100:
        return b"", name
    cut = name.rfind(b"/", 0, 156)
    return (name[:cut], name[cut + 1 :]) if cut > 0 and len(name) - cut - 1 <= 100 else None


def _record(name: bytes, value: bytes) -> bytes:
    """Make a PAX record, whose length counts its own digits."""
    length = bare = len(name) + len(value) + 3
    while length != bare + len(str(length)):
        length = bare + len(str(length))
    return b"%d %b=%b\n" % (length, name, value)


def check_key(key: Any) -> None:
    """Refuse keys that would be read back as another one, or lead outside of a folder.

    Raises:
        DataError: It is such a key.
    """
    if isinstance(key, str) and _PLAIN_KEY.fullmatch(key):  # nearly always
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


def checked(value: Any, field: str, key: str) -> Any:
    """Give the bytes of a field, refusing names and values that cannot be stored.

    Raises:
        DataError: It is such a field.
    """
    if not _PLAIN_FIELD.fullmatch(field) and (
        not field or field[0] == "." or field != field.lower() or "/" in field or "\0" in field
    ):
        raise DataError(f"{field!r} cannot be the name of a field: lower case, no slash, no leading dot", key=key)
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)  # a copy: the caller may go on with its buffer before it is written
    raise DataError(f"the field {field!r} must be bytes, not {type(value).__name__}", key=key)


def encoded(value: Any, field: str, key: str) -> bytes:
    """A value by its field's extension.

    Raises:
        DataError: It cannot be stored there.
    """
    from penstock.codecs import encode  # whoever writes bytes needs none of it

    try:
        return encode(field, value)
    except (TypeError, ValueError) as exc:
        raise DataError(str(exc), key=key) from exc


class EncodedSamples(NamedTuple):
    """Samples of the same fields ready to be written: their pieces, and where from their beginning the fields lie."""

    keys: list[str]
    kind: tuple[str, ...]
    pieces: list[Any]
    starts: list[int]
    sizes: list[int]
    nbytes: int


def encode_sample(key: str, fields: Mapping[str, bytes]) -> EncodedSamples:
    """Make the headers of a sample; fields in the order of their names.

    Raises:
        DataError: The key or a field cannot be stored as it is.
    """
    check_key(key)
    kind = tuple(sorted(fields))
    if not kind:
        raise DataError("a sample without fields cannot be stored", None, key)
    stem = key.encode("utf-8", "surrogateescape")
    pieces: list[Any] = []
    starts: list[int] = []
    at = 0
    for field in kind:
        data = checked(fields[field], field, key)
        head = member_header(stem + b"." + field.encode("utf-8", "surrogateescape"), len(data))
        pieces += (head, data, ZEROS[: -len(data) % BLOCK])
        starts.append(at + len(head))
        at += len(head) + padded(len(data))
    return EncodedSamples([key], kind, pieces, starts, [len(fields[field]) for field in kind], at)
