"""What a tar header says, and which members make a sample.

Both readers stand on this module: the scan of a file at rest and the front-to-back read of a stream. So a
shard gives the same samples and the same losses, however it arrives.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

BLOCK = 512
ZEROS = bytes(BLOCK)
REGULAR = frozenset(b"0\x007")
EMPTY = frozenset(b"123456")  # links, devices, folders, pipes: nothing follows their header
EXTENDING = frozenset(b"xXgLK")  # PAX and GNU records about the member that comes next
GLOBAL = ord("g")
REFUSED = {ord("S"): "sparse members are not supported", ord("M"): "multi-volume members are not supported"}
MAX_EXTENSION = 1 << 20  # a name never needs a megabyte: a larger record is damage or an attack
MAX_PADDING = 64 << 20  # more padding than any tape needs is not read through, but reported
_RUN = 4  # samples that are worth being taken at once

SOURCE = "__source__"  # where tarproc's tools took a sample from, which they write beside its fields: no field of it
GAP = b""  # the name of an item that is no member but a loss
END = b"\0"  # the name of an item that is no member but the end of the archive, where something is wrong

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)
Member = tuple[bytes, V, str | None]
"""Name, the member's value, and what is wrong with it."""
Entry = tuple[bytes, tuple[str, ...], list[V], str | None, bool]
"""Key, fields, their values, what is wrong with the sample, and whether it stands for a lost stretch."""


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


class Source(Protocol[V_co]):
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


def step(source: Source[V], extensions: Extensions) -> Member[V] | Halt | None:
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


def _extend(source: Source[V], extensions: Extensions, kind: int, size: int, offset: int) -> Halt | None:
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


