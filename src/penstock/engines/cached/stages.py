"""The stages before ``cache``, which process only what is not cached, and the stage that keeps their results.

A sample that is cached passes these stages as a ``Hit``, any other as a ``Miss``; ``KeepResults`` writes the outputs of
misses, reads those of hits, and passes both on as if there were no cache: in their order, with their lineage and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from penstock.engines.cached.located import Gone, Hit, Miss
from penstock.engines.cached.record_codec import NotStorable, Output, decode_outputs, encode_outputs
from penstock.engines.cached.record_store import record_store
from penstock.errors import PlanError
from penstock.order import I64, fold_into
from penstock.plan import (
    Arrangement,
    Block,
    BranchStage,
    Combination,
    Context,
    Lineage,
    PartStage,
    Place,
    PlacedStage,
    Plan,
    Row,
    Scope,
    Skipped,
    Slot,
    Stage,
    Zip,
)

# (source, its open reader, the stages before the cache, their version, what else counts) -> what identifies results
ResultDigest = Callable[[Any, Any, Sequence[Stage], str | int | None, Any], str]


@dataclass(frozen=True)
class CacheResults(Stage):
    """Keeps the results of all stages before it in a folder; the samples themselves pass unchanged.

    Attributes:
        folder: The folder.
        digest: Computes what identifies the results of a source.
        version: What the digest cannot see, as the user names it.
        per_epoch: How many variants of random stages are kept; True: one for each epoch. None: there are none.
    """

    folder: str
    digest: ResultDigest
    version: str | int | None = None
    per_epoch: int | bool | None = None

    numbered = False

    @property
    def name(self) -> str:
        return "cache"

    @property
    def variants(self) -> int | None:
        """How many variants there are: 0 if results are not random, None if each epoch has its own."""
        return None if self.per_epoch is True else int(self.per_epoch or 0)

    def describe(self) -> str:
        options = {"version": self.version, "per_epoch": self.per_epoch}
        shown = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        return f"cache({', '.join([repr(self.folder), *shown])})"

    def names_after(self, names: frozenset[str]) -> frozenset[str] | None:
        return names

    def run(self, block: Block, ctx: Context) -> Block:
        return block


def check_cachable(plan: Plan, *, random: bool) -> None:
    """Check that the results of a plan's stages can be cached.

    Args:
        plan: The plan.
        random: Stages may draw random numbers, since variants are kept.

    Raises:
        PlanError: They cannot; the message names the stage, and what to do.
    """
    for branch in plan.branches():
        check_cachable(branch, random=random)
    if isinstance(plan.source, Zip):
        raise PlanError("cache() cannot come after zip(): call cache() on each dataset, and then zip()")
    if not isinstance(plan.source, Combination) and (plan.source.streams or plan.source.computed):
        raise PlanError(f"cache() cannot keep results of {plan.source.describe()}, which is not stored anywhere")
    for stage in plan.body:
        if isinstance(stage, CacheResults):
            raise PlanError(f"the plan has {stage.describe()} already: keep one of the two caches")
        if stage.scope is not Scope.EACH:
            raise PlanError(f"cache() must come before {stage.describe()}, which sees more than one sample at a time")
        if stage.wants_rng and not random:
            raise PlanError(
                f"{stage.describe()} draws random numbers, and cache() would repeat them in every epoch: put cache() "
                "before it, or keep several variants with per_epoch=4"
            )


@dataclass(frozen=True, slots=True)
class CachedChain:
    """The stages of some sources up to a cache.

    Attributes:
        leaves: The numbers of the sources.
        slot: Which operand of a zip the sources are; 0 if there is no zip.
        cache: The cache.
        placed: The numbers of the stages in the body of the arrangement; the last one is the cache.
    """

    leaves: range
    slot: int
    cache: CacheResults
    placed: tuple[int, ...]

    def stages_of(self, leaf: int, body: Sequence[PlacedStage]) -> list[Any]:
        """Return the stages before the cache that process the samples of a source, with their numbers if random."""
        found = ((body[i].stage.for_leaf(leaf), body[i].number) for i in self.placed[:-1])
        return [(stage, number if stage.wants_rng else None) for stage, number in found if stage is not None]


def cached_chains(arrangement: Arrangement) -> list[CachedChain]:
    """Return the chains of stages whose results are cached."""
    chains = []
    for at, placed in enumerate(arrangement.body):
        stage = placed.stage
        leaves, slot = range(len(arrangement.leaves)), 0
        in_branch = isinstance(stage, BranchStage)
        if isinstance(stage, BranchStage):
            leaves, slot, stage = stage.leaves, stage.slot, stage.inner
        if isinstance(stage, CacheResults):
            stages = (placed.stage for placed in arrangement.body[:at])
            before = [i for i, one in enumerate(stages) if _is_within(one, leaves if in_branch else None)]
            chains.append(CachedChain(leaves, slot, stage, (*before, at)))
    return chains


def _is_within(stage: Stage, leaves: range | None) -> bool:
    """Return whether a stage belongs to the branch with these sources, or to a branch of it; None: the whole plan."""
    if leaves is None:
        return True
    return isinstance(stage, BranchStage) and stage.leaves.start >= leaves.start and stage.leaves.stop <= leaves.stop


def cached_body(arrangement: Arrangement) -> list[PlacedStage]:
    """Return the stages of a plan, those whose results are cached as stages that process only what is not cached."""
    body = list(arrangement.body)
    for chain in cached_chains(arrangement):
        for i in chain.placed[:-1]:
            stage, leaves = body[i].stage, chain.leaves
            if isinstance(stage, BranchStage):
                leaves, stage = stage.leaves, stage.inner
            kind = OnMisses if stage.keeps_count else CountChangingOnMisses
            body[i] = PlacedStage(kind(stage, leaves, chain.slot, resources=stage.resources), body[i].number)
        last = chain.placed[-1]
        keeps_count = all(arrangement.body[i].stage.keeps_count for i in chain.placed)
        kept = KeepResults if keeps_count else CountChangingKeepResults
        body[last] = PlacedStage(kept(chain.cache, chain.leaves, chain.slot), body[last].number)
    return body


class OnMisses(PartStage):
    """A stage whose results are cached: it processes the samples that are not, and passes on the others."""

    def run(self, block: Block, ctx: Context) -> Block:
        """Run the stage on the misses, and merge its outputs with the other items in order."""
        values = [_operand(item, self.slot) for item in block.items]
        own = [i for i, value in enumerate(values) if isinstance(value, Miss) and value.leaf in self.leaves]
        if not own:
            return block
        keys = np.array([values[i].key for i in own], np.uint64)
        part = Block([values[i].value for i in own], keys, Lineage(_ItemOrigin(block, own, self.slot), len(own)))
        result = self._run_part(part, ctx, block, own)
        folded = bool(len(result) and not np.array_equal(result.keys, keys[result.lineage.owners(len(result))]))
        return _merged(block, own, _Outputs.of(result, [values[i] for i in own], folded), self.slot)

    def _run_part(self, part: Block, ctx: Context, block: Block, own: list[int]) -> Block:
        if ctx.watch is None:
            return self.inner.run(part, ctx)
        watch, lineage = ctx.watch, block.lineage
        watched = replace(ctx, watch=lambda item: watch(lineage.input_of(own[item])))
        result = self.inner.run(part, watched)
        ctx.retried = watched.retried
        return result


class CountChangingOnMisses(OnMisses):
    """An ``OnMisses`` stage that may change the number of items."""

    keeps_count = False


def _operand(item: Any, slot: int) -> Any:
    """Return the value of a zip's operand; any other item is the only operand."""
    return item.values[slot] if isinstance(item, Row) else item


