"""Get the index of a shard to read: load it from beside the shard or from the cache, else scan the headers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.blobs.compression import LIMITS, ArchiveLimits
from penstock.blobs.content import Content, open_content
from penstock.blobs.remote_bytes import Buffer, RemoteBytes, Window
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
    excess_padding,
    has_relevant_records,
    header_name,
    orphaned_extension,
    padded,
    read_member,
    trailing_bytes,
)
from penstock.formats.tar.grouper import BAD_END, LOST_RANGE, Grouper, SampleEntry
from penstock.formats.tar.index import (
    I64,
    Index,
    IndexBuilder,
    read_beside,
    read_cached_index,
    write_cached_index,
)

U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

_MAX_HEADERS = 512  # headers tested together: a quarter of a megabyte, which stays in the processor's cache
_MIN_HEADERS = 16  # in the first batch, and in the next after one that held anything unusual
_STEPS_BEFORE_BATCH = 3  # ordinary members in a row before the next batch: an empty batch costs as much as ten steps
_RESYNC_BLOCKS = (1 << 30) // BLOCK  # after damage, the next valid header is searched for within a gigabyte
_DENSE_BLOCKS = 4  # blocks per member up to which parsing every block is quicker than stepping from header to header
_CHECKSUM_WEIGHTS = 8 ** np.arange(5, -1, -1)  # of octal digits
_SIZE_WEIGHTS = 8.0 ** np.arange(10, -1, -1)


def load_index(path: str, *, expected: int | None = None, shard: str | None = None) -> Index:
    """Return the index of a shard: the one beside it, the cached one, or one from a new scan.

    An index is used only while it belongs to the file as it is now. A new scan is cached.

    Args:
        path: A local file.
        expected: The number of samples in the manifest; missing ones become bad entries.
        shard: What to call the shard in errors; its path by default.

    Raises:
        StorageError: The file cannot be read.
        MissingExtra: The shard is compressed by zstd and zstandard is not installed.
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
    """Return the index of a shard as :func:`load_index` does, and its content; decompresses it at most once.

    Args:
        path: A local file.
        expected: The number of samples in the manifest; missing ones become bad entries.
        shard: What to call the shard in errors; its path by default.
        mapped: Whether to return the content; if false, it is returned only if the shard had to be scanned.
        limits: How large a compressed shard may become.
        known: An index loaded before, used if the file has not changed since.

    Raises:
        StorageError: The file cannot be read.
        MissingExtra: The shard is compressed by zstd and zstandard is not installed.
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
        index = read_cached_index(path, stamp)
    content = open_archive(path, name, limits) if mapped or index is None else None
    if content is not None and (index is None or len(content.bytes) != index.content_size):
        index = scan(content.buffer, content.problem).stamped(stamp)
        write_cached_index(path, index)
    assert index is not None
    counts = (None if beside is None else beside.samples, "the index beside it"), (expected, "the manifest")
    for count, source in counts:
        if count not in (None, index.samples) and not _is_whole(path, index):  # else the shard was written again
            index = index.expecting(count, source)
    return index, content


def _is_whole(path: str, index: Index) -> bool:
    """Return whether an archive ends as its writer ended it: nothing is damaged, and the end marker is there."""
    if index.bad:
        return False
    if index.content_size != index.stamp.size:  # compressed: a stream that is cut short is damaged
        return True
    with open(path, "rb") as file:
        file.seek(max(0, index.stamp.size - 2 * BLOCK))
        return file.read() == bytes(2 * BLOCK)


def open_archive(path: str, shard: str, limits: ArchiveLimits = LIMITS) -> Content:
    """Map the archive at ``path``; a compressed one is decompressed to an unlinked temporary file first.

    Raises:
        StorageError: The file cannot be read, or the temporary file cannot be written.
        MissingExtra: The archive is compressed by zstd and zstandard is not installed.
    """
    return open_content(path, shard, limits, compression_of)


def scan(content: Buffer, problem: str | None = None) -> Index:
    """Build the index of an archive from its headers.

    Args:
        content: The whole archive, decompressed.
        problem: Why the archive ends early, if its compressed stream is damaged.
    """
    running = Scan(content, problem)
    while running.advance():
        pass
    return running.index()


class Scan:
    """The scan of an archive, in steps, so that the samples at its beginning are known before its end has arrived.

    Args:
        content: The archive, decompressed.
        problem: Why the archive ends early, if its compressed stream is damaged.
    """

    def __init__(self, content: Buffer | RemoteBytes, problem: str | None = None) -> None:
        self._walk, self._samples, self._problem = _HeaderWalk(content), _SampleCollector(), problem
        self._content = content
        self._steps = self._run()

    @property
    def samples(self) -> int:
        """How many samples were found so far."""
        return self._samples.count

    @property
    def offset(self) -> int:
        """Where the next header is."""
        return self._walk.offset

    @property
    def available(self) -> bool:
        """Whether the next header has arrived."""
        return self._walk.available

    def advance(self) -> bool:
        """Step over some members; return whether there may be more.

        Raises:
            StorageError: The next bytes cannot be fetched.
            DataError: The next bytes arrived damaged.
        """
        return next(self._steps, False)

    def part(self, first: int) -> Index:
        """Return the index of the samples from ``first`` on that were found so far, numbered from 0."""
        return self._samples.part(self._walk, first)

    def index(self) -> Index:
        """Return the index of all samples, after the last step."""
        return self._samples.index(self._walk)

    def _why_early(self) -> str | None:
        return self._content.problem if isinstance(self._content, RemoteBytes) else self._problem

    def _run(self) -> Iterator[bool]:
        walk, samples, extensions = self._walk, self._samples, Extensions()
        plain_steps = _STEPS_BEFORE_BATCH
        while True:
            if plain_steps >= _STEPS_BEFORE_BATCH:
                plain_steps = 0
                for batch in walk.batches():
                    samples.push_all(*batch)
                    yield True
            item = read_member(walk, extensions)
            plain_steps = plain_steps + 1 if item is not None and not extensions.pending else 0
            if isinstance(item, Halt):
                if item.problem is None:
                    for loss in walk.check_end(extensions, self._why_early()):
                        samples.push(*loss)
                    break
                samples.push(LOST_RANGE, 0, item.problem if item.recoverable else self._why_early() or item.problem)
                extensions.clear()
                if not item.recoverable or not walk.resync():
                    break
            elif item is not None:
                samples.push(*item)
            yield True
        samples.finish()


class _SampleCollector:
    """Groups members into samples and collects their rows for an index."""

    def __init__(self) -> None:
        self._grouper: Grouper[int] = Grouper()
        self._builder = IndexBuilder()
        self._rows: list[int] = []

    def push(self, name: bytes, row: int, problem: str | None = None) -> None:
        """Add one member, or a loss."""
        self._add(self._grouper.push(name, row, problem))

    def push_all(self, names: list[bytes], base: int, folders: int) -> None:
        """Add members of consecutive rows, mostly as runs of samples with the same fields."""
        self._grouper.skipped["folders"] += folders
        rows = range(base, base + len(names))
        at = 0
        while at < len(names):
            run = self._grouper.push_run(names, rows, at)
            if run is None:
                self.push(names[at], rows[at])
                at += 1
                continue
            keys, field_names, run_rows = run
            self._builder.add_all(keys, field_names)
            self._rows += run_rows
            at += len(keys) * len(field_names)

    @property
    def count(self) -> int:
        """How many samples were added."""
        return self._builder.samples

    def finish(self) -> None:
        """Add what is left after the last member."""
        self._add(self._grouper.finish())

    def index(self, walk: _HeaderWalk) -> Index:
        """Return the index of all samples."""
        index = self.part(walk, 0)
        return replace(index, padding=walk.total - walk.offset if walk.ended else 0)

    def part(self, walk: _HeaderWalk, first: int) -> Index:
        """Return the index of the samples from ``first`` on."""
        start, size = walk.table()
        rows = np.array(self._rows[self._builder.members_before(first) :], np.int64)
        return self._builder.build(start[rows], size[rows], self._grouper.skipped.total(), walk.total, first)

    def _add(self, entries: list[SampleEntry[int]]) -> None:
        for key, field_names, rows, problem, lost in entries:
            if problem is None:
                self._builder.add(key, field_names)
                self._rows += rows
            else:
                self._builder.add_bad(key, problem, lost)


class _HeaderWalk:
    """Walks from header to header and records where the data of each member is.

    ``batches`` steps over many ordinary members at once; ``read_member`` steps over anything else.
    """

    def __init__(self, content: Buffer | RemoteBytes) -> None:
        self._content = content
        self.total = 0 if isinstance(content, RemoteBytes) else len(content)  # as far as it is known
        self._window = Window(0, 0, b"")  # the part of the content that is available
        self._blocks: U8 = _blocks(self._window)
        self._first_block = 0  # the number of the first available block
        if not isinstance(content, RemoteBytes):
            self._enter(Window(0, self.total, content))
        self._heads = np.empty((_MAX_HEADERS, BLOCK), np.uint8)
        self._headers_ahead = _MIN_HEADERS
        self._dense = False
        self._pattern: I64 | None = None  # blocks that the next members will take, if the sizes repeat
        self._table: I64 = np.zeros((2, _MAX_HEADERS), np.int64)  # the start and size of members, with room for more
        self._members = 0
        self.offset = 0
        self.ended = False  # whether the end marker was found

    def table(self) -> tuple[I64, I64]:
        """Return the start and the size of each member's data, by row."""
        return self._table[0, : self._members], self._table[1, : self._members]

    def _enter(self, window: Window) -> None:
        self._window, self._blocks, self._first_block = window, _blocks(window), window.start // BLOCK

    def reach(self, offset: int) -> None:
        """Wait until ``total`` is at least ``offset``, or the size of the archive."""
        if self.total < offset and isinstance(self._content, RemoteBytes):
            self.total = self._content.reach(offset)

    def _load(self) -> bool:
        """Wait until the next header is available; False if the archive ends before it."""
        self.reach(self.offset + BLOCK)
        if self.offset + BLOCK > self.total:
            return False
        if not self.available and isinstance(self._content, RemoteBytes):
            self._enter(self._content.window(self.offset))
        return True

    @property
    def available(self) -> bool:
        """Whether the next header is in the window."""
        return self._window.start <= self.offset <= self._window.stop - BLOCK

    def take(self, size: int) -> bytes:
        found = self._content[self.offset : self.offset + size]
        self.offset += len(found)
        return found

    def value(self, size: int, name: bytes) -> int | None:
        """Skip the data of a member and return its row in the table."""
        start = self.offset
        self.reach(start + padded(size))
        if start + size > self.total:
            self.offset = self.total
            return None
        self.offset = min(start + padded(size), self.total)
        return self._add_rows(np.array([start]), np.array([size]))

    def _add_rows(self, starts: I64, sizes: I64) -> int:
        row, self._members = self._members, self._members + len(starts)
        if self._members > self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros((2, self._members), np.int64)], axis=1)
        self._table[0, row : self._members] = starts
        self._table[1, row : self._members] = sizes
        return row

    def batches(self) -> Iterator[tuple[list[bytes], int, int]]:
        """Step over ordinary members, up to the first header that needs ``read_member``.

        Yields:
            Names of members, the row of the first, and the number of folders among them.
        """
        whole = True
        while whole and self._load():
            offsets, sizes = self._guess()
            if not len(offsets):
                return
            self.reach(int(offsets[-1]) + BLOCK + padded(int(sizes[-1])))
            heads = self._heads[: len(offsets)]
            np.take(self._blocks, offsets // BLOCK - self._first_block, axis=0, out=heads, mode="clip")
            member, ignorable = self._classify(heads, offsets, sizes)
            fine = member | ignorable
            whole = bool(fine.all())
            good = len(fine) if whole else int(fine.argmin())
            self._headers_ahead = min(self._headers_ahead * 2, _MAX_HEADERS) if whole else _MIN_HEADERS
            if not good:
                return
            self._dense = int(offsets[good - 1] - offsets[0]) <= good * _DENSE_BLOCKS * BLOCK
            if not whole or self._pattern is None:
                self._pattern = _repeating_blocks(sizes[:good]) if self._dense else None
            self.offset = min(int(offsets[good - 1]) + BLOCK + padded(int(sizes[good - 1])), self.total)
            chosen = slice(good) if member[:good].all() else np.flatnonzero(member[:good])
            base = self._add_rows(offsets[chosen] + BLOCK, sizes[chosen])
            folders = ignorable[:good] & (heads[:good, 156] == ord("5"))
            yield _member_names(heads[chosen]), base, int(folders.sum())

    def _guess(self) -> tuple[I64, I64]:
        """Return where the next members are if all of them are ordinary: offsets and sizes, for the caller to check."""
        if self._pattern is not None:
            return self._guess_repeating(self._pattern)
        if self._dense:
            return self._guess_dense()
        offsets: list[int] = []
        sizes: list[int] = []
        first, stop, content = self._window.start, self._window.stop - BLOCK, self._window.data
        offset = self.offset
        try:
            for _ in range(self._headers_ahead):
                at = offset - first + 124
                if offset > stop or (size := int(content[at : at + 11], 8)) < 0:
                    break
                offsets.append(offset)
                sizes.append(size)
                offset += BLOCK + ((size + 511) & -512)
        except ValueError:
            pass  # an end marker, another number format or not a header: left to read_member()
        return np.array(offsets, np.int64), np.array(sizes, np.int64)

    def _guess_repeating(self, pattern: I64) -> tuple[I64, I64]:
        """Guess where sizes repeat: all members at once, up to the first that breaks the pattern."""
        steps = np.tile(pattern, -(-self._headers_ahead // len(pattern)))
        places = self.offset // BLOCK - self._first_block + np.cumsum(steps) - steps
        places = places[places < len(self._blocks)]
        digits = self._blocks[places, 124:135] - np.uint8(48)
        sizes = (digits.astype(np.float64) @ _SIZE_WEIGHTS).astype(np.int64)
        fine: Bools = np.all(digits <= 7, axis=1)
        alike = fine & (_block_counts(sizes) == steps[: len(places)])
        good = len(places) if alike.all() else int(alike.argmin())
        good += good < len(places) and bool(fine[good])  # the one that breaks it is still where it was expected
        return (places[:good] + self._first_block) * BLOCK, sizes[:good]

    def _guess_dense(self) -> tuple[I64, I64]:
        """Guess where headers are close together: parse the size in every block as if the block were a header."""
        at = self.offset // BLOCK - self._first_block
        stop = at + self._headers_ahead * _DENSE_BLOCKS
        digits = np.ascontiguousarray(self._blocks[at:stop, 124:135]) - np.uint8(48)
        sizes = (digits.astype(np.float64) @ _SIZE_WEIGHTS).astype(np.int64)
        after = np.arange(1, len(sizes) + 1) + (sizes + BLOCK - 1) // BLOCK
        after[(digits > 7).any(axis=1)] = -1
        following = after.tolist()
        places: list[int] = []
        place = 0
        while place < len(following) and len(places) < self._headers_ahead and following[place] > 0:
            places.append(place)
            place = following[place]
        chosen = np.array(places, np.int64)
        return (chosen + at + self._first_block) * BLOCK, sizes[chosen]

    def _classify(self, heads: U8, offsets: I64, sizes: I64) -> tuple[Bools, Bools]:
        """Return which headers belong to ordinary members, and which are valid but can be ignored."""
        kinds = heads[:, 156]
        fine = _checksums_hold(heads) & (heads[:, 135] < 33) & (offsets + BLOCK + sizes <= self.total)
        member = fine & ((kinds == ord("0")) | (kinds == 0))
        ignorable = fine & (kinds == ord("5")) & (sizes == 0)
        records = np.flatnonzero(fine & (kinds == ord("x")) & (sizes <= BLOCK))
        if len(records):
            places = offsets[records] // BLOCK - self._first_block + 1
            records, places = records[places < len(self._blocks)], places[places < len(self._blocks)]
            bodies = self._blocks[places].view(f"S{BLOCK}").ravel().tolist()
            ignorable[records] = [not has_relevant_records(body) for body in bodies]
        return member, ignorable

    def check_end(self, extensions: Extensions, problem: str | None) -> Iterator[Member[int]]:
        """Yield what is wrong after the end marker, if anything."""
        self.ended = True
        offset = self.offset - BLOCK
        self.reach(self.offset + MAX_PADDING + BLOCK)
        if problem:
            yield BAD_END, 0, problem
        elif extensions.orphaned:
            yield LOST_RANGE, 0, orphaned_extension(offset)
        stride = 1 << 20
        for at in range(self.offset, min(self.total, self.offset + MAX_PADDING), stride):
            if self._content[at : at + stride].strip(b"\0"):
                yield BAD_END, 0, trailing_bytes(offset)
                return
        if self.total - self.offset > MAX_PADDING:
            yield BAD_END, 0, excess_padding(offset)

    def resync(self) -> bool:
        at, width = -(-self.offset // BLOCK), 16  # the search widens, so that near headers are found cheaply
        stop = at + _RESYNC_BLOCKS
        while at < stop:
            self.offset = at * BLOCK
            if not self._load():
                break
            low = at - self._first_block
            blocks = self._blocks[low : low + min(width, stop - at)]
            holds = _checksums_hold(blocks)
            if holds.any():
                self.offset = (at + int(holds.argmax())) * BLOCK
                return True
            at += len(blocks)
            width = min(width * 2, 1 << 14)
        return False


def _blocks(window: Window) -> U8:
    """Return the whole blocks of a window, as rows."""
    count = (window.stop - window.start) // BLOCK
    return np.frombuffer(window.data, np.uint8, count * BLOCK).reshape(count, BLOCK)


def _block_counts(sizes: I64) -> I64:
    """Return the number of blocks that members of these sizes take, headers included."""
    return 1 + (sizes + BLOCK - 1) // BLOCK


def _repeating_blocks(sizes: I64) -> I64 | None:
    """Return the period in the blocks that members take, if they repeat every few members."""
    blocks = _block_counts(sizes)
    for period in range(1, 9):
        if len(blocks) >= 4 * period and bool((blocks[period:] == blocks[:-period]).all()):
            return blocks[-period:]
    return None


def _member_names(heads: U8) -> list[bytes]:
    """Return the paths of many headers at once, without a leading ``./``."""
    names: list[bytes] = np.ascontiguousarray(heads[:, :100]).view("S100").ravel().tolist()
    if b"\0" in b"".join(names):
        names = [name.partition(b"\0")[0] for name in names]
    for row in np.flatnonzero(heads[:, 345]).tolist():
        names[row] = header_name(heads[row].tobytes())
    if names and names[0].startswith(b"./"):
        names = [name.removeprefix(b"./") for name in names]
    return names


def _checksums_hold(heads: U8) -> Bools:
    """Return for many header blocks at once whether their checksums are right."""
    own = heads[:, 148:156]
    total = heads.sum(axis=1, dtype=np.uint32).astype(np.int64) - own.sum(axis=1, dtype=np.int64) + 8 * 32
    digits = (own >= 48) & (own <= 55)
    declared = (own[:, :6].astype(np.int64) - 48) @ _CHECKSUM_WEIGHTS
    usual = digits[:, :6].all(axis=1) & (own[:, 6] == 0) & (own[:, 7] == 32)
    holds: Bools = usual & (declared == total)
    if not holds.all():
        unsure = ~holds & (digits[:, 0] | (own[:, 0] == 32))
        for row in np.flatnonzero(unsure).tolist():
            holds[row] = checksum_holds(heads[row].tobytes())
    return holds
