"""What a packing would write, without writing it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from penstock.blobs.compression import COMPRESSION_SUFFIXES
from penstock.engines import Program, Run
from penstock.formats.tar.sink import file_size, sample_size
from penstock.packing.inputs import PackInput
from penstock.packing.tar_output import Packed
from penstock.plan import Plan

_LOOKED_AT = 64  # samples whose size stands for that of all


class _Limits(Protocol):
    @property
    def nbytes(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def compress(self) -> str | None: ...


class _Ruler:
    """Counts shards as a writer would fill them."""

    def __init__(self, limits: _Limits) -> None:
        self._limits = limits
        self.shards, self.samples, self.nbytes = 1, 0, 0
        self._open = self._inside = 0

    def add(self, nbytes: int) -> None:
        """Put a sample of so many bytes into a shard."""
        limits = self._limits
        full = file_size(self._open + nbytes, limits.compress) > limits.nbytes
        if self._inside and (full or self._inside >= limits.samples):
            self.close()
            self.shards += 1
        self._open += nbytes
        self._inside += 1
        self.samples += 1

    def close(self) -> None:
        """Count the open shard."""
        self.nbytes += file_size(self._open)
        self._open = self._inside = 0


def estimated(origin: PackInput, epoch: int, folder: str, first: int, before: int, limits: _Limits) -> Packed:
    """Tell what would be written: exactly for files as they are, else judged by some of the samples.

    Raises:
        DataError: a sample that was looked at cannot be read.
    """
    ruler = _Ruler(limits)
    guessed = limits.compress is not None
    if origin.files is not None and not origin.plan.body:  # else they are not stored as they are
        program = Program(replace(origin.plan, source=replace(origin.files, measured=True)))
        for sizes in _run(program, epoch).items():
            ruler.add(sample_size(sizes))
    else:
        program = Program(origin.plan)
        looked, total = _looked_at(program, epoch, origin.plan)
        guessed = guessed or total != len(looked)
        mean = -(-sum(looked) // len(looked)) if looked else 0
        for nbytes in looked if total == len(looked) else [mean] * (total or 0):
            ruler.add(nbytes)
    ruler.close()
    suffix = COMPRESSION_SUFFIXES[limits.compress] if limits.compress else ""
    names = tuple(f"shard-{first + number:06d}.tar{suffix}" for number in range(ruler.shards))
    return Packed(folder, names, ruler.samples, ruler.nbytes, 0, guessed)


def _looked_at(program: Program, epoch: int, plan: Plan) -> tuple[list[int], int | None]:
    """The bytes that the first samples take, and how many samples there are, as far as that is known."""
    total = None if program.stream is not None else program.length(plan.cut)
    run = _run(program, epoch)
    try:
        most = _LOOKED_AT if total is not None else None
        looked = [sample_size(map(len, _stored(sample))) for sample in islice(run.items(), most)]
    finally:
        run.close()
    return looked, total if total is not None else len(looked)


def _stored(sample: dict[str, Any]) -> list[Any]:
    return [value for name, value in sample.items() if not (name.startswith("__") and name.endswith("__"))]


def _run(program: Program, epoch: int) -> Run:
    if program.stream is not None:
        return Run(program, None, epoch, program.front())
    order = program.order(epoch)
    return Run(program, order, epoch, program.start(order, program.plan.cut))
