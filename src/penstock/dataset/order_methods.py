"""Methods that add a stage on the order of samples to a plan: shuffles, parts, combinations, splits and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from secrets import token_hex
from typing import Any, Literal, Never, Self

from penstock import relations
from penstock.dataset.stage_methods import StageMethods, checked_seed
from penstock.errors import PlanError
from penstock.feed import this_worker
from penstock.plan import (
    Cut,
    Exclude,
    LateShuffle,
    Plan,
    Repeat,
    SharedStages,
    Shuffle,
    Slice,
    SplitBy,
    SplitSide,
    Stage,
    StreamLimit,
    StreamSkip,
    Union,
    Zip,
    check_branch,
    check_count,
    check_flag,
    chosen_from,
    exclusions,
    with_choice,
)
from penstock.plan.peer_names import check_arguments


class OrderMethods(StageMethods):
    """A plan whose order can be changed, combined and cut; positions are moved, never samples."""

    __slots__ = ()

    def shuffle(
        self,
        window: int | None = None,
        *,
        shards: int = 16,
        all: bool = False,
        seed: int | None = None,
        **unknown: Never,
    ) -> Self:
        """Shuffle the samples; every epoch has a different order.

        ``shards`` shards are read at a time, front to back, and their samples are permuted in windows of ``window``;
        ``all`` permutes the whole dataset. After ``flat_map``, ``unbatched`` or ``batched``, windows of the stream are
        permuted.

        Raises:
            PlanError: An argument is unknown or out of range.
        """
        check_arguments("shuffle", unknown, ("window", "shards", "all", "seed"))
        if window is not None:
            window = check_count("window", window, least=1)
        shards = check_count("shards", shards, least=1)
        check_flag("all", all)
        ds = self if seed is None else self.seed(seed)
        if self.plan.commutes and not any(stage.name == "flat_map" for stage in self.plan.body):
            everything = all or (window is None and ds.plan.source.random_access)
            return ds._then(Shuffle(window, shards, everything))
        if all:
            raise PlanError(
                f"shuffle(all=True) cannot come after {self._late_stage()}; put it before, or give a window"
            )
        return ds._then(LateShuffle(window or 1000))

    def _late_stage(self) -> str:
        """Return the call of the first stage that a shuffle does not commute with."""
        late = [s for s in self.plan.body if s.scope.value != "each" or s.name == "flat_map"]
        return late[0].describe()

    def limit(self, n: int) -> Self:
        """Keep the first ``n`` positions of the order; after a stage that changes the count, the first ``n`` items."""
        n = check_count("limit", n)
        if self.plan.keeps_count:
            return self._then(Slice(0, n, self.plan.cut is not None))
        return self._then_on_stream(StreamLimit(n))

    def skip(self, n: int) -> Self:
        """Skip the first ``n`` positions of the order; after a stage that changes the count, the first ``n`` items."""
        n = check_count("skip", n)
        if self.plan.keeps_count:
            return self._then(Slice(n, None, self.plan.cut is not None))
        return self._then_on_stream(StreamSkip(n))

    def _then_on_stream(self, stage: Stage) -> Self:
        if self.plan.cut is not None and self.plan.cut.world > 1:
            raise PlanError(f"{stage.describe()} counts the whole stream, which is cut for {self.plan.cut.world} ranks")
        return self._then(stage)

    def repeat(self, n: int | None = None) -> Self:
        """Repeat the dataset ``n`` times per epoch, each pass with its own order; ``None`` repeats forever."""
        if n is not None:
            n = check_count("repeat", n, least=1)
        if not self.plan.commutes:
            raise PlanError("repeat() cannot come after a stage that joins samples; put it before")
        return self._then(Repeat(n))

    def union(self, *others: Self) -> Self:
        """Concatenate this dataset and the others, in this order."""
        return self._combined(Union, "union", others)

    def zip(self, other: Self, strict: bool = True, *, suffix: str | None = None) -> Self:
        """Pair samples by position and merge their fields; ``suffix`` renames fields of ``other`` that both have."""
        if isinstance(strict, StageMethods):
            raise PlanError("zip pairs two datasets: for more, write a.zip(b).zip(c)")
        return self._combined(Zip, "zip", (other,), strict=strict, suffix=suffix)

    def _combined(self, kind: Any, name: str, others: Sequence[Self], **options: Any) -> Self:
        operands = [self, *others]
        for ds in operands:
            if not isinstance(ds, StageMethods):
                raise PlanError(f"{name} needs a Dataset, not {type(ds).__name__}")
            check_branch(ds.plan, name)
        plan = self.plan
        branches = tuple(ds.plan.as_branch() for ds in operands)
        return self._with(Plan(kind(branches, **options), (), plan.seed, plan.epoch, None, plan.errors, plan.engine))

    def train_test_split(
        self,
        test_size: float = 0.2,
        shuffle: bool = True,
        seed: int | None = None,
        by: str | None = None,
        stratify: str | None = None,
    ) -> tuple[Self, Self]:
        """Split the samples into (train, test), the same way in every epoch and run.

        Args:
            test_size: The share of samples in test, between 0 and 1.
            shuffle: Choose by a hash within each shard, so that adding shards moves no sample to the other side; False
                takes the end of the order as test.
            seed: Selects another split; independent of the seed of the run.
            by: A field to hash instead, so that samples with the same value stay together.
            stratify: A field; each of its values has the same share in test. The field of all samples is read once,
                when a side is first used.

        Raises:
            PlanError: ``test_size`` is not a share, arguments contradict each other, or an earlier stage joins samples.
        """
        check_flag("shuffle", shuffle)
        for name, field in (("by", by), ("stratify", stratify)):
            if field is not None and not (isinstance(field, str) and field):
                raise PlanError(f"{name}={field!r}: give the name of a field")
        seed = 0 if seed is None else checked_seed(seed)
        if (by is not None) + (stratify is not None) + (not shuffle) > 1:
            raise PlanError("by=, stratify= and shuffle=False are different ways to split; give one of them")
        if not isinstance(test_size, Real) or not 0 < test_size < 1:
            raise PlanError(f"test_size={test_size!r}: give a share between 0 and 1")
        test_size = float(test_size)
        if not self.plan.commutes:
            raise PlanError("train_test_split() cannot come after a stage that joins samples; put it before")
        if by is not None:
            sides = [SplitBy(by, test_size, seed, side) for side in (False, True)]
            return self._then(sides[0]), self._then(sides[1])
        choices: list[SplitSide | Exclude]
        if stratify is not None:
            call = f"train_test_split(test_size={test_size}, stratify={stratify!r})"
            strata = relations.Strata(chosen_from(self.plan), stratify, test_size, seed)
            choices = [relations.Stratified((), strata=strata, test=side, call=call) for side in (False, True)]
        else:
            choices = [SplitSide(test_size, seed, side, not shuffle) for side in (False, True)]
        train, test = (self._with(with_choice(self.plan, choice)) for choice in choices)
        return train, test

    def exclude(self, *samples: Any) -> Self:
        """Remove samples from the order.

        ``samples`` are files written by ``on_error("skip", quarantine=...)``, identities, lists of identities, or
        ``loader.skipped``. An identity is ``(source, shard, index)``: the number of the source in this dataset, the
        name of the shard relative to the dataset's folder, and the number of the sample in the shard. Files are read
        when the dataset is used. Samples are removed before any shuffle and repeat, wherever ``exclude`` is called, and
        after a limit, skip or split. Identities that are not in the dataset are ignored with a warning.

        Raises:
            PlanError: An argument does not name a sample, or a file is also this dataset's quarantine.
        """
        return self._with(with_choice(self.plan, Exclude(exclusions(samples))))

    def shard(
        self,
        rank: int,
        world: int,
        cut: Literal["range", "step"] = "range",
        uneven: Literal["keep", "drop", "pad"] = "keep",
    ) -> Self:
        """Keep one rank's share of the order, wherever ``shard`` is called among the stages.

        If it is called in a DataLoader worker, the share belongs to that worker and is not divided among workers again.

        Raises:
            PlanError: The plan is already cut, a stage needs the whole stream, or ``rank`` is not below ``world``.
        """
        return self._with(self.plan.shard(Cut(rank, world, cut, uneven, this_worker() is not None)))

    def split(self, n: int, equal: bool = False, **unknown: Never) -> list[Self]:
        """Cut the dataset into ``n`` disjoint ones that can be pickled; ``equal`` drops at most n-1 samples.

        On Ray, the parts share one set of workers for the stages before the split, wherever each part is read.
        """
        check_arguments("split", unknown, ("n", "equal"))
        n = check_count("split", n, least=1)
        uneven: Literal["drop", "keep"] = "drop" if check_flag("equal", equal) else "keep"
        shared = SharedStages(token_hex(8), len(self.plan.body))
        in_worker = this_worker() is not None
        cuts = [Cut(rank, n, "range", uneven, in_worker, shared) for rank in range(n)]
        return [self._with(self.plan.shard(cut)) for cut in cuts]

    streaming_split = split