def _with_operand(item: Any, slot: int, value: Any) -> Any:
    return item.with_value(slot, value) if isinstance(item, Row) else value


@dataclass(slots=True)
class _ItemOrigin:
    """The origin of the misses of a block: each of them is an input."""

    block: Block
    own: list[int]
    operand: int

    def _input(self, number: int) -> int:
        return self.block.lineage.input_of(self.own[number])

    def cursor(self, done: int, sub: int) -> Any:
        raise AssertionError("a part of a block has no cursor")

    def place(self, number: int) -> Place:
        origin = self.block.lineage.origin
        return (
            origin.slot(self.operand).place(self._input(number)) if self.operand else origin.place(self._input(number))
        )

    def slot(self, number: int) -> Slot:
        raise AssertionError("a part of a block has one operand")

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        raise AssertionError("a part of a block is not traced")


@dataclass(slots=True)
class _Outputs:
    """What a stage made of misses.

    Attributes:
        items: The outputs of each miss, as misses, or that it is gone.
        skips: The misses that failed and were skipped; ``input`` is the number of the miss.
        error: What ended the block, at the miss after the last of ``items``, or at the last one.
        stopped: The number of the miss that failed with ``error``.
    """

    items: list[list[Miss | Gone]]
    skips: tuple[Skipped, ...]
    error: Exception | None
    stopped: int

    @staticmethod
    def of(result: Block, misses: list[Miss], folded: bool) -> _Outputs:
        lineage = result.lineage
        failed = {skip.input for skip in lineage.skips}
        stopped = len(misses) if lineage.error is None else lineage.inputs
        failed.add(stopped)
        rows: list[list[int]] = [[] for _ in misses]
        for item, owner in enumerate(lineage.owners(len(result.items)).tolist()):
            rows[owner].append(item)
        items: list[list[Miss | Gone]] = []
        for number, (miss, own) in enumerate(zip(misses[: stopped + 1], rows, strict=False)):
            share = 0 if number in failed else miss.share
            if not own and number not in failed:
                items.append([Gone(miss.leaf, miss.store, miss.number, share)])
            elif folded:
                shares = share if len(own) < 2 else Fraction(share) / len(own)
                items.append(
                    [
                        miss._replace(
                            value=result.items[i], key=int(result.keys[i]), path=(*miss.path, n), share=shares
                        )
                        for n, i in enumerate(own)
                    ]
                )
            else:
                items.append([miss._replace(value=result.items[i], share=share) for i in own])
        return _Outputs(items, lineage.skips, lineage.error, stopped)


