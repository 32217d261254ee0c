"""Writes samples to tar shards: their keys, and a checkpoint after every shard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.blobs.compression import COMPRESSION_SUFFIXES
from penstock.errors import PlanError
from penstock.formats.manifest import ShardEntry
from penstock.formats.tar import ShardWriter
from penstock.formats.tar.shard_names import TAR_SUFFIXES, on_disk, parse_target
from penstock.landing.commit import OpenSet, numbered_key
from penstock.landing.position import Position, Positions
from penstock.landing.target import Target, check_suffix, target_text
from penstock.plan import check_count, size_in_bytes
from penstock.storage import Storage, local_path

_MAX_SAMPLES = 100_000  # of a shard, by default


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """When a shard is full, and how it is compressed."""

    max_bytes: int | None
    max_samples: int | None
    compress: str | None = None

    @classmethod
    def of(
        cls,
        max_bytes: float | str | None,
        max_samples: int | None,
        compress: str | None,
        shards: int | None,
        default_bytes: float = 1e9,
    ) -> ShardLimits:
        """Return the limits that a user gave; those that were not given have a default, unless there are ``shards``.

        Raises:
            PlanError: An argument is out of range.
        """
        if max_samples is not None:
            check_count("max_samples", max_samples, least=1)
        if max_bytes is None and shards is None:
            max_bytes = default_bytes
        if max_samples is None and shards is None:
            max_samples = _MAX_SAMPLES
        return cls(None if max_bytes is None else size_in_bytes("max_bytes", max_bytes), max_samples, compress)

    @property
    def limited(self) -> bool:
        """Whether a range may be more than one shard."""
        return self.max_bytes is not None or self.max_samples is not None

    def options(self) -> dict[str, Any]:
        """Return what determines the files, for the comparison with an interrupted run."""
        return {"max_bytes": self.max_bytes, "max_samples": self.max_samples, "compress": self.compress}


def tar_target(url: str | os.PathLike[str], compress: str | None, storage: Storage | None) -> Target:
    """Return the target for shards: a folder, a pattern (``out/train-%06d.tar``) or one archive.

    Raises:
        PlanError: The compression is unknown, or the name is not a valid pattern.
    """
    if compress is not None and compress not in COMPRESSION_SUFFIXES:
        raise PlanError(f"compress={compress!r}: use one of {', '.join(COMPRESSION_SUFFIXES)}")
    text = target_text(url)
    check_suffix(text, "tar shards", TAR_SUFFIXES)
    path = local_path(text) if on_disk(text) else text
    folder, name, _ = parse_target(path.rstrip("/") or "/", compress)
    label = "" if folder == (path.rstrip("/") or "/") else name
    return Target(folder, "tar", TAR_SUFFIXES, label, storage, streamed=True)


class TarSink:
    """Writes samples to shards of a tar target.

    Args:
        limits: When a shard is full.
        numbered_keys: Whether keys are made of the number of the sample, and of its own key if it has one. Otherwise
            only samples without a key get their number.
    """

    def __init__(self, limits: ShardLimits, numbered_keys: bool = False) -> None:
        self._limits, self._numbered_keys = limits, numbered_keys
        self._writer: ShardWriter | None = None

    def open(self, landing: OpenSet, samples: Positions) -> None:
        """Begin with the shard after those that are complete."""
        limits = self._limits
        pattern, start = landing.tar_names(limits.compress)
        self._landing, self._samples = landing, samples
        self._done = sum(entry.samples for entry in landing.entries.values())
        self._writer = ShardWriter(
            pattern,
            max_bytes=limits.max_bytes,
            max_samples=limits.max_samples,
            compress=limits.compress,
            start=start,
            manifest=False,
            storage=landing.target.given,
            background=True,
            published=self._published,
            at_least_one=not landing.entries and not landing.adds and not landing.may_be_empty,
        )

    def _published(self, entry: ShardEntry, position: Position | None) -> None:
        self._landing.checkpoint(entry, position)

    def add(self, items: Sequence[Any]) -> None:
        """Write samples."""
        assert self._writer is not None
        first, number_text = self._done, self._landing.number_text
        keyed = [self._with_key(sample, number_text(number)) for number, sample in enumerate(items, first)]
        self._writer.write_all(keyed, lambda number: self._samples.position(first + number))
        self._done += len(keyed)

    def _with_key(self, sample: dict[str, Any], number: str) -> dict[str, Any]:
        if not self._numbered_keys:
            return sample if "__key__" in sample else {"__key__": number, **sample}
        sample["__key__"] = numbered_key(sample, number)
        return sample

    def close(self) -> None:
        """Complete the last shard."""
        assert self._writer is not None
        self._writer.close(lambda: self._samples.position(self._done))

    def drop(self) -> None:
        """Discard the shard that is being written; complete ones still get their checkpoint."""
        if self._writer is not None:
            self._writer.abort()
