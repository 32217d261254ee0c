"""Commits the files of a run: lock, journal, drafts, checkpoints; old files are deleted when the new ones are visible.

A set of files lands in a folder, on a disk or an object store. What belongs to a run that is not complete is in a
hidden work folder inside that folder: the lock, the journal and, on a disk, the drafts of the files. The drafts of a
remote folder are in a temporary folder of this machine, unless files are uploaded under their final names. A commit
makes the files visible under names that were not in use, then writes the manifest, which readers follow, and only then
deletes the files that were replaced. A kill at any moment leaves the old set or the new one, and the next run that
holds the lock continues, or cleans up.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from penstock.blobs.draft import put_file
from penstock.errors import PlanError, StateError, StorageError
from penstock.formats.manifest import (
    Manifest,
    ShardEntry,
    manifest_name,
    write_manifest_at,
)
from penstock.formats.tar.index import INDEX_SUFFIX
from penstock.landing.fingerprint import RunFingerprint
from penstock.landing.journal import JOURNAL, Journal
from penstock.landing.lock import LOCK, OWNER, remove_partials, temporary_folder, work_lock
from penstock.landing.position import Position, Positions
from penstock.landing.target import Target
from penstock.storage import redacted
from penstock.storage.protocol import exists

Mode = Literal["new", "replace", "append"]
MODES: tuple[Mode, ...] = ("new", "replace", "append")
_UPLOADS = 4  # at the same time, when drafts are committed
_OLD_JOURNALS = (".penstock-{0}/journal.json", ".penstock-{0}/names.json", ".rows.{0}.partial", ".{1}.partial")
_OLD_TAR_JOURNAL = ".penstock-pack.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Packed:
    """What was written, or what a dry run would write.

    Attributes:
        folder: The folder of the shards.
        shards: The names of the shards, in order.
        samples: The number of samples in the shards.
        nbytes: The bytes of all shards.
        skipped: The number of samples that were skipped because they could not be read or stored.
        estimated: Whether the numbers are an estimate from a few samples; only in a dry run.
    """

    folder: str
    shards: tuple[str, ...]
    samples: int
    nbytes: int
    skipped: int = 0
    estimated: bool = False


def numbered_key(sample: Mapping[str, Any], number: str) -> str:
    """Return the key of a packed sample: its number, so that keys sort in order, and the key that it had."""
    stem = sample.get("__key__")
    return f"{number}-{stem}" if stem else number


class OpenSet(Protocol):
    """What a sink knows about the set that it writes, or about one range of it; see :class:`Landing`."""

    target: Target
    drafts: str
    entries: dict[str, ShardEntry]
    state: dict[str, Any]

    @property
    def adds(self) -> bool:
        """Whether the files are added to those in the folder."""

    @property
    def may_be_empty(self) -> bool:
        """Whether no file is written if there are no samples."""

    def tar_names(self, compress: str | None) -> tuple[str, int]:
        """Return the path or URL of the shards, as ``ShardWriter`` takes it, and the number of the next one."""

    def number_text(self, number: int) -> str:
        """Return the key of a sample that has none, from its number among the samples of the sink."""

    def checkpoint(self, entry: ShardEntry, position: Position | None, state: Mapping[str, Any] | None = None) -> None:
        """Record that a draft is complete up to a position."""


class Sink(Protocol):
    """Writes samples to the drafts of a set, and reports each file that is complete."""

    def open(self, landing: OpenSet, samples: Positions) -> None:
        """Begin after what ``landing`` has; called once."""

    def add(self, items: Sequence[Any]) -> None:
        """Write samples."""

    def close(self) -> None:
        """Complete the last file."""

    def drop(self) -> None:
        """End without completing anything; does nothing after ``close``."""


@dataclass(slots=True)
class RunProgress:
    """What a journal says about an unfinished run."""

    header: dict[str, Any]
    entries: dict[str, ShardEntry] = field(default_factory=dict)  # by the names of drafts
    position: Position | None = None
    state: dict[str, Any] = field(default_factory=dict)  # what the sink stored
    commit: list[str] | None = None  # the final names, once all drafts are complete
    old: tuple[str, ...] = ()  # the files that are deleted at the end
    ranges: dict[int, tuple[list[ShardEntry], int]] = field(default_factory=dict)  # with the samples that were skipped


class Landing:
    """One run that lands in a target, locked.

    Attributes:
        target: Where it lands.
        drafts: The local folder of the drafts.
        entries: The files that are complete, by the names of their drafts.
        position: Where the samples after them begin; None for the beginning.
        state: What the sink stored with the last checkpoint.
        first: The number that distinguishes the files of this run.
        first_sample: The number of the first sample of this run in the folder.
    """

    def __init__(self, target: Target, run: RunFingerprint, options: Mapping[str, Any], mode: Mode) -> None:
        self.target, self._run, self._mode = target, run, mode
        self._identity = {**asdict(run), "options": json.loads(json.dumps(options, default=str)), "mode": mode}
        self.drafts = ""
        self.first = self.first_sample = 0
        self.entries: dict[str, ShardEntry] = {}
        self.position: Position | None = None
        self.state: dict[str, Any] = {}
        self._decided = False  # what becomes of what is in the work folder
        self._journal: Journal

    @property
    def hidden(self) -> bool:
        """Whether files stay invisible until the commit: all but those of a new set of shards, and remote shards."""
        return not self.target.streamed or (self.target.on_disk and self._mode != "new")

    @property
    def adds(self) -> bool:
        return self._mode == "append"

    @property
    def may_be_empty(self) -> bool:
        return False

    def tar_names(self, compress: str | None) -> tuple[str, int]:
        folder = self.drafts if self.target.on_disk else self.target.folder
        return f"{folder}/{self.target.label}" if self.target.label else folder, self.first + len(self.entries)

    def number_text(self, number: int) -> str:
        return f"{self.first_sample + number:09d}"

    @property
    def fingerprint(self) -> str:
        """What the manifest stores about the run, followed by the number of samples that were skipped, if any were."""
        return _fingerprint(self._identity)

    @contextmanager
    def opened(self, kind: str) -> Iterator[None]:
        """Lock the target and read its journal.

        Raises:
            PlanError: Another run is writing there, or another version of Penstock wrote the journal.
            StorageError: The target cannot be written.
        """
        target = self.target
        storage = None if target.on_disk else target.storage
        # Later runs on this machine find the temporary folder of a remote target again.
        drafts = nullcontext(target.work) if target.on_disk else temporary_folder(target.work)
        with work_lock(target.work, storage, kind) as self._check_lock, drafts as self.drafts:
            _check_old_journals(target)
            self._journal = Journal(target.work, storage)
            with closing(self._journal):
                try:
                    yield
                finally:
                    self._leave()

    def _leave(self) -> None:
        """Remove what the next run does not need: the drafts that no checkpoint covers, or everything."""
        if not self._decided:
            return
        with suppress(StorageError, OSError):
            if not self.entries and (self.hidden or not self.target.sizes()):
                self._journal.remove()
        self._remove_drafts(keep=self.entries)

    def begin(self) -> Packed | None:
        """Decide what is left to do: continue an interrupted run, start, or nothing because it is complete.

        Raises:
            PlanError: The target holds files or an unfinished run of another plan.
            StorageError: The target cannot be read or written.
        """
        found = self._load()
        self._remove_leftovers(found)
        manifest = self.target.manifest()
        if found is not None and found.commit is not None and self._is_visible(found, manifest):
            self._delete(found.old)
            if self._is_same(found):
                return self._complete([*found.entries.values()], found.commit, found.position)
            found = None
        if found is not None and self._is_same(found):
            return self._resume(found)
        if found is not None and (found.entries or found.commit is not None) and self._mode != "replace":
            raise self._other_run(found.header)
        return self._start(manifest)

    def _load(self) -> RunProgress | None:
        """Return what the journal says; None if there is none."""
        found: RunProgress | None = None
        try:
            for line, _, _ in self._journal.load():
                if "v" in line:
                    found = found or RunProgress(line)
                assert found is not None
                self._read_line(found, line)
                if "commit" in line:
                    found.commit, found.old = [*map(str, line["commit"])], tuple(map(str, line["old"]))
                    found.position = {"skipped": int(line["skipped"])}
                    found.header = {**found.header, "classes": line["classes"]}
                    self._check_names([*found.commit, *found.old])
                    if len(found.commit) != len(found.entries):
                        raise ValueError("the commit has other files than the run")
        except (StateError, ValueError, KeyError, TypeError) as exc:
            if self._mode == "replace":
                return None
            problem = exc if isinstance(exc, StateError) else self._journal.damaged(exc)
            raise PlanError(f"{problem}; mode='replace' starts over") from exc
        return found

    def _read_line(self, found: RunProgress, line: Mapping[str, Any]) -> None:
        """Add what a line of the journal says about complete drafts."""
        if "entry" in line:
            entry = ShardEntry(*line["entry"])
            self._check_draft(entry)
            found.entries[entry.name] = entry
            found.position, found.state = line["position"], dict(line.get("state") or {})

    def _check_draft(self, entry: ShardEntry) -> None:
        name = str(entry.name)
        is_draft = self.target.number(name) is not None if self.target.streamed else re.fullmatch(r"\d{5,}\.\w+", name)
        if not is_draft or "/" in name or min(int(entry.samples), int(entry.bytes)) < 0:
            raise ValueError(f"{name!r} is not a file of this run")

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if not self.target.owns(name):
                raise ValueError(f"{name!r} is not a file of this run")

    def _is_same(self, found: RunProgress) -> bool:
        return {name: found.header.get(name) for name in self._identity} == self._identity

    def _is_visible(self, found: RunProgress, manifest: Manifest | None) -> bool:
        """Return whether the manifest lists a run's files already, so that only the old ones are left to delete."""
        if manifest is None or (self.target.label and not self.target.streamed and not self._is_made(found, manifest)):
            return False
        entries = zip(found.commit or (), found.entries.values(), strict=True)
        return all(manifest.entry(name) == e._replace(name=name) for name, e in entries)

    def _is_made(self, found: RunProgress, manifest: Manifest) -> bool:
        """Return whether this run wrote the manifest and the file, whose name an earlier file had too."""
        made = manifest.made.get(self.target.label, "").partition(" ")[0]
        return made == _fingerprint(found.header) and self._draft_sizes().keys().isdisjoint(found.entries)

    def _other_run(self, header: Mapping[str, Any]) -> PlanError:
        theirs, ours = header.get("options") or {}, self._identity["options"]
        options = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
        difference = (
            f"with other options ({', '.join(options)})"
            if options
            else f"with mode={header.get('mode')!r}"
            if header.get("mode") != self._mode
            else "of another source"
            if header.get("source") != self._run.source
            else "of other stages, or with a function that was edited since"
        )
        dropped = f"remove {redacted(self.target.work)} to drop what it added"
        advice = dropped if header.get("mode") == "append" else "pass mode='replace' to start over"
        return PlanError(
            f"{redacted(self.target.folder)} holds an unfinished run {difference}; repeat that run to finish it, "
            f"or {advice}"
        )

    def _resume(self, found: RunProgress) -> Packed | None:
        """Take over an interrupted run of the same plan; its drafts may be gone, its visible files may not."""
        self.first, self.first_sample = int(found.header["first"]), int(found.header["number"])
        sizes = self._draft_sizes()
        if found.commit is not None:
            visible, lasting = self.target.sizes(), self.target.on_disk or not self.target.label or self.target.streamed
            done = zip(found.commit, found.entries.values(), strict=True)
            if all(sizes.get(e.name) == e.bytes or (lasting and visible.get(name) == e.bytes) for name, e in done):
                return self._finish(found)
        missing = [e for e in found.entries.values() if self._run.stream or sizes.get(e.name, -1) < e.bytes]
        if missing and not self.hidden and not self._run.stream:
            visible = self.target.sizes()
            if gone := [e.name for e in found.entries.values() if visible.get(e.name) != e.bytes]:
                raise PlanError(f"{gone[0]} was written before and is gone or changed; mode='replace' starts over")
        self._decided = True
        if missing and (self.hidden or self._run.stream):
            self._journal.start(found.header)
            self._remove_drafts(keep=())
            return None
        self.entries, self.position, self.state = found.entries, found.position, found.state
        self._remove_drafts(keep=self.entries)
        return None

    def _start(self, manifest: Manifest | None) -> Packed | None:
        """Check that the target may be written, and begin a journal."""
        existing, target = self.target.sizes(), self.target
        if self._mode == "new":
            mine = [e for e in manifest.shards if target.number(e.name) is not None] if manifest is not None else []
            is_whole = all(existing.get(entry.name) == entry.bytes for entry in mine)
            made, _, skipped = ("" if manifest is None else manifest.made.get(target.label, "")).partition(" ")
            if made == self.fingerprint and is_whole:
                return self._complete(mine, [entry.name for entry in mine], {"skipped": int(skipped or 0)})
            if existing or mine:
                names = sorted({*existing, *(entry.name for entry in mine)})
                holds = f"{len(names)} files of another run ({names[0]}, ...)" if len(names) > 1 else names[0]
                raise PlanError(
                    f"{redacted(target.folder)} holds {holds}, written from another source or with other options; "
                    "mode='append' adds to what is there, mode='replace' replaces it"
                )
        if self._mode == "replace" and not target.label:
            known = {entry.name for entry in manifest.shards} if manifest is not None else set()
            if foreign := sorted(name for name in existing if target.number(name) is None and name not in known):
                more = f" and {len(foreign) - 1} more files" if foreign[1:] else ""
                raise PlanError(
                    f"{redacted(target.folder)} holds {foreign[0]}{more}, which Penstock did not write, and which "
                    "mode='replace' would leave among the new files; remove them, or choose another folder"
                )
        if self._mode == "append" and target.is_file:
            raise PlanError(
                f"{redacted(target.url(target.label))}: mode='append' adds files to a folder; give a folder"
            )
        self.first = target.next_number(existing)
        if self._mode == "append" and manifest is not None:
            self.first_sample = sum(e.samples for e in manifest.shards if target.number(e.name) is not None)
        self._decided = True
        self._remove_drafts(keep=())
        if not target.on_disk:
            self._forget_file()
        self._journal.start({**self._identity, "first": self.first, "number": self.first_sample})
        return None

    def checkpoint(self, entry: ShardEntry, position: Position | None, state: Mapping[str, Any] | None = None) -> None:
        """Record that a draft is complete up to a position: a run that is interrupted later begins there.

        Raises:
            PlanError: Another run has taken over the remote folder.
            StorageError: The journal cannot be written.
        """
        self._check_lock()
        self.entries[entry.name] = entry
        self.state = dict(state or {})
        if not self.hidden and self.target.on_disk:
            self._publish(entry.name, entry.name)
        line = {"entry": entry, "position": position} | ({"state": self.state} if state else {})
        self._journal.append(json.dumps(line, separators=(",", ":")), sync=True)

    def commit(self, skipped: int, classes: Sequence[str] | None = None) -> Packed:
        """Make all files visible, then delete those that they replace.

        Raises:
            PlanError: Another run has taken over the remote folder.
            StorageError: A file cannot be written; the old set is still the current one.
        """
        names = self.target.final_names([*self.entries], self.first)
        manifest = self.target.manifest()
        numbers = {name: self.target.number(name) for name in self.target.sizes()}
        oldest = self.first if self._mode == "append" else 0
        old = {name for name, number in numbers.items() if number is not None and number >= oldest}
        if self._mode == "replace" and manifest is not None and not self.target.label:
            old |= {entry.name for entry in manifest.shards if self.target.owns(entry.name)}
        line = {"commit": names, "old": sorted(old - {*names}), "skipped": skipped, "classes": classes}
        self._check_lock()
        self._journal.append(json.dumps(line, separators=(",", ":")), sync=True)
        run = RunProgress(
            {"classes": classes}, self.entries, {"skipped": skipped}, {}, names, tuple(sorted(old - {*names}))
        )
        return self._finish(run)

    def _finish(self, run: RunProgress) -> Packed:
        """Publish, write the manifest, delete what was replaced, and remove the journal; may be repeated."""
        names, target = run.commit or [], self.target
        pairs = list(zip(run.entries, names, strict=True))
        if target.on_disk:
            self._forget_file()
            for draft, name in reversed(pairs):  # see check_sets
                self._publish(draft, name)
        else:
            with ThreadPoolExecutor(_UPLOADS, thread_name_prefix="penstock-upload") as pool:
                list(pool.map(lambda pair: self._publish(*pair), pairs))
        entries = [entry._replace(name=name) for entry, name in zip(run.entries.values(), names, strict=True)]
        skipped = self._skipped(run.position)
        made = {target.label: "" if self._mode == "append" else f"{self.fingerprint} {skipped}".removesuffix(" 0")}
        classes = run.header.get("classes")
        write_manifest_at(
            target.folder, target.given, entries, target.format, without=[*run.old], classes=classes, made=made
        )
        self._delete(run.old)
        return self._complete(entries, names, run.position)

    def _forget_file(self) -> None:
        """Remove the entry of a single file that is about to be replaced: it does not describe the new one."""
        target = self.target
        if self._mode == "replace" and target.is_file and target.streamed and target.manifest() is not None:
            write_manifest_at(target.folder, target.given, (), target.format, without=[target.label], made={})

    def _publish(self, draft: str, name: str) -> None:
        """Make a draft visible, unless that happened already."""
        path, url = os.path.join(self.drafts, draft), self.target.url(name)
        if not self.target.on_disk:
            if os.path.exists(path):
                put_file(self.target.storage, url, path)
            return
        for suffix in (INDEX_SUFFIX, ""):  # a shard never appears without its index
            with suppress(FileNotFoundError):
                os.replace(path + suffix, url + suffix)

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            for suffix in (INDEX_SUFFIX, "") if self.target.format == "tar" else ("",):
                self.target.storage.delete(self.target.url(name + suffix))

    def _complete(self, entries: Sequence[ShardEntry], names: Sequence[str], position: Position | None) -> Packed:
        """Return the result of a run that left nothing to do."""
        self.entries, self._decided = {}, False
        self._remove_drafts(keep=())
        self._journal.remove()  # at the very end: without it, the same append is another one
        samples, nbytes = sum(entry.samples for entry in entries), sum(entry.bytes for entry in entries)
        return Packed(redacted(self.target.folder), tuple(names), samples, nbytes, self._skipped(position))

    @staticmethod
    def _skipped(position: Position | None) -> int:
        return 0 if position is None else int(position.get("skipped", 0))

    def _draft_sizes(self) -> dict[str, int]:
        with os.scandir(self.drafts) as found:
            return {one.name: one.stat().st_size for one in found if one.is_file(follow_symlinks=False)}

    def _remove_drafts(self, keep: Iterable[str]) -> None:
        kept = {LOCK, OWNER, JOURNAL, *keep, *(f"{name}{INDEX_SUFFIX}" for name in keep)}
        with os.scandir(self.drafts) as found:
            for one in found:
                if one.name not in kept and not one.is_dir(follow_symlinks=False):
                    os.unlink(one.path)

    def _remove_leftovers(self, found: RunProgress | None) -> None:
        """Remove what killed runs left in the folder itself: partial manifests, and uploads that never ended."""
        target = self.target
        if target.on_disk:
            remove_partials(target.folder, manifest_name(target.format))
            return
        drop_uploads = getattr(target.storage, "drop_uploads", None)
        if drop_uploads is None or found is None:
            return
        try:
            drop_uploads(target.folder, target.owns)
        except StorageError as error:  # such uploads are invisible and only take up space
            _log.info("uploads that were never completed may be left: %s", error)


def _fingerprint(run: Mapping[str, Any]) -> str:
    """Return what a manifest stores about a run, given the header of its journal."""
    text = json.dumps([run["source"], run["stages"], run["options"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _check_old_journals(target: Target) -> None:
    names = [pattern.format(target.format, target.label or "-") for pattern in _OLD_JOURNALS] if target.on_disk else []
    names += [_OLD_TAR_JOURNAL] if target.format == "tar" else []
    for name in names:
        if os.path.lexists(target.url(name)) if target.on_disk else exists(target.storage, target.url(name)):
            raise PlanError(
                f"{redacted(target.folder)} holds {name}, the journal of an unfinished run of another version of "
                "Penstock; finish the run with that version, or remove it"
            )


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn an ``OSError`` into a ``StorageError`` that names the URL."""
    try:
        yield
    except StorageError:
        raise
    except OSError as exc:
        raise StorageError(f"cannot write: {exc.strerror or exc}", redacted(url)) from exc