def _merged(block: Block, own: list[int], outputs: _Outputs, slot: int) -> Block:
    """Return the block with its items ``own`` replaced by their outputs."""
    indices: list[int] = []
    items: list[Any] = []
    following = iter(zip(own, outputs.items, strict=False))
    at, found = next(following, (-1, []))
    last = len(block.items) if outputs.error is None else own[outputs.stopped]
    for number, item in enumerate(block.items[: last + 1]):
        if number == at:
            items += (_with_operand(item, slot, output) for output in found)
            indices += [number] * len(found)
            at, found = next(following, (-1, []))
        elif number != last:
            items.append(item)
            indices.append(number)
    merged = block.keep(indices, items)
    inputs = (skip._replace(input=block.lineage.input_of(own[skip.input])) for skip in outputs.skips)
    merged.lineage = merged.lineage.with_skips(*inputs)
    if outputs.error is not None:
        until = block.lineage.input_of(own[outputs.stopped])
        merged.lineage = merged.lineage.until(until, outputs.error)
    return merged


@dataclass(frozen=True)
class KeepResults(Stage):
    """The end of the cached stages: writes the outputs of misses to the cache, and reads those of hits."""

    cache: CacheResults
    leaves: range
    slot: int

    @property
    def name(self) -> str:
        return "cache"

    def describe(self) -> str:
        return self.cache.describe()

    def run(self, block: Block, ctx: Context) -> Block:
        values = [_operand(item, self.slot) for item in block.items]
        inputs = block.lineage.owners(len(values)).tolist()
        try:
            self._write(zip(inputs, values, strict=True))
        except NotStorable as exc:
            advice = "convert it to an array, bytes, text or numbers, or put cache() before the stage that makes it"
            block.lineage = block.lineage.until(0, PlanError(f"{self.describe()}: {exc}; {advice}"))
            return block.keep([], [])
        indices: list[int] = []
        items: list[Any] = []
        paths: list[tuple[int, ...]] = []
        for number, (item, value) in enumerate(zip(block.items, values, strict=True)):
            for path, output in self._outputs(value):
                items.append(_with_operand(item, self.slot, output))
                indices.append(number)
                paths.append(path)
        return _with_paths(block.keep(indices, items), paths)

    def _outputs(self, value: Any) -> Sequence[Output]:
        """Return the outputs that an item stands for."""
        if not isinstance(value, Hit | Miss | Gone) or value.leaf not in self.leaves:
            return [((), value)]
        if isinstance(value, Hit):
            return decode_outputs(value.record)
        return [] if isinstance(value, Gone) else [(value.path, value.value)]

    def _write(self, values: Iterable[tuple[int, Any]]) -> None:
        """Write the outputs of all samples that came here completely; each value has the number of its input."""
        shares: dict[tuple[int, str, int], Fraction | int] = {}
        outputs: dict[tuple[int, str, int], list[Output]] = {}
        for row, value in values:
            if isinstance(value, Miss | Gone) and value.leaf in self.leaves:
                sample = row, value.store, value.number
                shares[sample] = shares.get(sample, 0) + value.share
                found = outputs.setdefault(sample, [])
                if isinstance(value, Miss):
                    found.append((value.path, value.value))
        records: dict[str, dict[int, bytes]] = {}
        for sample, found in outputs.items():
            if shares[sample] == 1:
                _, store, number = sample
                records.setdefault(store, {})[number] = encode_outputs(found)
        for store, encoded in records.items():
            record_store(store).add(list(encoded.items()))


class CountChangingKeepResults(KeepResults):
    """A ``KeepResults`` stage after stages that may change the number of items."""

    keeps_count = False


def _with_paths(block: Block, paths: list[tuple[int, ...]]) -> Block:
    """Return the block with the keys that the outputs of each flat_map have."""
    depth = max(map(len, paths), default=0)
    for level in range(depth):
        rows = np.array([i for i, path in enumerate(paths) if len(path) > level])
        numbers = np.array([paths[i][level] for i in rows.tolist()], np.int64)
        block.keys[rows] = fold_into(block.keys[rows], numbers)
    return block
