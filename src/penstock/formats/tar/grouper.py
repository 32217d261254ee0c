"""Group the members of an archive into samples; damaged members become failing samples at their position.

Both readers group members here, the scan of a file and the front-to-back walk over a stream, so that a shard gives the
same samples and the same losses either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Generic

from penstock.formats.tar.archive import FOLDER, ValueT

LOST_RANGE = b""  # in place of a member's name: samples were lost here
BAD_END = b"\0"  # in place of a member's name: the archive ends, and something is wrong with its end
_SOURCE_FIELD = "__source__"  # tarproc's tools record here where a sample came from: it is not a field
_MIN_RUN = 4  # fewer samples than these are quicker to group one by one
_RETRY_AFTER = 64  # members after which a run is looked for again

SampleEntry = tuple[bytes, tuple[str, ...], list[ValueT], str | None, bool]
"""Key, fields, their values, what is wrong with the sample, and whether it stands for a lost range of samples."""


class Grouper(Generic[ValueT]):
    """Joins consecutive members with the same key into a sample, and gives every loss a position.

    A sample next to damage may have lost fields. It counts as complete only if an earlier sample of the shard had
    exactly the same set of fields; otherwise the entry that stands for the loss covers it too.

    Args:
        apart: Members of a sample may lie apart: a key that comes back is another part of its sample, not an error.
        skipped: The counter to add to; by default a new one.

    Attributes:
        skipped: The number of members that belong to no sample, by kind.
    """

    def __init__(self, apart: bool = False, skipped: Counter[str] | None = None) -> None:
        self.skipped: Counter[str] = Counter() if skipped is None else skipped
        self._apart = apart
        self._raw_key = b""  # the key of the open sample as the archive writes it; empty when none is open
        self._key = b""
        self._sample: dict[str, ValueT] = {}
        self._problem: str | None = None
        self._seen_keys: set[bytes] = set()
        self._complete_names: set[tuple[str, ...]] = set()  # fields of complete samples, in member order
        self._complete_sets: set[frozenset[str]] = set()  # the same in any order
        self._last_good_key = b""
        self._loss: str | None = None
        self._field_names: dict[bytes, str] = {}
        self._no_run_before = 0

    @property
    def first(self) -> ValueT | None:
        """The first value of the open sample; None if no sample is open."""
        return next(iter(self._sample.values()), None) if self._raw_key else None

    def push(self, name: bytes, value: ValueT, problem: str | None = None) -> list[SampleEntry[ValueT]]:
        """Add the next member, or a LOST_RANGE or BAD_END with its problem; return the entries this completes."""
        slash = name.rfind(b"/") + 1
        dot = name.find(b".", slash)
        if dot <= slash or not (field := self._field_names.get(name[dot + 1 :]) or self._field(name[dot + 1 :])):
            return self._push_other(name, problem)
        closed = self._open(name[:dot]) if name[:dot] != self._raw_key else []
        if field in self._sample:
            problem = problem or f"the field {field!r} appears twice"
        self._problem = self._problem or problem
        self._sample[field] = value
        return closed

    def push_run(
        self, names: list[bytes], values: Sequence[ValueT], at: int
    ) -> tuple[list[bytes], tuple[str, ...], list[ValueT]] | None:
        """Add several samples at once, if all of them are complete and have the fields of the open sample.

        Args:
            names: Names of members.
            values: Their values.
            at: The first member to add.

        Returns:
            The keys of the samples this completes (the open one first), their fields and their values; None if
            members have to be added one by one.
        """
        field_names = tuple(self._sample)
        count = (len(names) - at) // len(field_names) if field_names else 0
        if (
            count < _MIN_RUN
            or at < self._no_run_before
            or field_names not in self._complete_names
            or self._problem
            or self._loss is not None
        ):
            return None
        self._no_run_before = 0
        stop = at + count * len(field_names)
        last = stop - len(field_names)
        keys = self._new_keys(names[at:stop], [b"." + name.encode("utf-8", "surrogateescape") for name in field_names])
        if keys is None:
            self._no_run_before = at + _RETRY_AFTER  # mixed shards: do not compare all remaining names for each sample
            return None
        run_values = [*self._sample.values(), *values[at:last]]
        done = [self._key, *keys[:-1]]
        self._raw_key = self._key = keys[-1]
        self._last_good_key = done[-1]
        self._sample = dict(zip(field_names, values[last:stop], strict=True))
        return done, field_names, run_values

    def _new_keys(self, names: list[bytes], endings: list[bytes]) -> list[bytes] | None:
        """Return the keys of the names if they are samples with these endings and with clean, new keys; else None."""
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
        distinct = set(keys)
        if len(distinct) < len(keys) or not distinct.isdisjoint(self._seen_keys) or self._key in distinct:
            return None
        if not self._apart:
            self._seen_keys |= distinct
        return keys

    def finish(self) -> list[SampleEntry[ValueT]]:
        """Return the remaining entries, after the last member."""
        entries = self._close(torn=False) if self._raw_key else []
        return entries if self._loss is None else [*entries, self._lost_entry()]

    def _push_other(self, name: bytes, problem: str | None) -> list[SampleEntry[ValueT]]:
        """Add a loss, or a member that belongs to no sample."""
        if problem is None or name not in (LOST_RANGE, BAD_END):
            self.skipped[_kind(name)] += 1
            return []
        closed = self._close(torn=name == LOST_RANGE) if self._raw_key else []
        self._raw_key, self._loss = b"", self._loss or problem
        return closed

    def _open(self, raw_key: bytes) -> list[SampleEntry[ValueT]]:
        """Open the sample of a key, unless it is the open one in another spelling."""
        key, problem = (raw_key, None) if raw_key[0] > 47 and b".." not in raw_key else _clean_key(raw_key)
        closed: list[SampleEntry[ValueT]] = []
        if not self._raw_key or key != self._key:
            closed = self._close(torn=False) if self._raw_key else []
            self._key, self._sample, self._problem = key, {}, problem
            if not self._apart:
                if key in self._seen_keys:
                    self._problem = problem or "the key appears again after other samples"
                self._seen_keys.add(key)
        self._raw_key = raw_key
        return closed

    def _field(self, extension: bytes) -> str:
        """Return the field of an extension, computed once per shard; empty if it is not a field."""
        name = extension.decode("utf-8", "surrogateescape").lower()
        if name == _SOURCE_FIELD:
            return ""
        if name:
            self._field_names[extension] = name
        return name

    def _close(self, torn: bool) -> list[SampleEntry[ValueT]]:
        """End the open sample; ``torn`` if damage ended it."""
        field_names, problem, loss = tuple(self._sample), self._problem, self._loss
        if problem is None and field_names not in self._complete_names:
            reserved = [name for name in field_names if name.startswith("__") and name.endswith("__")]
            problem = f"the field name {reserved[0]!r} is reserved" if reserved else None
        if (torn or loss is not None) and (problem is not None or frozenset(field_names) not in self._complete_sets):
            if loss is not None:
                return [] if torn else [self._lost_entry()]
            if problem is None:
                return []
        before = [] if loss is None else [self._lost_entry()]
        if problem is not None:
            return [*before, (self._key, (), [], problem, False)]
        self._last_good_key = self._key
        if field_names not in self._complete_names:
            self._complete_names.add(field_names)
            self._complete_sets.add(frozenset(field_names))
        return [*before, (self._key, field_names, list(self._sample.values()), None, False)]

    def _lost_entry(self) -> SampleEntry[ValueT]:
        """Return the entry that stands for a lost range."""
        last = repr(self._last_good_key.decode("utf-8", "replace")) if self._last_good_key else "none"
        problem, self._loss = f"{self._loss}; last good key: {last}", None
        return self._last_good_key, (), [], problem, True


def _kind(name: bytes) -> str:
    """Return the kind of a member that belongs to no sample, in the plural."""
    if not name:
        return "links or devices"
    if name.endswith(FOLDER):
        return "folders"
    base = name.rpartition(b"/")[2]
    if base.startswith(b"."):
        return "hidden files"
    return f"{_SOURCE_FIELD} records" if base.partition(b".")[2] else "files without extension"


def _clean_key(raw_key: bytes) -> tuple[bytes, str | None]:
    """Return a key without a leading ``./``, and what is wrong with a path that leaves its folder."""
    while raw_key.startswith(b"./"):
        raw_key = raw_key[2:].lstrip(b"/")
    if raw_key.startswith(b"/"):
        return raw_key, "absolute paths are refused"
    if b".." in raw_key.split(b"/"):
        return raw_key, "paths with '..' are refused"
    return raw_key, None
