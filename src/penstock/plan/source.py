"""Sources, which engines read from: a source is a value, its reader is open, located samples are ready to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from penstock.errors import DataError
from penstock.plan.values import Fields, Resources

if TYPE_CHECKING:
    from penstock.order import I64  # imports numpy, which tools that only copy samples do not need


@dataclass(frozen=True, slots=True)
class Traits:
    """What an open source is like, as far as it matters to an engine; each trait is derived from all of its paths.

    Attributes:
        remote: Some samples are on other machines, so locating them takes time.
        in_memory: The samples are in the memory of this process, and pickling the reader copies them.
        sendable: A pickled reader reads the same samples in another process.
        columnar: Samples are read as columns, so that blocks may hold many of them.
        fields_vary: Only reading a sample tells its fields; ``Reader.fields`` returns those of the first samples.
        grows: Samples of a remote shard can be read in order before all of them are counted, see ``Reader.grow``.
        find_countable: Finds out whether all shards can be counted without fetching any of them whole; ``None``: yes.
        find_features: Finds the typed features of the fields; ``None``: there are none.
    """

    remote: bool = False
    in_memory: bool = False
    sendable: bool = True
    columnar: bool = False
    fields_vary: bool = False
    grows: bool = False
    find_countable: Callable[[], bool] | None = None
    find_features: Callable[[], Mapping[str, Any]] | None = None

    @property
    def countable(self) -> bool:
        """Whether all shards can be counted without fetching any of them whole; may fetch indexes to find out."""
        return self.find_countable is None or self.find_countable()

    @property
    def features(self) -> dict[str, Any]:
        """The typed features of the fields; may open files to find out."""
        return {} if self.find_features is None else dict(self.find_features())


class Located(Protocol):
    """Samples that are located but not read yet: cheap to create, to slice and to send to a worker."""

    @property
    def nbytes(self) -> I64:
        """The payload bytes of each sample."""

    def take(self, sel: Any) -> Located:
        """Return the selected samples."""

    def read(self) -> tuple[Sequence[Any], Mapping[int, DataError | None]]:
        """Return the samples, and the errors of those that cannot be read, by number (``None`` takes their place).

        A sample whose error is ``None`` was not read since a condition rejects it: it is dropped, and has not failed.
        """


class ShardCache(Protocol):
    """A cache through which the shards of a source are read."""

    def expect(self, find: Callable[[], tuple[Any, Any, Any] | None], *, whole: bool) -> None:
        """Learn when a run uses shards, and fetch ahead; see ``engines.upcoming`` for what ``find`` returns."""

    def advance(self, done: int) -> None:
        """Learn that the run has reached a position: what it used before is used again in the next epoch."""

    def dismiss(self) -> None:
        """Stop fetching ahead: the run has ended."""


class Reader(Protocol):
    """An open source. Its methods may be called from several threads."""

    names: list[str]  # the shards' names, relative to their common root

    @property
    def traits(self) -> Traits:
        """What the source is like."""
        return Traits()

    def counts(self, scan: bool) -> I64 | None:
        """Return the number of samples in each shard, or ``None`` if unknown; ``scan`` allows opening the shards."""

    def count(self, shard: int) -> int:
        """Return the number of samples in one shard, opening it if necessary."""
        counts = self.counts(scan=True)
        assert counts is not None
        return int(counts[shard])

    def recall(self) -> bool:
        """Return whether all counts are known from earlier work on this host, without fetching shards."""
        return self.counts(scan=False) is not None

    def grow(self, shard: int, beyond: int) -> tuple[int, bool]:
        """Return how many samples of a shard are known to be there, and whether these are all.

        Waits until more than ``beyond`` are known, or all. Called only for shards that are read in order.
        """
        return self.count(shard), True

    def expect(self, shards: Sequence[int], whole: bool) -> None:
        """Prepare to read shards, in this order; ``whole``: all of their counts will be asked for."""
        return None

    def sizes(self) -> list[int]:
        """Return the size of each shard in bytes; 0 where counts are always known, so that nothing needs sizes."""
        return [0] * len(self.names)

    def locate(self, shard: I64, index: I64, fields: Fields) -> Located:
        """Return the samples at (shard, index), located but not read."""

    def key(self, shard: int, index: int) -> str | None:
        """Return the key of one sample, for messages: its index, unless it has one."""
        return str(index)

    def url(self, shard: int) -> str:
        """Return the URL of a shard, for messages."""

    def objects(self, shard: int) -> list[str]:
        """Return the URLs of the files or objects that hold the samples of a shard."""
        return [self.url(shard)]

    def fields(self, shard: int) -> tuple[str, ...]:
        """Return the fields that samples of a shard have, except those named ``__like_this__``; empty if unknown."""
        return ()

    def cache(self) -> ShardCache | None:
        """Return the cache through which the shards are read, if there is one."""
        return None

    def suspend(self) -> None:
        """Stop background work, such as prefetching; the reader remains usable."""
        return None

    def stamp(self) -> object:
        """Return a cheap value that changes if opening the source again may find other shards; compared with ``==``."""
        return None


@runtime_checkable
class StreamReader(Protocol):
    """An open source that can be read only once, front to back."""

    @property
    def traits(self) -> Traits:
        """What the source is like."""
        return Traits()

    def stream(self, fields: Fields) -> Iterator[tuple[Any, DataError | None]]:
        """Yield the samples in order; one that cannot be read is ``None`` with its error."""


class Source(Protocol):
    """A source of samples: a value that can be opened as a reader."""

    __slots__ = ()

    @property
    def random_access(self) -> bool:
        """Whether random access is as cheap as sequential reading; a plain ``shuffle()`` then permutes everything."""
        return False

    @property
    def streams(self) -> bool:
        """Whether the source can be read only once, front to back: ``open`` returns a ``StreamReader``."""
        return False

    @property
    def computed(self) -> bool:
        """Whether opening the source runs another plan to its end."""
        return False

    @property
    def resources(self) -> Resources | None:
        """The resources for reading; ``None``: reading needs no pool of its own."""
        return None

    def open(self) -> Reader | StreamReader:
        """Open the source.

        Raises:
            StorageError: The source does not exist.
        """

    def describe(self) -> str:
        """Return the call that created the source."""
