"""The progress of a packing run: a small hidden object in the target folder, replaced whole after every shard.

The field names of the dataclasses are the keys of the stored JSON.
"""

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
NUMBERED_SHARD = re.compile(r"shard-(\d{6,})\.tar(\.\w+)?")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """A position in the stream of samples: a start and an offset from it.

    Attributes:
        start: A start of the run at or before the position, as JSON.
        beyond: The number of samples between the start and the position; the shards hold them already.
        skipped: The number of samples that were skipped before the start.
    """

    start: dict[str, Any]
    beyond: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Journal:
    """What a packing run packs, and how far it is.

    Attributes:
        source: The fingerprint of the source.
        options: The options that determine the shards.
        first: The number of the first shard of this run.
        samples: The number of samples in the folder before this run.
        old: The shards of an earlier run, which are removed when this one is complete.
        entries: The shards that are complete.
        place: The position of the next shard's first sample; None before the first shard.
        by: The run that wrote the journal.
    """

    source: str
    options: Mapping[str, Any]
    first: int = 0
    samples: int = 0
    old: tuple[str, ...] = ()
    entries: tuple[ShardEntry, ...] = ()
    place: JournalPosition | None = None
    by: Owner | None = None

    def with_shard(self, entry: ShardEntry, position: JournalPosition) -> Journal:
        """Return the journal after one more shard is complete."""
        return replace(self, entries=(*self.entries, entry), place=position)

    def shard_names(self) -> set[str]:
        """Return the shards that the run may have left behind, with one that is published but not recorded yet."""
        compress = self.options.get("compress")
        following = f"shard-{self.first + len(self.entries):06d}.tar{f'.{compress}' if compress else ''}"
        return {*self.old, *(entry.name for entry in self.entries), following}

    def is_pending(self, name: str) -> bool:
        """Return whether this is the name of a shard that is not complete yet."""
        match = NUMBERED_SHARD.fullmatch(name)
        return match is not None and int(match[1]) >= self.first + len(self.entries)

    def check_same_run(self, other: Journal) -> None:
        """Check that ``other`` packs the same source with the same options.

        Raises:
            PlanError: The source or an option differs.
        """
        differing = [name for name, value in self.options.items() if other.options.get(name) != value]
        if self.source == other.source and not differing:
            return
        difference = f"with other options ({', '.join(differing)})" if differing else "of another source"
        raise PlanError(
            f"the folder holds an unfinished packing run {difference}; repeat that run to finish it, "
            "or pass resume=False to start over"
        )


def read_journal(storage: Storage, folder: str) -> Journal | None:
    """Read the journal of a folder; return None if there is none.

    Raises:
        PlanError: The journal is damaged, or of another version.
        StorageError: The journal cannot be read.
    """
    data = read_object(storage, _journal_url(folder))
    if data is None:
        return None
    try:
        found = json.loads(data)
        if found.pop("v") != _VERSION:
            raise ValueError("unknown version")
        found["entries"] = tuple(ShardEntry(*entry) for entry in found["entries"])
        found["old"] = tuple(found["old"])
        found["place"] = JournalPosition(**found["place"]) if found["place"] is not None else None
        found["by"] = Owner.from_json(found["by"]) if found.get("by") is not None else None
        return Journal(**found)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        problem = f"the journal {_journal_url(folder)} cannot be read ({exc})"
        raise PlanError(f"{problem}; pass resume=False to start over") from exc


def write_journal(storage: Storage, folder: str, journal: Journal) -> None:
    """Write the journal of a folder.

    Raises:
        StorageError: The journal cannot be written.
    """
    fields = {name: getattr(journal, name) for name in Journal.__slots__}
    fields["place"] = None if journal.place is None else asdict(journal.place)
    fields["by"] = None if journal.by is None else journal.by.to_json()
    put_object(storage, _journal_url(folder), json.dumps({"v": _VERSION, **fields}, separators=(",", ":")).encode())


def remove_journal(storage: Storage, folder: str) -> None:
    """Remove the journal of a folder.

    Raises:
        StorageError: The journal cannot be removed.
    """
    storage.delete(_journal_url(folder))


def _journal_url(folder: str) -> str:
    return f"{folder.rstrip('/')}/{JOURNAL}"


def start_to_json(start: Start) -> dict[str, Any]:
    """Return the start of a run as JSON."""
    return {
        "left": start.left,
        "opens": [[part.pieces, part.n, part.done, part.sub] for part in start.opens],
        "groups": [[level, *at] for level, at in start.groups.items()],
        "seen": [[level, seen] for level, seen in start.seen.items()],
        "quota": start.quota,
        "pad": start.pad,
    }


def start_from_json(obj: Mapping[str, Any]) -> Start:
    """Return the start of a run that :func:`start_to_json` stored.

    Raises:
        PlanError: The JSON is not that of a start.
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
        raise PlanError(f"the journal is damaged ({exc!r}); pass resume=False to start over") from exc