class Grouper(Generic[V]):
    """Puts consecutive members with one key together, and gives every loss a place.

    A sample next to a damage may have lost fields to it. It counts as whole only when an earlier sample of
    the shard had just the same set of fields; otherwise the entry that stands for the loss covers it too.

    Attributes:
        skipped: Members that belong to no sample: folders, links, names without a field.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._raw = b""  # the key of the open sample as the archive writes it; empty when none is open
        self._key = b""
        self._sample: dict[str, V] = {}
        self._problem: str | None = None
        self._seen: set[bytes] = set()
        self._whole: set[tuple[str, ...]] = set()  # fields of samples known to be complete, in member order
        self._sets: set[frozenset[str]] = set()  # the same without the order
        self._last = b""
        self._loss: str | None = None
        self._names: dict[bytes, str] = {}
        self._barren = 0

    @property
    def first(self) -> V | None:
        """The first value of the sample that is open; None where none is."""
        return next(iter(self._sample.values()), None) if self._raw else None

    def push(self, name: bytes, value: V, trouble: str | None = None) -> list[Entry[V]]:
        """Take the next member, or a GAP or END; give the entries that are complete by that."""
        slash = name.rfind(b"/") + 1
        dot = name.find(b".", slash)
        if dot <= slash or not (field := self._names.get(name[dot + 1 :]) or self._field(name[dot + 1 :])):
            return self._aside(name, trouble)
        closed = self._begin(name[:dot]) if name[:dot] != self._raw else []
        if field in self._sample:
            trouble = trouble or f"the field {field!r} appears twice"
        self._problem = self._problem or trouble
        self._sample[field] = value
        return closed

    def run(
        self, names: list[bytes], values: Sequence[V], at: int
    ) -> tuple[list[bytes], tuple[str, ...], list[V]] | None:
        """Take samples with the fields of the open one at once, if whole ones are all that follows: mostly they are.

        Args:
            names: Names of members.
            values: Their values.
            at: Where to begin among them.

        Returns:
            The keys of the samples this completes (the open one first), their fields and their values; None
            when members have to be taken one by one.
        """
        kind = tuple(self._sample)
        count = (len(names) - at) // len(kind) if kind else 0
        if count < _RUN or at < self._barren or kind not in self._whole or self._problem or self._loss is not None:
            return None
        self._barren = 0
        stop = at + count * len(kind)
        last = stop - len(kind)
        keys = self._alike(names[at:stop], [b"." + name.encode("utf-8", "surrogateescape") for name in kind])
        if keys is None:
            self._barren = at + 64  # mixed shards: do not look at the rest of the names again for each sample
            return None
        taken = [*self._sample.values(), *values[at:last]]
        done = [self._key, *keys[:-1]]
        self._raw = self._key = keys[-1]
        self._last = done[-1]
        self._sample = dict(zip(kind, values[last:stop], strict=True))
        return done, kind, taken

    def _alike(self, names: list[bytes], endings: list[bytes]) -> list[bytes] | None:
        """Give the keys, if the names are those of new samples with clean keys and these endings."""
        step = len(endings)
        keys = [name[: -len(endings[0])] for name in names[::step]]
        for place, ending in enumerate(endings):
            if [key + ending for key in keys] != names[place::step]:
                return None
        lines = b"\n%b\n" % b"\n".join(keys)
        if any(mark in lines for mark in (b"\n/", b"/\n", b"\n\n", b"\n.", b"/.", b"..")):
            return None
        if b"." in lines and b"." in b"".join([key.rpartition(b"/")[2] for key in keys]):
            return None
        fresh = set(keys)
        if len(fresh) < len(keys) or not fresh.isdisjoint(self._seen):
            return None
        self._seen |= fresh
        return keys

    def finish(self) -> list[Entry[V]]:
        """Give what is left when there are no more members."""
        left = self._closed(torn=False) if self._raw else []
        return left if self._loss is None else [*left, self._lost()]

    def _aside(self, name: bytes, trouble: str | None) -> list[Entry[V]]:
        """Take what belongs to no sample."""
        if trouble is None or name not in (GAP, END):
            self.skipped += 1
            return []
        closed = self._closed(torn=name == GAP) if self._raw else []
        self._raw, self._loss = b"", self._loss or trouble
        return closed

    def _begin(self, start: bytes) -> list[Entry[V]]:
        """Open the sample of a key, unless it is the open one under another spelling."""
        key, problem = (start, None) if start[0] > 47 and b".." not in start else _cleaned(start)
        closed: list[Entry[V]] = []
        if not self._raw or key != self._key:
            closed = self._closed(torn=False) if self._raw else []
            self._key, self._sample, self._problem = key, {}, problem
            if key in self._seen:
                self._problem = problem or "the key comes back after other samples"
            self._seen.add(key)
        self._raw = start
        return closed

    def _field(self, extension: bytes) -> str:
        """Name the field of an extension; each is worked out once a shard."""
        name = extension.decode("utf-8", "surrogateescape").lower()
        if name == SOURCE:
            return ""
        if name:
            self._names[extension] = name
        return name

    def _closed(self, torn: bool) -> list[Entry[V]]:
        """End the open sample; ``torn`` when a damage is what ended it."""
        kind, problem, loss = tuple(self._sample), self._problem, self._loss
        if problem is None and kind not in self._whole:
            reserved = [name for name in kind if name.startswith("__") and name.endswith("__")]
            problem = f"the field name {reserved[0]!r} is reserved" if reserved else None
        if (torn or loss is not None) and (problem is not None or frozenset(kind) not in self._sets):
            if loss is not None:
                return [] if torn else [self._lost()]
            if problem is None:
                return []
        before = [] if loss is None else [self._lost()]
        if problem is not None:
            return [*before, (self._key, (), [], problem, False)]
        self._last = self._key
        if kind not in self._whole:
            self._whole.add(kind)
            self._sets.add(frozenset(kind))
        return [*before, (self._key, kind, list(self._sample.values()), None, False)]

    def _lost(self) -> Entry[V]:
        """Make the entry that stands for a lost stretch."""
        last = repr(self._last.decode("utf-8", "replace")) if self._last else "none"
        problem, self._loss = f"{self._loss}; last good key: {last}", None
        return self._last, (), [], problem, True


def _cleaned(start: bytes) -> tuple[bytes, str | None]:
    """Drop a leading ``./`` from a key, and say what is wrong with a path that leaves its folder."""
    while start.startswith(b"./"):
        start = start[2:].lstrip(b"/")
    if start.startswith(b"/"):
        return start, "absolute paths are refused"
    if b".." in start.split(b"/"):
        return start, "paths with '..' are refused"
    return start, None
