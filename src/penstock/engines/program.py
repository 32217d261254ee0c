"""A program: a plan ready to run, with open sources, the orders of its epochs, and levels of fused stages."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from penstock.engines.cached.located import LeafCache
from penstock.engines.cached.stages import cached_body, cached_chains
from penstock.engines.cursor import Start
from penstock.engines.quarantine import Quarantine, read_identities
from penstock.engines.read_stage import Finder
from penstock.engines.segments import DEFAULT_RESOURCES, Segment, build_levels
from penstock.errors import DataError, PlanError, StorageError
from penstock.lazy import cached_property
from penstock.order import ENDLESS, Order, Piece, Refs, ShardOrder, UncountedOrder, head, name_hash, tail, total
from penstock.plan import (
    Arrangement,
    Context,
    Cut,
    Fields,
    Identity,
    PlacedStage,
    Plan,
    Reader,
    Recut,
    Scope,
    ShardCache,
    Stage,
    StreamReader,
    arrange,
    no_field,
    resolved,
)

log = logging.getLogger("penstock")

_SEARCHED_SHARDS = 64  # remote ones in which a field that a stage names is looked for


class Program:
    """A plan that is ready to run; its sources are opened when they are first needed."""

    def __init__(
        self, plan: Plan, *, shared: bool = False, fetches_counts: bool = True, read_in_pool: bool = False
    ) -> None:
        """Arrange the stages of ``plan`` and of its branches in one pipeline, without opening the sources.

        Args:
            plan: The plan.
            shared: Several processes run parts of one rank, and must agree on the order.
            fetches_counts: Remote shards whose counts are asked for, and are not known, are fetched for that.
            read_in_pool: A pool reads the samples even if no stage needs one.
        """
        self.plan = plan
        self._shared, self._fetches_counts = shared, fetches_counts
        self.arrangement: Arrangement
        self._resolved = resolved(plan, read_identities)  # once: files given to exclude() may grow during a run
        self.arrangement, self._counted_order = arrange(self._resolved, self._leaf_order)
        leaves = self.arrangement.leaves
        self.fields: list[Fields] = [self.arrangement.fields(leaf) for leaf in range(len(leaves))]
        self._identities: dict[bool, str] = {}
        self.caches: list[ShardCache] = []  # that a run has told what it will use
        readings = {leaf.resources for leaf in leaves}
        reading = readings.pop() if len(readings) == 1 else None
        reading = reading or (DEFAULT_RESOURCES if read_in_pool else None)
        self.levels = build_levels(cached_body(self.arrangement), reading)

    @cached_property
    def opened(self) -> list[Reader | StreamReader]:
        """The readers of all sources, opened by the first use.

        Raises:
            StorageError: A source does not exist or cannot be read.
        """
        return [leaf.open() for leaf in self.arrangement.leaves]

    @cached_property
    def columnar(self) -> bool:
        """Whether all sources yield columns, so that blocks may hold many samples."""
        return all(reader.traits.columnar for reader in self.opened)

    @cached_property
    def remote(self) -> bool:
        """Whether a source is remote, so that locating samples takes time."""
        return any(reader.traits.remote for reader in self.readers)

    @property
    def largest_call(self) -> int:
        """The largest number of rows that a stage on single items processes in one call."""
        stages = (placed.stage for placed in self.arrangement.body)
        return max((stage.group_size or 1 for stage in stages if stage.scope is Scope.EACH), default=1)

    def suspend(self) -> None:
        """Stop the sources' background work, such as prefetching; they remain usable."""
        if "opened" in self.__dict__ and self.stream is None:
            for reader in self.readers:
                reader.suspend()

    def for_one_run(self) -> Program:
        """Return the program with remote readers of its own, so that runs do not stop each other's prefetching.

        The copy has the segments of the original; without remote sources it is the program itself.
        """
        if self.stream is not None or not self.remote:
            return self
        own = copy.copy(self)
        own.__dict__.pop("finder", None)
        own.opened = [copy.copy(reader) if reader.traits.remote else reader for reader in self.readers]
        return own

    def shard_names(self) -> list[list[str]]:
        """Return the names of the shards of each source."""
        return [reader.names for reader in self.readers]

    def stamp(self) -> object:
        """Return a value that changes if opening the sources again may find other shards."""
        return [] if self.stream is not None else [reader.stamp() for reader in self.readers]

    @cached_property
    def stream(self) -> StreamReader | None:
        """The source, if it can only be read once, front to back; otherwise None.

        Raises:
            PlanError: The plan shuffles, cuts, repeats or combines such a source.
        """
        if not any(leaf.streams for leaf in self.arrangement.leaves):
            return None
        slices = all(stage.bounds is not None for stage in self.plan.ordering)
        if len(self.opened) > 1 or not slices or self.plan.cut is not None:
            raise PlanError(
                f"{self.arrangement.leaves[0].describe()} is read once, front to back: it cannot be shuffled, cut, "
                "repeated or combined; store what it reads first"
            )
        reader = self.opened[0]
        assert isinstance(reader, StreamReader)
        return reader

    @cached_property
    def quarantine(self) -> Quarantine | None:
        """The file that lists failed samples, if the plan has one.

        Raises:
            StorageError: The file cannot be written.
        """
        path = self.plan.errors.quarantine
        return None if path is None else Quarantine(path)

    @property
    def readers(self) -> list[Reader]:
        """The readers of all sources, all with random access.

        Raises:
            PlanError: A source is a stream.
        """
        if self.stream is not None:
            raise PlanError("a stream has no length, no positions and no state; write it to a file first")
        return self.opened  # type: ignore[return-value]

    @cached_property
    def _hashes(self) -> list[np.ndarray[Any, np.dtype[np.uint64]]]:
        return [np.array([name_hash(name) for name in reader.names], np.uint64) for reader in self.readers]

    @cached_property
    def _base_hashes(self) -> list[np.ndarray[Any, np.dtype[np.uint64]]]:
        bases = [[name.rpartition("/")[2].partition("#")[0] for name in reader.names] for reader in self.readers]
        return [np.array([name_hash(base) for base in names], np.uint64) for names in bases]

    def _leaf_order(self, leaf: int, seed: int, epoch: int) -> Order:
        counts = self.readers[leaf].counts(scan=True)
        if counts is None:
            source = self.arrangement.leaves[leaf].describe()
            raise PlanError(f"{source}: the counts of its shards are unknown; run `penstock index` on the shards first")
        return ShardOrder(self._hashes[leaf], counts, leaf, seed, epoch, self._base_hashes[leaf])

    def _uncounted_order(self, epoch: int) -> UncountedOrder | None:
        """Return the order for shards without counts; None if a stage needs the counts."""
        stages = [stage for stage in self.plan.ordering if not stage.applies_per_rank]
        if len(stages) > 1 or len(self.arrangement.leaves) > 1:
            return None
        reader = self.readers[0]
        order = UncountedOrder(
            self._hashes[0], reader.count, 0, self.seed, epoch, grow=reader.grow, expect=reader.expect
        )
        return stages[0].without_counts(order) if stages else order

    def order(self, epoch: int, *, counts: bool = True, fetch: bool = True) -> Order:
        """Return the order of an epoch.

        Args:
            epoch: The number of the epoch.
            counts: Scan shards for their counts if that is cheap.
            fetch: Fetch remote shards for their counts, unless this program never does.

        Raises:
            PlanError: The plan needs counts, and they are unknown.
        """
        uncounted = self._uncounted_order(epoch)
        return self._counted_order(epoch) if uncounted is None or self._knows_counts(counts, fetch) else uncounted

    def _knows_counts(self, scan: bool, fetch: bool) -> bool:
        """Return whether the counts of the only source are known, or are found as far as that is allowed.

        What one host has found out by itself is used by a single rank only: others would cut the order differently.
        """
        reader = self.readers[0]
        if not scan:
            return reader.counts(scan=False) is not None
        lazy = reader.traits.remote and reader.traits.grows and not (fetch and self._fetches_counts)
        if lazy and not reader.traits.countable:
            return self.alone and reader.recall()
        return reader.counts(scan=True) is not None

    @property
    def alone(self) -> bool:
        """Whether this program runs on the only rank, in one process."""
        return not self._shared and (self.plan.cut is None or self.plan.cut.world == 1)

    @property
    def seed(self) -> int:
        """The seed of the plan; 0 by default."""
        return self.plan.seed or 0

    def start(self, order: Order, cut: Cut | None) -> Start:
        """Return the start of a rank's epoch; without a cut, of the only rank's.

        Raises:
            PlanError: Ranks must be equal, and counts are unknown.
        """
        cut = cut or Cut(0, 1)
        pieces = order.cut(order.whole(), cut.rank, cut.world, cut.kind)
        quota, padding = _quota(order, cut)
        for stage in self.plan.ordering:
            if stage.applies_per_rank and stage.bounds is not None:
                first, stop = stage.bounds
                pieces = tail(pieces, first) if stop is None else head(pieces, stop)
                if quota is not None:
                    quota = max(0, quota - first) if stop is None else min(quota, stop)
        return Start(pieces, quota=quota, pad=padding)

    def stream_start(self) -> Start:
        """Return the start of a run over a stream."""
        return Start([[0, ENDLESS, 1, 0]])

    @cached_property
    def finder(self) -> Finder:
        """The finder of samples in the open sources."""
        return Finder(self.readers, self.fields, self.arrangement.slots, self._caches())

    def _caches(self) -> dict[int, LeafCache]:
        """Return the caches of the sources whose results are cached."""
        body, out = self.arrangement.body, {}
        for chain in cached_chains(self.arrangement):
            for leaf in chain.leaves:
                source, seed, variants = (
                    self.arrangement.leaves[leaf],
                    self.arrangement.seeds[leaf],
                    chain.cache.variants,
                )
                others = [leaf, seed] if variants != 0 else None
                stages, version = chain.stages_of(leaf, body), chain.cache.version
                digest = chain.cache.digest(source, self.readers[leaf], stages, version, others)
                folder = os.path.join(os.path.abspath(chain.cache.folder), digest)
                out[leaf] = LeafCache(folder, leaf, seed, variants, self._hashes[leaf])
        return out

    def identities(self, order: Order, pieces: Iterable[Piece]) -> Iterator[Identity]:
        """Yield the identities of the samples at the positions of ``pieces`` in an order."""
        for start, stop, step, _ in pieces:
            refs = order.at(np.arange(start, stop, step, dtype=np.int64))
            for leaf, shard, index in zip(refs.leaf.tolist(), refs.shard.tolist(), refs.index.tolist(), strict=True):
                yield Identity(leaf, self.readers[leaf].names[shard], index)

    def check_fields(self, refs: Refs) -> bool:
        """Check that the fields which stages name exist, as far as that is known before the stages run; return True.

        Args:
            refs: The first samples. A field that none of their shards has is looked for in other shards too.

        Raises:
            PlanError: A stage names a field that no sample has; the message lists the fields there are.
        """
        shards = [refs.shard[refs.leaf == leaf] for leaf in range(len(self.readers))]
        first = {leaf: np.flatnonzero(np.bincount(numbers)).tolist() for leaf, numbers in enumerate(shards)}
        if self._field_problem(first):
            searched = {leaf: _searched(reader) for leaf, reader in enumerate(self.readers)}
            if problem := self._field_problem(searched):
                others = sum(
                    len(reader.names) - len(searched[leaf])
                    for leaf, reader in enumerate(self.readers)
                    if not reader.traits.columnar  # all shards of a table have the same fields
                )
                if not others:
                    raise PlanError(problem)
                log.warning("%s (%d remote shards were not searched)", problem, others)
        return True

    def _field_problem(self, shards: dict[int, list[int]]) -> str | None:
        """Return what is wrong with the first field that a stage names and no sample of these shards has."""
        if not any(placed.stage.for_leaf(leaf) for placed in self._naming for leaf in shards):
            return None
        names = {leaf: _names_in(self.readers[leaf], chosen) for leaf, chosen in shards.items()}
        for placed in self.arrangement.body:
            stages = {leaf: stage for leaf in names if (stage := placed.stage.for_leaf(leaf)) is not None}
            known = [names[leaf] for leaf in stages]
            present = frozenset[str]().union(*(some for some in known if some is not None))
            vary = any(self.readers[leaf].traits.fields_vary for leaf in stages)
            for leaf, stage in stages.items():
                judged = None not in known and present and (stage.optional_fields or not vary)
                for wanted in stage.named_fields if judged else ():
                    if not (present.intersection(wanted) or any(name.startswith("__") for name in wanted)):
                        return f"{stage.describe()}: {no_field(wanted, present)}"
                before = names[leaf]
                names[leaf] = None if before is None else stage.names_after(before)
        return None

    @cached_property
    def _naming(self) -> list[PlacedStage]:
        """The stages that name fields, of any branch."""
        leaves = range(len(self.arrangement.leaves))
        return [
            placed
            for placed in self.arrangement.body
            if any(stage.named_fields for leaf in leaves if (stage := placed.stage.for_leaf(leaf)) is not None)
        ]

    def contexts(self, segment: Segment, epoch: int) -> list[Context]:
        """Return new contexts for one worker of ``segment``."""
        return [self.context(placed, epoch) for placed in segment.stages]

    def context(self, placed: PlacedStage, epoch: int) -> Context:
        """Return a new context for one stage."""
        features = self.features(placed) if self._uses_features(placed.stage) else {}
        return Context(placed.number, self.seed, epoch, self.plan.errors.action == "skip", "cpu", features=features)

    def features(self, upto: PlacedStage | None = None) -> dict[str, Any]:
        """Return the typed features of the fields before stage ``upto``, or after the last stage.

        Raises:
            PlanError: Two sources declare different features for one field.
        """
        out: dict[str, Any] = {}
        for leaf in range(len(self.opened)):
            if upto is not None and upto.stage.for_leaf(leaf) is None:
                continue
            for name, feature in self._features_of(leaf, upto).items():
                if out.setdefault(name, feature) != feature and self.arrangement.slots == 1:
                    problem = f"field {name!r} is {out[name]} in one source and {feature} in another"
                    raise PlanError(f"{problem}: call decode() on each source before they are combined")
        return out

    def _features_of(self, leaf: int, upto: PlacedStage | None) -> dict[str, Any]:
        known = self.opened[leaf].traits.features
        for placed in self.arrangement.body:
            if placed is upto:
                break
            if (stage := placed.stage.for_leaf(leaf)) is not None:
                known = stage.features_after(known)
        return known

    def _uses_features(self, stage: Stage) -> bool:
        """Return whether a stage uses the features of the samples of any source."""
        stages = map(stage.for_leaf, range(len(self.arrangement.leaves)))
        return any(found is not None and found.uses_features for found in stages)

    @cached_property
    def window_level(self) -> int | None:
        """The level whose partly delivered group another rank can resume; None if there is none.

        It is a window of a late shuffle, or a batch of which a later stage makes several items.
        """
        heads = [level.head.stage for level in self.levels if level.head]
        if not heads or self.recut_problem is not None:
            return None
        in_parts = heads[0].recut is Recut.WINDOW or (heads[0].recut is Recut.REGROUP and self._whole_batches is None)
        return 1 if in_parts else None

    @property
    def _whole_batches(self) -> PlacedStage | None:
        """The stage that forms the last groups, if these are batches that are always delivered as a whole."""
        last = self.levels[-1]
        each = all(placed.stage.keeps_count for segment in last.segments for placed in segment.stages)
        return last.head if last.regroups and each else None

    @cached_property
    def recut_problem(self) -> str | None:
        """Why a state of this plan cannot be restored under another number of ranks; None if it can."""
        groups: list[Recut] = []
        for placed in self.arrangement.body:
            if placed.stage.scope is not Scope.EACH:
                groups.append(placed.stage.recut)
            if groups not in ([], [Recut.WINDOW], [Recut.REGROUP], [Recut.WINDOW, Recut.REGROUP]):
                stage = placed.stage.describe()
                return f"{stage} prevents this plan from being restored under another number of ranks"
        return None

    def identity(self, *, counts: bool) -> str:
        """Return a hash of the order and the stages that change the count; equal if states can be exchanged."""
        if counts not in self._identities:
            self._identities[counts] = self._identify(counts)
        return self._identities[counts]

    def _identify(self, counts: bool) -> str:
        leaves = []
        for reader in self.readers:
            known = reader.counts(scan=True) if counts else None
            leaves.append([reader.names, reader.sizes() if known is None else known.tolist()])
        text = json.dumps([leaves, _shape(self._resolved), self._kinds()], separators=(",", ":"), default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def _kinds(self) -> list[Any]:
        """Return what a state depends on besides the order.

        That is every group, unless it is a batch that is always delivered as a whole, so that the batch size may
        change; the kinds of stages that change the count; and which stages before these draw random numbers, because
        the numbers depend on the place of the stage.
        """
        body = [placed for placed in self.arrangement.body if placed is not self._whole_batches]
        kinds: list[Any] = []
        upto = 0
        for number, stage in enumerate(placed.stage for placed in body):
            if not stage.keeps_count or stage.scope is not Scope.EACH:
                kinds.append(stage.name if stage.scope is Scope.EACH else stage.describe())
                upto = number + 1
        random = [placed.number for placed in body[:upto] if placed.stage.wants_rng]
        return [*kinds, random] if random else kinds

    @property
    def endless(self) -> bool:
        """Whether an epoch never ends: ``repeat()`` without a limit."""
        limited = any(placed.stage.ends_stream for placed in self.arrangement.body)
        return self.stream is None and not limited and self.order(0, counts=False).size >= ENDLESS

    def check_finite(self) -> None:
        """Check that epochs end.

        Raises:
            PlanError: An epoch never ends.
        """
        if self.endless:
            raise PlanError("the dataset has no end: give repeat() a number, or add limit(n) after it")

    def length(self, cut: Cut | None) -> int | None:
        """Return how many items an epoch of one rank has; None if that is unknown without running or fetching it."""
        if self.remote and not all(reader.traits.countable or self._recalls(reader) for reader in self.readers):
            return None
        order = self.order(0)
        return self.items_from(order, self.start(order, cut))

    def _recalls(self, reader: Reader) -> bool:
        return self.alone and reader.recall()

    def items_from(self, order: Order, start: Start) -> int | None:
        """Return how many items a run delivers from ``start`` on; None if that is unknown, or if there is no end."""
        if not 0 <= order.size < ENDLESS:
            return None
        items: int | None = sum(total(part.pieces) for part in start.parts())
        level = 0
        for placed in self.arrangement.body:
            level += placed.stage.scope is not Scope.EACH
            seen = start.seen.get(level, 0) if placed is self.levels[level].head else 0
            before, after = placed.stage.length(seen), None if items is None else placed.stage.length(seen + items)
            items = None if before is None or after is None else after - before
            if items is not None and placed is self.levels[level].head:
                items -= start.groups.get(level, (0, 0))[0]  # outputs of a group that were delivered before
        return items


def _names_in(reader: Reader, shards: list[int]) -> frozenset[str] | None:
    """Return the fields of the samples in some shards; None if they are unknown."""
    try:
        names = [reader.fields(shard) for shard in shards]
    except (DataError, StorageError):  # reading the shard will report it
        return None
    if unnamed := [shard for shard, known in zip(shards, names, strict=True) if not known]:
        counts = reader.counts(scan=False)
        if counts is None or counts[unnamed].any():
            return None
    return frozenset(name for known in names for name in known)


def _searched(reader: Reader) -> list[int]:
    """Return the shards in which a field is looked for: all, or some that are evenly spread if opening them is slow."""
    count, traits = len(reader.names), reader.traits
    step = -(-count // _SEARCHED_SHARDS) or 1 if traits.remote or traits.columnar else 1
    return list(range(0, count, step))


def _quota(order: Order, cut: Cut) -> tuple[int | None, Piece | None]:
    """Return how many positions every rank gets if ranks must be equal, and the piece that is repeated as padding."""
    if cut.uneven == "keep":
        return None, None
    if isinstance(order, UncountedOrder):
        raise PlanError(
            f"uneven={cut.uneven!r} needs the counts of the shards: run `penstock index` on them, or use uneven='keep'"
        )
    if cut.uneven == "drop" or not order.size:
        return order.size // cut.world, None
    first = cut.rank % order.size
    return -(-order.size // cut.world), [first, first + 1, 1, 0]


def _shape(plan: Plan) -> list[Any]:
    """Return what determines the order of a plan, for its identity."""
    own: list[Any] = [stage.describe() for stage in plan.ordering]
    if branches := plan.branches():
        own.append([plan.source.describe(), [_shape(branch) for branch in branches]])
    return own
