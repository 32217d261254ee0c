"""How far an interrupted packing came: a small hidden object in the target, written whole after every shard."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.blobs.draft import put_object, read_object
from penstock.engines import Start, StartPart
from penstock.errors import PlanError
from penstock.formats.manifest import ShardEntry
from penstock.packing.folder_lock import Owner
from penstock.storage import Storage

JOURNAL = ".penstock-pack.json"
NUMBERED = re.compile(r"shard-(\d{6,})\.tar(\.\w+)?")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """Where in its stream a packing stands.

    Attributes:
        start: Where a run begins that comes by there, as JSON.
        beyond: How many samples of that run are in the shards already.
        skipped: Samples left out before ``start``.
    """

    start: dict[str, Any]
    beyond: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Journal:
    """What a packing is, and what of it is done.

    Attributes:
        source: A fingerprint of what is packed.
        options: What decides about the shards.
        first: The number of the first shard of this packing.
        samples: Samples in the folder before it.
        old: Shards of an earlier set that go when this one is complete.
        entries: The shards that are complete.
        place: Where the next one begins; ``None``: at the beginning.
        by: Who wrote this.
    """

    source: str
    options: Mapping[str, Any]
    first: int = 0
    samples: int = 0
    old: tuple[str, ...] = ()
    entries: tuple[ShardEntry, ...] = ()
    place: JournalPosition | None = None
    by: Owner | None = None

    def after(self, entry: ShardEntry, place: JournalPosition) -> Journal:
        """The journal when one more shard is complete."""
        return replace(self, entries=(*self.entries, entry), place=place)

    def names(self) -> set[str]:
        """The shards this packing may have left, also the one that was complete just before it was noted."""
        compress = self.options.get("compress")
        following = f"shard-{self.first + len(self.entries):06d}.tar{f'.{compress}' if compress else ''}"
        return {*self.old, *(entry.name for entry in self.entries), following}

    def awaits(self, name: str) -> bool:
        """Whether this is the name of a shard that is not complete."""
        match = NUMBERED.fullmatch(name)
        return match is not None and int(match[1]) >= self.first + len(self.entries)

    def check(self, other: Journal) -> None:
        """Require that ``other`` is the same work.

        Raises:
            PlanError: it is not.
        """
        differing = [name for name, value in self.options.items() if other.options.get(name) != value]
        if self.source == other.source and not differing:
            return
        what = f"other options ({', '.join(differing)})" if differing else "another source"
        raise PlanError(
            f"the folder holds an unfinished packing of {what}; finish it with what it was begun with, "
            "or pass resume=False to start over"
        )


def read_journal(storage: Storage, folder: str) -> Journal | None:
    """Read the journal of a folder, if there is one.

    Raises:
        PlanError: it cannot be understood.
        StorageError: it cannot be read.
    """
    data = read_object(storage, _url(folder))
    if data is None:
        return None
    try:
        found = json.loads(data)
        if found.pop("v") != _VERSION:
            raise ValueError("another version")
        found["entries"] = tuple(ShardEntry(*entry) for entry in found["entries"])
        found["old"] = tuple(found["old"])
        found["place"] = JournalPosition(**found["place"]) if found["place"] is not None else None
        found["by"] = Owner(**found["by"]) if found.get("by") is not None else None
        return Journal(**found)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise PlanError(f"{_url(folder)} cannot be understood ({exc}); pass resume=False to start over") from exc


def write_journal(storage: Storage, folder: str, journal: Journal) -> None:
    """Write the journal of a folder.

    Raises:
        StorageError: it cannot be written.
    """
    fields = {name: getattr(journal, name) for name in Journal.__slots__}
    fields["place"] = None if journal.place is None else asdict(journal.place)
    fields["by"] = None if journal.by is None else asdict(journal.by)
    put_object(storage, _url(folder), json.dumps({"v": _VERSION, **fields}, separators=(",", ":")).encode())


def remove_journal(storage: Storage, folder: str) -> None:
    """Remove the journal of a folder.

    Raises:
        StorageError: it cannot be removed.
    """
    storage.delete(_url(folder))


def _url(folder: str) -> str:
    return f"{folder.rstrip('/')}/{JOURNAL}"


def start_to_json(start: Start) -> dict[str, Any]:
    """Write down where a run begins."""
    return {
        "left": start.left,
        "opens": [[part.pieces, part.n, part.done, part.sub] for part in start.opens],
        "groups": [[level, *at] for level, at in start.groups.items()],
        "seen": [[level, seen] for level, seen in start.seen.items()],
        "quota": start.quota,
        "pad": start.pad,
    }


def start_from_json(obj: Mapping[str, Any]) -> Start:
    """Read it back.

    Raises:
        PlanError: it is nothing of the kind.
    """
    try:
        return Start(
            [list(map(int, piece)) for piece in obj["left"]],
            tuple(StartPart(*part) for part in obj["opens"]),
            {int(level): (int(done), int(sub)) for level, done, sub in obj["groups"]},
            {int(level): int(seen) for level, seen in obj["seen"]},
            obj["quota"],
            obj["pad"],
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise PlanError(f"the journal of the packing is damaged ({exc!r}); pass resume=False to start over") from exc
