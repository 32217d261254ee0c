"""Select the samples of a stream that are written: which, in which order, under which keys, with which fields."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from penstock.errors import DataError, PlanError
from penstock.formats.tar.archive import EncodedSamples, check_key
from penstock.plan import no_field
from penstock.plan.expression_text import TextExpression
from penstock.tarstream.raw import RawRun, RawSample

_PLACEHOLDER = re.compile(r"\{(\w*)(:[^{}]*)?\}")
_NAMES = ("key", "name", "folder", "shard", "number")


@dataclass(frozen=True, slots=True)
class KeyTemplate:
    """A template for new keys.

    Attributes:
        template: Text with the placeholders ``{key}``, ``{folder}`` and ``{name}`` (the key before and
            after its last slash), ``{shard}`` and ``{number}``; each may have a format, as in ``{number:06d}``.

    Raises:
        PlanError: The template has an unknown placeholder or an invalid format.
    """

    template: str

    def __post_init__(self) -> None:
        for name, spec in _PLACEHOLDER.findall(self.template):
            if name not in _NAMES:
                raise PlanError(f"{self.template!r} has an unknown placeholder {{{name}}}: use {', '.join(_NAMES)}")
            try:
                format(0 if name == "number" else "", spec[1:])
            except ValueError as exc:
                raise PlanError(f"{self.template!r} has an invalid format: {exc}") from exc

    def key(self, raw: RawSample, number: int) -> str:
        """Return the new key of a sample, the ``number``-th that is written.

        Raises:
            DataError: The result is not a valid key.
        """
        folder, _, name = raw.key.rpartition("/")
        shard = os.path.basename(raw.shard).partition(".")[0]
        values = {"key": raw.key, "name": name, "folder": folder, "shard": shard, "number": number}
        key = _PLACEHOLDER.sub(lambda match: format(values[match[1]], (match[2] or ":")[1:]), self.template)
        try:
            check_key(key)
        except DataError as exc:
            raise DataError(f"{exc.problem}: {key!r}", raw.shard, raw.key) from exc
        return key


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection from a stream: the condition is applied first, then the shuffle, then the slice.

    Attributes:
        where: The condition that samples must meet.
        shuffle: The size of the shuffle buffer, in samples; 0 keeps the order.
        seed: The seed of the shuffle.
        start: The number of the first sample to select.
        stop: The number after the last one; None: to the end.
        step: Select every ``step``-th sample.
        fields: The fields to keep; all by default.
        drop: The fields to leave out.
        rename: The template for new keys.
        named: More fields that the user named, each with its alternatives, besides those above.
    """

    where: TextExpression | None = None
    shuffle: int = 0
    seed: int = 0
    start: int = 0
    stop: int | None = None
    step: int = 1
    fields: frozenset[str] | None = None
    drop: frozenset[str] = frozenset()
    rename: KeyTemplate | None = None
    named: tuple[tuple[str, ...], ...] = ()

    @property
    def copies_runs(self) -> bool:
        """Whether :meth:`encode_runs` may be used: the selection is a plain slice that changes no key and no field."""
        changed = self.fields is not None or self.drop or self.rename is not None
        return not (changed or self.where is not None or self.shuffle or self.step > 1)

    def encode_runs(self, runs: Iterable[RawRun]) -> Iterator[EncodedSamples]:
        """Yield the selected samples for a writer, in runs; reads no further than the last selected sample."""
        passed, stop = 0, sys.maxsize if self.stop is None else self.stop
        if self.start >= stop:
            return
        for run in runs:
            first, last = max(self.start - passed, 0), min(stop - passed, len(run))
            if first < last:
                yield from (run if last - first == len(run) else run.slice(first, last)).encode()
            passed += len(run)
            if passed >= stop:
                return

    def samples(self, stream: Iterable[RawSample]) -> Iterator[RawSample]:
        """Yield the selected samples; reads no further than the last of these.

        Raises:
            DataError: At the end: no sample has a field that the user named.
        """
        seen: dict[tuple[str, ...], str] = {}  # the fields of samples, and a shard that holds such samples
        chosen: Iterable[RawSample] = _recorded(stream, seen)
        if self.where is not None:
            chosen = (raw for raw in chosen if self._matches(raw))
        if self.shuffle > 1:
            chosen = shuffle_buffered(chosen, self.shuffle, random.Random(self.seed))
        yield from islice(chosen, self.start, self.stop, self.step)
        self._check_fields(seen)

    def _check_fields(self, seen: dict[tuple[str, ...], str]) -> None:
        conditions = self.where.fields() if self.where is not None else ()
        single = (*sorted(conditions), *sorted(self.fields or ()), *sorted(self.drop))
        present = {name for names in seen for name in names}
        for wanted in (*((name,) for name in single), *self.named):
            if seen and not present.intersection(wanted) and not any(name.startswith("__") for name in wanted):
                raise DataError(f"the samples have {no_field(wanted, present)}", next(iter(seen.values())))

    def encode(self, stream: Iterable[RawSample]) -> Iterator[EncodedSamples]:
        """Yield the selected samples for a writer; a sample that keeps none of its fields is left out.

        Raises:
            DataError: A new key is not a valid key.
        """
        if self.fields is None and not self.drop and self.rename is None:  # the stored headers can be copied
            yield from (raw.encode() for raw in self.samples(stream))
            return
        for number, raw in enumerate(self.samples(stream)):
            key = self.rename.key(raw, number) if self.rename is not None else None
            fields = [field for field in raw.field_names if self._keeps(field)]
            if fields:
                yield raw.reencode(key, fields)

    def _keeps(self, field: str) -> bool:
        return (self.fields is None or field in self.fields) and field not in self.drop

    def _matches(self, raw: RawSample) -> bool:
        assert self.where is not None
        return bool(self.where.of(raw))


def _recorded(stream: Iterable[RawSample], seen: dict[tuple[str, ...], str]) -> Iterator[RawSample]:
    """Yield the samples, and record the fields that they have."""
    for raw in stream:
        if raw.field_names not in seen:
            seen[raw.field_names] = raw.shard
        yield raw


def shuffle_buffered(stream: Iterable[RawSample], size: int, random: random.Random) -> Iterator[RawSample]:
    """Yield samples in random order, from a buffer of ``size`` samples."""
    buffer: list[RawSample] = []
    for raw in stream:
        if len(buffer) < size:
            buffer.append(raw.detached())
            continue
        slot = random.randrange(size)
        buffer[slot], raw = raw.detached(), buffer[slot]
        yield raw
    random.shuffle(buffer)
    yield from buffer
