"""Which members of an archive make a sample, and where losses stand among them.

Both readers group members here: the scan of a file and the front-to-back walk over a stream. So a shard gives the
same samples and the same losses, however it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

SOURCE = "__source__"  # tarproc's tools write where a sample came from beside its fields: it is not a field
GAP = b""  # the name of an item that is not a member but a loss
END = b"\0"  # the name of an item that is not a member but the end of the archive, where something is wrong
_RUN = 4  # samples that are worth grouping at once

V = TypeVar("V")
Entry = tuple[bytes, tuple[str, ...], list[V], str | None, bool]
"""Key, fields, their values, what is wrong with the sample, and whether it stands for a lost range of samples."""


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
