"""Which samples of a stream go on, in which order, under which key and with which fields."""

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
from penstock.plan.expression_text import TextExpression
from penstock.tarstream.raw import RawRun, RawSample

_PLACE = re.compile(r"\{(\w*)(:[^{}]*)?\}")
_NAMES = ("key", "name", "folder", "shard", "number")


@dataclass(frozen=True, slots=True)
class Rename:
    """A template for keys: ``{key}``, its last part ``{name}`` and ``{folder}``, ``{shard}``, ``{number}``."""

    template: str

    def __post_init__(self) -> None:
        for name, spec in _PLACE.findall(self.template):
            if name not in _NAMES:
                raise PlanError(f"{self.template!r} has {{{name}}}, which is none of {', '.join(_NAMES)}")
            try:
                format(0 if name == "number" else "", spec[1:])
            except ValueError as exc:
                raise PlanError(f"{self.template!r}: {exc}") from exc

    def key(self, raw: RawSample, number: int) -> str:
        """Give the key that a sample gets.

        Raises:
            DataError: It cannot be a key.
        """
        folder, _, name = raw.key.rpartition("/")
        shard = os.path.basename(raw.shard).partition(".")[0]
        known = {"key": raw.key, "name": name, "folder": folder, "shard": shard, "number": number}
        made = _PLACE.sub(lambda match: format(known[match[1]], (match[2] or ":")[1:]), self.template)
        try:
            check_key(made)
        except DataError as exc:
            raise DataError(f"{exc.problem}: {made!r}", raw.shard, raw.key) from exc
        return made


@dataclass(frozen=True, slots=True)
class Selection:
    """What is taken out of a stream: first the condition, then the shuffle, then the slice.

    Attributes:
        where: A condition on samples.
        shuffle: Samples held in memory, one of which is taken at random; 0: the order stays.
        seed: Decides that order.
        start: Samples left out at the beginning.
        stop: The number of the first sample that is not taken; None: to the end.
        step: Every so many samples one is taken.
        fields: Fields that are kept; all by default.
        drop: Fields that are left out.
        rename: Makes the keys.
    """

    where: TextExpression | None = None
    shuffle: int = 0
    seed: int = 0
    start: int = 0
    stop: int | None = None
    step: int = 1
    fields: frozenset[str] | None = None
    drop: frozenset[str] = frozenset()
    rename: Rename | None = None

    @property
    def as_they_are(self) -> bool:
        """Whether all that is taken lies together, keeps its keys and fields, and nobody looks into it."""
        changed = self.fields is not None or self.drop or self.rename is not None
        return not (changed or self.where is not None or self.shuffle or self.step > 1)

    def copies(self, stream: Iterable[RawRun]) -> Iterator[EncodedSamples]:
        """Give the samples that are taken as they are, for a writer; reads no further than the last of them."""
        passed, stop = 0, sys.maxsize if self.stop is None else self.stop
        if self.start >= stop:
            return
        for stretch in stream:
            first, last = max(self.start - passed, 0), min(stop - passed, len(stretch))
            if first < last:
                yield from (stretch if last - first == len(stretch) else stretch.cut(first, last)).parts()
            passed += len(stretch)
            if passed >= stop:
                return

    def samples(self, stream: Iterable[RawSample]) -> Iterator[RawSample]:
        """Give the samples that are taken; reads no further than the last of them."""
        chosen: Iterable[RawSample] = stream if self.where is None else (raw for raw in stream if self._holds(raw))
        if self.shuffle > 1:
            chosen = shuffled(chosen, self.shuffle, random.Random(self.seed))
        if (self.start, self.stop, self.step) == (0, None, 1):
            return iter(chosen)
        return islice(chosen, self.start, self.stop, self.step)

    def parts(self, stream: Iterable[RawSample]) -> Iterator[EncodedSamples]:
        """Give the samples that are taken, for a writer; those with no field left are left out.

        Raises:
            DataError: A new key cannot be one.
        """
        if self.fields is None and not self.drop and self.rename is None:  # nothing to be made anew
            yield from (raw.parts() for raw in self.samples(stream))
            return
        for number, raw in enumerate(self.samples(stream)):
            key = self.rename.key(raw, number) if self.rename is not None else None
            kept = [field for field in raw.kind if self._keeps(field)]
            if kept:
                yield raw.changed(key, kept)

    def _keeps(self, field: str) -> bool:
        return (self.fields is None or field in self.fields) and field not in self.drop

    def _holds(self, raw: RawSample) -> bool:
        assert self.where is not None
        return bool(self.where.of(raw))


def shuffled(stream: Iterable[RawSample], room: int, random: random.Random) -> Iterator[RawSample]:
    """Give samples in another order, of which ``room`` are held in memory."""
    held: list[RawSample] = []
    for raw in stream:
        if len(held) < room:
            held.append(raw.own())
            continue
        place = random.randrange(room)
        held[place], raw = raw.own(), held[place]
        yield raw
    random.shuffle(held)
    yield from held
