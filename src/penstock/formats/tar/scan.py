"""Headers to an index: one walk over the headers of a shard, and the index at hand where there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from penstock.blobs.compression import LIMITS, ArchiveLimits
from penstock.blobs.content import Buffer, Content, open_content
from penstock.blobs.stamp import Stamp
from penstock.errors import StorageError
from penstock.formats.tar.archive import (
    BLOCK,
    MAX_PADDING,
    Extensions,
    Halt,
    Member,
    checksum_holds,
    compression_of,
    header_name,
    matters,
    overpadded,
    padded,
    step,
    trailing,
)
from penstock.formats.tar.grouper import END, GAP, Entry, Grouper
from penstock.formats.tar.index import (
    I64,
    Index,
    IndexBuilder,
    read_beside,
    read_cached,
    write_cached,
)

U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

_AHEAD = 512  # headers tested together: a quarter of a megabyte, which stays in the processor's cache
_CALM = 3  # ordinary steps in a row before the next leap: a leap over nothing costs as much as ten steps
_RESYNC_BLOCKS = (1 << 30) // BLOCK  # after a damage, the next header is looked for within a gigabyte
_DENSE = 4  # blocks a member, up to which reading all blocks is quicker than stepping from one to the next
_DIGITS = 8 ** np.arange(5, -1, -1)
_SIZE_DIGITS = 8.0 ** np.arange(10, -1, -1)


def load_index(path: str, *, expected: int | None = None, shard: str | None = None) -> Index:
    """Give the index of the shard at ``path``: the one beside it, the one kept from last time, or a new scan.

    Args:
        path: A local file.
        expected: How many samples the manifest says there are. Missing ones become bad entries.
        shard: What to call the shard in errors; its path by default.

    Raises:
        StorageError: The file cannot be read.
        MissingExtra: It is compressed by zstd and there is no zstandard.
    """
    return open_shard(path, expected=expected, shard=shard, mapped=False)[0]


def open_shard(
    path: str,
    *,
    expected: int | None = None,
    shard: str | None = None,
    mapped: bool = True,
    limits: ArchiveLimits = LIMITS,
    known: Index | None = None,
) -> tuple[Index, Content | None]:
    """Give the index of a shard and (``mapped``) its content; a compressed one is unpacked at most once.

    ``known`` is its index from a moment ago, taken if the file is still the same.

    Raises:
        StorageError: The file cannot be read.
        MissingExtra: It is compressed by zstd and there is no zstandard.
    """
    name = shard or path
    try:
        stamp = Stamp.of(os.stat(path))
    except OSError as exc:
        raise StorageError(f"cannot read the shard: {exc.strerror or exc}", name) from exc
    known = known if known is not None and known.stamp == stamp else None
    beside = read_beside(path) if known is None else None
    index = known or beside
    if known is None and (beside is None or (beside.stamp.size, beside.stamp.mtime_ns) != (stamp.size, stamp.mtime_ns)):
        index = read_cached(path, stamp)
    content = open_archive(path, name, limits) if mapped or index is None else None
    if content is not None and (index is None or len(content.bytes) != index.content_size):
        index = scan(content.buffer, content.problem).stamped(stamp)
        write_cached(path, index)
    assert index is not None
    if beside is not None:
        index = index.expecting(beside.samples, "the index beside it")
    return index.expecting(expected, "the manifest"), content


def open_archive(path: str, shard: str, limits: ArchiveLimits = LIMITS) -> Content:
    """Map the archive at ``path``, decompressed.

    Raises:
        StorageError: The file cannot be read, or the temporary file cannot be written.
        MissingExtra: It is compressed by zstd and zstandard is not installed.
    """
    return open_content(path, shard, limits, compression_of)


def scan(content: Buffer, problem: str | None = None) -> Index:
    """Make the index of an archive from its headers.

    Args:
        content: The whole archive, uncompressed.
        problem: Why there is no more of it, where that is known.
    """
    walk = _Walk(content)
    samples = _Samples()
    extensions = Extensions()
    calm = _CALM
    while True:
        if calm >= _CALM:
            calm = 0
            for leap in walk.leaps():
                samples.push_all(*leap)
        item = step(walk, extensions)
        calm = calm + 1 if item is not None and not extensions.pending else 0
        if isinstance(item, Halt):
            if item.problem is None:
                for trouble in walk.behind_end(extensions, problem):
                    samples.push(*trouble)
                break
            samples.push(GAP, 0, item.problem if item.goes_on else problem or item.problem)
            extensions.forget()
            if not item.goes_on or not walk.resync():
                break
        elif item is not None:
            samples.push(*item)
    return samples.index(walk)


class _Samples:
    """The samples of a shard as they are found, on their way to an index."""

    def __init__(self) -> None:
        self._grouper: Grouper[int] = Grouper()
        self._builder = IndexBuilder()
        self._rows: list[int] = []

    def push(self, name: bytes, row: int, trouble: str | None = None) -> None:
        """Take one member, or a loss."""
        self._add(self._grouper.push(name, row, trouble))

    def push_all(self, names: list[bytes], base: int, skipped: int) -> None:
        """Take members that lie in neighbouring rows of the table, mostly by runs of samples alike."""
        self._grouper.skipped += skipped
        rows = range(base, base + len(names))
        at = 0
        while at < len(names):
            run = self._grouper.run(names, rows, at)
            if run is None:
                self.push(names[at], rows[at])
                at += 1
                continue
            keys, kind, taken = run
            self._builder.add_all(keys, kind)
            self._rows += taken
            at += len(keys) * len(kind)

    def index(self, walk: _Walk) -> Index:
        """Give the index of all samples."""
        self._add(self._grouper.finish())
        start, size = walk.table()
        rows = np.array(self._rows, np.int64)
        return self._builder.build(start[rows], size[rows], self._grouper.skipped, walk.total)

    def _add(self, entries: list[Entry[int]]) -> None:
        for key, kind, rows, trouble, lost in entries:
            if trouble is None:
                self._builder.add(key, kind)
                self._rows += rows
            else:
                self._builder.add_bad(key, trouble, lost)


class _Walk:
    """The way from header to header. ``leaps`` take many ordinary members at once, ``step`` anything else."""

    def __init__(self, content: Buffer) -> None:
        self._content, self.total = content, len(content)
        blocks = self.total // BLOCK
        self._blocks: U8 = np.frombuffer(content, np.uint8, blocks * BLOCK).reshape(blocks, BLOCK)
        self._heads = np.empty((_AHEAD, BLOCK), np.uint8)
        self._ahead = 16
        self._dense = False
        self._pattern: I64 | None = None  # blocks of the members to come, where they repeat themselves
        self._starts: list[I64] = []
        self._sizes: list[I64] = []
        self._members = 0
        self.offset = 0

    def table(self) -> tuple[I64, I64]:
        """Give where the bytes of members begin and how many they are, by row."""
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *self._starts]), np.concatenate([none, *self._sizes])

    def take(self, size: int) -> bytes:
        """Give the next bytes; fewer where the archive ends."""
        found = self._content[self.offset : self.offset + size]
        self.offset += len(found)
        return found

    def value(self, size: int, name: bytes) -> int | None:
        """Step over the bytes of a member; its row in the table stands for it."""
        start = self.offset
        if start + size > self.total:
            self.offset = self.total
            return None
        self.offset = min(start + padded(size), self.total)
        return self._listed(np.array([start]), np.array([size]))

    def _listed(self, starts: I64, sizes: I64) -> int:
        self._starts.append(starts)
        self._sizes.append(sizes)
        self._members += len(starts)
        return self._members - len(starts)

    def leaps(self) -> Iterator[tuple[list[bytes], int, int]]:
        """Go over ordinary members, up to the first header that needs a closer look.

        Yields:
            Names of members, the row of the first, and how many headers between them are of no interest.
        """
        whole = True
        while whole:
            offsets, sizes = self._guessed()
            if not len(offsets):
                return
            heads = self._heads[: len(offsets)]
            np.take(self._blocks, offsets // BLOCK, axis=0, out=heads, mode="clip")
            member, idle = self._sorted(heads, offsets, sizes)
            fine = member | idle
            whole = bool(fine.all())
            good = len(fine) if whole else int(fine.argmin())
            self._ahead = min(self._ahead * 2, _AHEAD) if whole else 16
            if not good:
                return
            self._dense = int(offsets[good - 1] - offsets[0]) <= good * _DENSE * BLOCK
            if not whole or self._pattern is None:
                self._pattern = _repeating(sizes[:good]) if self._dense else None
            self.offset = min(int(offsets[good - 1]) + BLOCK + padded(int(sizes[good - 1])), self.total)
            chosen = slice(good) if member[:good].all() else np.flatnonzero(member[:good])
            base = self._listed(offsets[chosen] + BLOCK, sizes[chosen])
            folders = idle[:good] & (heads[:good, 156] == ord("5"))
            yield _names(heads[chosen]), base, int(folders.sum())

    def _guessed(self) -> tuple[I64, I64]:
        """Walk on as if all members were ordinary; the guess is tested afterwards, for all together."""
        if self._pattern is not None:
            return self._guessed_alike(self._pattern)
        if self._dense:
            return self._guessed_densely()
        offsets: list[int] = []
        sizes: list[int] = []
        content, offset = self._content, self.offset
        try:
            for _ in range(self._ahead):
                size = int(content[offset + 124 : offset + 135], 8)
                if size < 0:
                    break
                offsets.append(offset)
                sizes.append(size)
                offset += BLOCK + ((size + 511) & -512)
        except ValueError:
            pass  # an end marker, another kind of number, or no header at all: step() will tell
        if offsets and offsets[-1] + BLOCK > self.total:
            offsets.pop()
        return np.array(offsets, np.int64), np.array(sizes[: len(offsets)], np.int64)

    def _guessed_alike(self, pattern: I64) -> tuple[I64, I64]:
        """Walk like ``_guessed`` where sizes repeat themselves: all at once, up to the first that is another."""
        steps = np.tile(pattern, -(-self._ahead // len(pattern)))
        places = self.offset // BLOCK + np.cumsum(steps) - steps
        places = places[places < len(self._blocks)]
        digits = self._blocks[places, 124:135] - np.uint8(48)
        sizes = (digits.astype(np.float64) @ _SIZE_DIGITS).astype(np.int64)
        fine: Bools = np.all(digits <= 7, axis=1)
        alike = fine & (_blocks_of(sizes) == steps[: len(places)])
        good = len(places) if alike.all() else int(alike.argmin())
        good += good < len(places) and bool(fine[good])  # the other one is where it should be; what follows is not
        return places[:good] * BLOCK, sizes[:good]

    def _guessed_densely(self) -> tuple[I64, I64]:
        """Walk like ``_guessed`` where headers are close: read every block's size as if it were a header."""
        at = self.offset // BLOCK
        digits = np.ascontiguousarray(self._blocks[at : at + self._ahead * _DENSE, 124:135]) - np.uint8(48)
        sizes = (digits.astype(np.float64) @ _SIZE_DIGITS).astype(np.int64)
        after = np.arange(1, len(sizes) + 1) + (sizes + BLOCK - 1) // BLOCK
        after[(digits > 7).any(axis=1)] = -1
        following = after.tolist()
        places: list[int] = []
        place = 0
        while place < len(following) and len(places) < self._ahead and following[place] > 0:
            places.append(place)
            place = following[place]
        chosen = np.array(places, np.int64)
        return (chosen + at) * BLOCK, sizes[chosen]

    def _sorted(self, heads: U8, offsets: I64, sizes: I64) -> tuple[Bools, Bools]:
        """Tell which headers are of ordinary members, and which are fine but of no interest."""
        kinds = heads[:, 156]
        fine = checksums_hold(heads) & (heads[:, 135] < 33) & (offsets + BLOCK + sizes <= self.total)
        member = fine & ((kinds == ord("0")) | (kinds == 0))
        idle = fine & (kinds == ord("5")) & (sizes == 0)
        records = np.flatnonzero(fine & (kinds == ord("x")) & (sizes <= BLOCK))
        if len(records):
            bodies = self._blocks[np.minimum(offsets[records] // BLOCK + 1, len(self._blocks) - 1)]
            idle[records] = [not matters(body) for body in bodies.view(f"S{BLOCK}").ravel().tolist()]
        return member, idle

    def behind_end(self, extensions: Extensions, problem: str | None) -> Iterator[Member[int]]:
        """Tell what is wrong behind the end marker, if anything."""
        offset = self.offset - BLOCK
        if problem:
            yield END, 0, problem
        elif extensions.orphaned:
            yield GAP, 0, f"an extension header has no member at offset {offset}"
        stride = 1 << 20
        for at in range(self.offset, min(self.total, self.offset + MAX_PADDING), stride):
            if self._content[at : at + stride].strip(b"\0"):
                yield END, 0, trailing(offset)
                return
        if self.total - self.offset > MAX_PADDING:
            yield END, 0, overpadded(offset)

    def resync(self) -> bool:
        """Go on to the next good header; the search widens, so that near ones are found cheaply."""
        at, width = -(-self.offset // BLOCK), 16
        stop = min(len(self._blocks), at + _RESYNC_BLOCKS)
        while at < stop:
            holds = checksums_hold(self._blocks[at : min(at + width, stop)])
            if holds.any():
                self.offset = (at + int(holds.argmax())) * BLOCK
                return True
            at += width
            width = min(width * 2, 1 << 14)
        return False


def _blocks_of(sizes: I64) -> I64:
    """How many blocks members of these sizes take with their headers."""
    return 1 + (sizes + BLOCK - 1) // BLOCK


def _repeating(sizes: I64) -> I64 | None:
    """The blocks that members take, where they repeat themselves every few members: what is to be expected next."""
    taken = _blocks_of(sizes)
    for period in range(1, 9):
        if len(taken) >= 4 * period and bool((taken[period:] == taken[:-period]).all()):
            return taken[-period:]
    return None


def _names(heads: U8) -> list[bytes]:
    """Read the paths of many headers at once, without a leading ``./``."""
    names: list[bytes] = np.ascontiguousarray(heads[:, :100]).view("S100").ravel().tolist()
    if b"\0" in b"".join(names):
        names = [name.partition(b"\0")[0] for name in names]
    for row in np.flatnonzero(heads[:, 345]).tolist():
        names[row] = header_name(heads[row].tobytes())
    if names and names[0].startswith(b"./"):
        names = [name.removeprefix(b"./") for name in names]
    return names


def checksums_hold(heads: U8) -> Bools:
    """Test the checksums of many header blocks at once."""
    own = heads[:, 148:156]
    total = heads.sum(axis=1, dtype=np.uint32).astype(np.int64) - own.sum(axis=1, dtype=np.int64) + 8 * 32
    digits = (own >= 48) & (own <= 55)
    declared = (own[:, :6].astype(np.int64) - 48) @ _DIGITS
    usual = digits[:, :6].all(axis=1) & (own[:, 6] == 0) & (own[:, 7] == 32)
    holds: Bools = usual & (declared == total)
    if not holds.all():
        unsure = ~holds & (digits[:, 0] | (own[:, 0] == 32))
        for row in np.flatnonzero(unsure).tolist():
            holds[row] = checksum_holds(heads[row].tobytes())
    return holds
