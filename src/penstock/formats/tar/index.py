"""The index as a value: where each sample of a shard is, the format of index files, and where they are stored."""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.blobs.checksums import CELL, U32
from penstock.blobs.draft import replace_file
from penstock.blobs.stamp import Stamp, cached_path, write_cached
from penstock.errors import DataError
from penstock.formats.tar.small_values import FieldValues, decode_values, encode_values

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

INDEX_SUFFIX = ".index"
_CACHE_FAMILY = "index"
_MAX_MISSING = 1 << 20  # samples that a truncated shard may lack, whatever its size: each takes memory
_NO_STAMP = Stamp()
_MAGIC = b"PSTKIX02"
_MAGIC_V1 = b"PSTKIX01"  # without checksums
_ARRAYS: dict[str, type[np.generic]] = {  # attributes, in the order in which the file holds them
    "kind": np.int32,
    "first": np.int64,
    "start": np.int64,
    "size": np.int64,
    "edges": np.int64,
    "checksums": np.uint32,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The locations of the fields of every sample of one shard, in arrays without a Python object per sample.

    A sample that cannot be read is an entry too, without fields and with its reason in ``bad``: the other samples keep
    their numbers, and a loss is counted where it happened.

    Attributes:
        kinds: The distinct tuples of field names, each in member order.
        kind: For each sample, its position in ``kinds``.
        first: For each sample, the row of its first field in ``start`` and ``size``.
        start: For each field, where its bytes begin in the (decompressed) archive.
        size: For each field, its size in bytes.
        text: All keys, concatenated.
        edges: Where each key begins in ``text``, and the end of the last one.
        bad: By number, what is wrong with each sample that cannot be read.
        lost: The samples of ``bad`` that stand for a lost range, which may have held any number of samples.
        skipped: The number of members that belong to no sample.
        content_size: The size of the archive in bytes, decompressed.
        padding: The bytes after the end marker.
        stamp: The file that the index was built from.
        checksums: CRC-32 of every MiB of the file as stored, so that any part can be verified as it arrives; empty
            where they were not computed.
        values: The values of small fields, by name, so that samples can be found by a label without reading the shard;
            empty where they were not stored.
    """

    kinds: list[tuple[str, ...]]
    kind: I32
    first: I64
    start: I64
    size: I64
    text: str
    edges: I64
    bad: dict[int, str] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    skipped: int = 0
    content_size: int = 0
    padding: int = 0
    stamp: Stamp = _NO_STAMP
    checksums: U32 = field(default_factory=lambda: np.zeros(0, np.uint32))
    values: Mapping[str, FieldValues] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of samples, bad ones included."""
        return len(self.kind)

    @property
    def shard_size(self) -> int:
        """The size of the shard file in bytes."""
        return self.stamp.size

    def begin(self, i: int) -> int:
        """Return where the bytes of sample ``i`` begin; 0 if it has none."""
        row = int(self.first[i])
        return int(self.start[row]) if row < len(self.start) else 0

    def end(self, i: int) -> int:
        """Return where the bytes of sample ``i`` and of those before it end; 0 if they have none."""
        row = int(self.first[i + 1]) if i + 1 < self.samples else len(self.start)
        return int(self.start[row - 1] + self.size[row - 1]) if 0 < row <= len(self.start) else 0

    def key(self, i: int) -> str:
        """Return the key of sample ``i``; for a lost range, the last good key before it."""
        return self.text[self.edges[i] : self.edges[i + 1]]

    def keys(self, sel: slice | I64 | None = None) -> list[str]:
        """Return the keys of the selected samples, all by default."""
        rows = np.arange(self.samples)[slice(None) if sel is None else sel]
        text = self.text
        return [text[i:j] for i, j in zip(self.edges[rows].tolist(), self.edges[rows + 1].tolist(), strict=True)]

    def stamped(self, stamp: Stamp, checksums: U32 | None = None) -> Index:
        """Return this index with the stamp of its file, and with its checksums if they are known."""
        return replace(self, stamp=stamp, checksums=np.zeros(0, np.uint32) if checksums is None else checksums)

    def expecting(self, count: int | None, source: str) -> Index:
        """Return an index of ``count`` samples, for a shard that is known to have had that many.

        Missing samples become bad entries, after the last loss or else at the end. Entries for lost ranges are dropped
        while all samples are there without them. The index of a shard that holds more good samples than ``count``, or
        that cannot ever have held as many, is returned unchanged: the count belongs to another shard.

        Args:
            count: The expected number of samples; None if it is unknown.
            source: Where the count comes from, for the message.
        """
        if count is None or count == self.samples or count < self.samples - len(self.lost):
            return self
        if count - self.samples > max(_MAX_MISSING, self.content_size // 512):
            return self
        if count < self.samples:
            return self._without(sorted(self.lost)[: self.samples - count])
        place = max(self.lost, default=self.samples - 1) + 1
        missing = f"truncated: {source} says {count} samples, {self.samples - len(self.lost)} were found"
        return self._with_bad(place, count - self.samples, missing)

    def _without(self, rows: list[int]) -> Index:
        keep = np.ones(self.samples, bool)
        keep[rows] = False
        place = np.cumsum(keep) - 1
        return replace(
            self,
            **_text_key_arrays(self.keys(np.flatnonzero(keep))),
            kind=self.kind[keep],
            first=self.first[keep],
            bad={int(place[i]): problem for i, problem in self.bad.items() if keep[i]},
            lost=frozenset(int(place[i]) for i in self.lost if keep[i]),
            values={},
        )

    def _with_bad(self, place: int, count: int, problem: str) -> Index:
        kinds = self.kinds if () in self.kinds else [*self.kinds, ()]
        key = self.key(place - 1) if place else ""
        keys = self.keys()
        moved = {i + count if i >= place else i: text for i, text in self.bad.items()}
        return replace(
            self,
            **_text_key_arrays([*keys[:place], *[key] * count, *keys[place:]]),
            kinds=kinds,
            kind=np.insert(self.kind, place, [kinds.index(())] * count),
            first=np.insert(self.first, place, [0] * count),
            bad=dict(sorted((moved | {place + i: problem for i in range(count)}).items())),
            lost=frozenset(i + count if i >= place else i for i in self.lost),
            values={},
        )

    def to_bytes(self) -> bytes:
        """Encode the index as a file: magic, a JSON header, the arrays, the keys, the values, a CRC-32.

        The values are an optional part, which readers that do not know it pass over.
        """
        text = self.text.encode("utf-8", "surrogatepass")
        values, values_data = encode_values(self.values)
        about = {
            "kinds": self.kinds,
            "bad": list(self.bad.items()),
            "lost": sorted(self.lost),
            "skipped": self.skipped,
            "content_size": self.content_size,
            "padding": self.padding,
            "stamp": [self.stamp.size, self.stamp.mtime_ns, self.stamp.inode],
            "samples": self.samples,
            "members": len(self.start),
            "text": len(text),
            "grid": len(self.checksums),
            **({"values": values} if values else {}),
        }
        head = json.dumps(about, separators=(",", ":")).encode()
        arrays = [getattr(self, name).astype(np.dtype(kind).newbyteorder("<")) for name, kind in _ARRAYS.items()]
        aligned = [part + bytes(-len(part) % 8) for part in (head, *(array.tobytes() for array in arrays))]
        body = b"".join([_MAGIC, len(head).to_bytes(8, "little"), *aligned, text, values_data])
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def from_bytes(cls, data: bytes, shard: str | None = None) -> Index:
        """Decode an index file; the arrays are views of ``data``.

        Raises:
            DataError: The bytes are not an index, are damaged, or point outside the shard.
        """
        if (
            data[:8] not in (_MAGIC, _MAGIC_V1)
            or len(data) < 24
            or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little")
        ):
            raise DataError("the index is damaged, or of another version", shard)
        try:
            index = cls._parsed(data)
            index._check(shard)
        except DataError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise DataError(f"the index is malformed: {exc}", shard) from exc
        return index

    @classmethod
    def _parsed(cls, data: bytes) -> Index:
        length = int.from_bytes(data[8:16], "little")
        about: dict[str, Any] = json.loads(data[16 : 16 + length])
        samples, members = about["samples"], about["members"]
        if min(samples, members, about["text"], about.get("grid", 0)) < 0:
            raise ValueError("a count is negative")
        counts = {"kind": samples, "first": samples, "start": members, "size": members, "edges": samples + 1}
        counts["checksums"] = 0 if data[:8] == _MAGIC_V1 else about["grid"]
        at = 16 + length + -length % 8
        arrays: dict[str, Any] = {}
        for name, kind in _ARRAYS.items():
            dtype = np.dtype(kind).newbyteorder("<")
            arrays[name] = np.frombuffer(data, dtype, counts[name], at).astype(kind, copy=False)
            at += (counts[name] * dtype.itemsize + 7) & -8
        return cls(
            kinds=[tuple(map(str, kind)) for kind in about["kinds"]],
            text=data[at : at + about["text"]].decode("utf-8", "surrogatepass"),
            bad={int(i): str(problem) for i, problem in about["bad"]},
            lost=frozenset(map(int, about["lost"])),
            skipped=int(about["skipped"]),
            content_size=int(about["content_size"]),
            padding=int(about.get("padding", 0)),
            stamp=Stamp(*map(int, about["stamp"])),
            values=decode_values(about.get("values", []), samples, data, at + about["text"]),
            **arrays,
        )

    def _check(self, shard: str | None) -> None:
        """Refuse an index whose numbers point outside the shard or the index itself."""
        lengths = np.array([len(kind) for kind in self.kinds] or [0])
        fits = (
            bool((self.kind >= 0).all() and (self.kind < len(self.kinds)).all())
            and bool((self.first >= 0).all() and (self.first <= len(self.start) - lengths[self.kind]).all())
            and bool((self.start >= 0).all() and (self.size >= 0).all())
            and bool((self.start <= self.content_size - self.size).all())
            and bool((np.diff(self.edges) >= 0).all())
            and (self.edges[0], self.edges[-1]) == (0, len(self.text))
            and all(0 <= i < self.samples and not lengths[self.kind[i]] for i in self.bad)
            and self.lost <= self.bad.keys()
            and len(self.checksums) in (0, -(-self.stamp.size // CELL))
        )
        if not fits:
            raise DataError("the index points outside its shard", shard)
        if (name := self._refused_name()) is not None:
            raise DataError(f"the index holds a name that a scan refuses: {name!r}", shard)

    def _refused_name(self) -> str | None:
        """Return a key or field that no scan of an archive yields, if there is one."""
        for names in self.kinds:
            if len({*names}) < len(names):
                return ", ".join(names)
            for name in names:
                reserved = name.startswith("__") and name.endswith("__")
                if not name or reserved or name != name.lower() or "/" in name or "\0" in name:
                    return name
        good = np.ones(self.samples, bool)
        good[list(self.bad)] = False
        keys = self.keys(np.flatnonzero(good))
        lines = "\n".join(["", *keys, ""])
        if len({*keys}) == len(keys) and not any(mark in lines for mark in ("\n\n", "\n/", "/\n", ".", "\0")):
            return None
        seen: set[str] = set()
        for key in keys:
            folders, _, name = key.rpartition("/")
            leaves = key.startswith(("/", "./")) or ".." in folders.split("/")
            if not name or "." in name or leaves or "\0" in key or key in seen:
                return key
            seen.add(key)
        return None


class IndexBuilder:
    """Collects the samples of an index, in order."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, ...], int] = {}
        self._kind: list[int] = []
        self._keys: list[bytes] = []
        self._bad: dict[int, str] = {}
        self._lost: list[int] = []
        self._members: tuple[int, int] = 0, 0  # how many samples have so many fields together

    @property
    def samples(self) -> int:
        """How many samples were added."""
        return len(self._keys)

    def members_before(self, sample: int) -> int:
        """Return how many fields the samples before ``sample`` have; cheap if asked in ascending order."""
        known, members = self._members if self._members[0] <= sample else (0, 0)
        lengths = [len(names) for names in self._kinds]
        members += sum(lengths[kind] for kind in self._kind[known:sample])
        self._members = sample, members
        return members

    def add(self, key: bytes, field_names: tuple[str, ...]) -> None:
        """Add a good sample, whose fields are the next rows of ``start`` and ``size``."""
        self._keys.append(key)
        self._kind.append(self._kinds.setdefault(field_names, len(self._kinds)))

    def add_all(self, keys: list[bytes], field_names: tuple[str, ...]) -> None:
        """Add good samples with the same fields."""
        self._keys += keys
        self._kind += [self._kinds.setdefault(field_names, len(self._kinds))] * len(keys)

    def add_bad(self, key: bytes, problem: str, lost: bool) -> None:
        """Add a sample that cannot be read, or (``lost``) the entry for a lost range."""
        if lost:
            self._lost.append(len(self._keys))
        self._bad[len(self._keys)] = problem
        self.add(key, ())

    def build(self, start: I64, size: I64, skipped: int, content_size: int, first_sample: int = 0) -> Index:
        """Return the index of the samples added, or of those from ``first_sample`` on, which is then number 0.

        Args:
            start: Where the data of each field begins.
            size: The size of each field.
            skipped: The number of members that belong to no sample.
            content_size: The size of the archive, decompressed.
        """
        kind = np.array(self._kind[first_sample:], np.int32)
        lengths = np.array([len(names) for names in self._kinds] or [0], np.int64)[kind]
        return Index(
            kinds=list(self._kinds),
            kind=kind,
            first=np.cumsum(lengths) - lengths,
            start=start,
            size=size,
            **_key_arrays(self._keys[first_sample:] if first_sample else self._keys),
            bad={i - first_sample: text for i, text in self._bad.items() if i >= first_sample},
            lost=frozenset(i - first_sample for i in self._lost if i >= first_sample),
            skipped=skipped,
            content_size=content_size,
        )


def _key_arrays(keys: Sequence[bytes]) -> dict[str, Any]:
    joined = b"".join(keys)
    if joined.isascii():
        return {"text": joined.decode("ascii"), "edges": _edges(map(len, keys), len(keys))}
    return _text_key_arrays([key.decode("utf-8", "surrogateescape") for key in keys])


def _text_key_arrays(keys: Sequence[str]) -> dict[str, Any]:
    return {"text": "".join(keys), "edges": _edges(map(len, keys), len(keys))}


def _edges(lengths: Iterable[int], count: int) -> I64:
    edges = np.zeros(count + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, count), out=edges[1:])
    return edges


def read_beside(path: str) -> Index | None:
    """Return the index beside a shard, even if it is out of date; None if there is no valid one."""
    return _read(Path(path + INDEX_SUFFIX), path)


def write_beside(path: str, index: Index) -> None:
    """Write ``<shard>.index``; it appears whole or not at all.

    Raises:
        OSError: The folder cannot be written.
    """
    replace_file(Path(path + INDEX_SUFFIX), index.to_bytes())


def read_cached_index(path: str, stamp: Stamp) -> Index | None:
    """Return the cached index of a shard; None if there is none or the shard has changed since."""
    try:
        index = _read(cached_path(_CACHE_FAMILY, os.path.abspath(path)), path)
    except RuntimeError:
        return None
    return index if index is not None and index.stamp == stamp else None


def write_cached_index(path: str, index: Index) -> None:
    """Cache the index of a shard for the next run; a cache that cannot be written is not an error."""
    write_cached(_CACHE_FAMILY, os.path.abspath(path), index.to_bytes())


def _read(file: Path, shard: str) -> Index | None:
    try:
        return Index.from_bytes(file.read_bytes(), shard)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, DataError) as exc:
        _log.debug("the index %s is not used: %s", file, exc)
        return None
