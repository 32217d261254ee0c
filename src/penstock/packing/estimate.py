"""Computes what packing into tar shards would write, without writing it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from penstock.blobs.compression import COMPRESSION_SUFFIXES
from penstock.engines import Program, start_run
from penstock.formats.tar.sink import file_size, sample_size
from penstock.landing import Packed, ShardLimits
from penstock.packing.inputs import PackInput

_MEASURED_SAMPLES = 64  # samples that are encoded; all others count with the mean size of these


class _ShardCounter:
    """Counts the shards that a writer would fill, and their bytes."""

    def __init__(self, limits: ShardLimits) -> None:
        self._limits = limits
        self.shards, self.samples, self.nbytes = 1, 0, 0
        self._open_bytes = self._open_samples = 0

    def add(self, nbytes: int) -> None:
        """Count a sample that takes ``nbytes`` of an archive."""
        limits = self._limits
        is_full = limits.max_bytes is not None and (
            file_size(self._open_bytes + nbytes, limits.compress) > limits.max_bytes
        )
        is_full = is_full or (limits.max_samples is not None and self._open_samples >= limits.max_samples)
        if self._open_samples and is_full:
            self.close()
            self.shards += 1
        self._open_bytes += nbytes
        self._open_samples += 1
        self.samples += 1

    def close(self) -> None:
        """Count the bytes of the open shard."""
        self.nbytes += file_size(self._open_bytes)
        self._open_bytes = self._open_samples = 0


def estimate_shards(
    source: PackInput, epoch: int, folder: str, first_shard: int, limits: ShardLimits, ranges: int | None = None
) -> Packed:
    """Return what would be written: exact for files that are stored unchanged, else estimated from a few samples.

    With ``ranges`` the number of bytes is an estimate, and so are the shards of a range that is split.

    Raises:
        DataError: A sample that was read for the estimate cannot be read or encoded.
    """
    counter = _ShardCounter(limits)
    is_estimate = limits.compress is not None
    if source.files is not None and not source.plan.body:  # a stage would change what is stored
        program = Program(replace(source.plan, source=replace(source.files, sizes_only=True)))
        for sizes in start_run(program.plan, epoch, program).items():
            counter.add(sample_size(sizes))
    else:
        measured, total = _measure_samples(Program(source.plan), epoch)
        is_estimate = is_estimate or total != len(measured)
        mean = -(-sum(measured) // len(measured)) if measured else 0
        for nbytes in measured if total == len(measured) else [mean] * total:
            counter.add(nbytes)
    counter.close()
    if ranges is not None:
        counter.shards, is_estimate = min(ranges, counter.samples), True
    suffix = COMPRESSION_SUFFIXES[limits.compress] if limits.compress else ""
    suffix = f"-0.tar{suffix}" if ranges is not None and limits.limited else f".tar{suffix}"
    names = tuple(f"shard-{first_shard + number:06d}{suffix}" for number in range(counter.shards))
    return Packed(folder, names, counter.samples, counter.nbytes, 0, is_estimate)


def _measure_samples(program: Program, epoch: int) -> tuple[list[int], int]:
    """Return the archive bytes of the first samples, and the number of samples; if that is unknown, measure all."""
    total = None if program.stream is not None else program.length(program.plan.cut)
    run = start_run(program.plan, epoch, program)
    try:
        limit = _MEASURED_SAMPLES if total is not None else None
        measured = [sample_size(map(len, _stored_values(sample))) for sample in islice(run.items(), limit)]
    finally:
        run.close()
    return measured, total if total is not None else len(measured)


def _stored_values(sample: dict[str, Any]) -> list[Any]:
    return [value for name, value in sample.items() if not (name.startswith("__") and name.endswith("__"))]
