"""What a user gives to be packed, recognised: a plan that reads it, and a fingerprint to know it again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from penstock.codecs.features import ClassLabel
from penstock.codecs.stage import Encode
from penstock.engines import Program
from penstock.errors import PlanError
from penstock.formats.items import ItemsSource
from penstock.formats.manifest import MANIFEST, read_manifest_at
from penstock.formats.tables.huggingface import HuggingFaceSource, readable
from penstock.formats.tar.shard_names import TAR_SUFFIXES, on_disk
from penstock.formats.tar.source import TarSource
from penstock.packing.file_list import LISTS, Entry, FileList, list_folder, read_list
from penstock.packing.item_fields import Ask, StoreFields
from penstock.plan import ByObject, LateShuffle, Plan, Resources, Shuffle
from penstock.plan.values import Workers
from penstock.storage import Storage, local_path, redacted, spell


@dataclass(frozen=True, slots=True)
class PackInput:
    """Something to be packed.

    Attributes:
        plan: Reads it, and gives samples whose fields are bytes, unless it is ``typed``.
        classes: What the numbers in ``cls`` mean, where that is known.
        numbered: Keys are made of the number in the shards (and the file's name).
        said: What distinguishes it from other sources, beyond the shards that its plan reads.
        typed: The values of its samples are what they mean, and no bytes.
    """

    plan: Plan
    classes: tuple[str, ...] | None = None
    numbered: bool = True
    said: str = ""
    typed: bool = False

    @property
    def files(self) -> FileList | None:
        """The list of files, where it is one."""
        return self.plan.source if isinstance(self.plan.source, FileList) else None

    def check_outside(self, folder: str) -> None:
        """Require that files are not packed into their own folder.

        Raises:
            PlanError: they are.
        """
        if self.files is None or not on_disk(folder) or not os.path.isdir(self.files.origin):
            return
        source, target = os.path.realpath(self.files.origin), os.path.realpath(local_path(folder))
        if os.path.commonpath([source, target]) == source:
            raise PlanError(f"{folder} lies in the folder that is packed; choose one outside of it")

    def fingerprint(self, program: Program) -> str:
        """The same for the same source, on any machine."""
        order = "" if program.stream is not None else program.identity(counts=True)
        return hashlib.sha256(f"{self.said}\n{order}".encode()).hexdigest()[:32]


def recognise(
    source: Any, *, workers: Workers, image: str, storage: Storage | None = None, typed: bool = False
) -> PackInput:
    """Find out what ``source`` is.

    Args:
        source: What a user gave.
        workers: How many read at a time.
        image: How images are stored that have no bytes of their own.
        storage: Where it lies, if it is a URL.
        typed: Leave values as they are where the source knows what they mean.

    Raises:
        PlanError: nothing that can be packed.
        StorageError: it is a path, and cannot be read.
    """
    if isinstance(getattr(source, "plan", None), Plan):
        plan: Plan = source.plan
        return PackInput(plan if typed else plan.then(Encode()), None, False, plan.describe(), typed)
    if isinstance(source, str) and source.startswith("hf:") and not source.startswith("hf://"):
        name, _, split = source.removeprefix("hf:").partition("#")
        return _by_features(HuggingFaceSource(name, split or None, workers), image, source, typed)
    if isinstance(source, str | os.PathLike):
        return _by_path(os.fspath(source), workers, storage)
    if readable(source):
        mark = getattr(source, "_fingerprint", None) or getattr(source, "__name__", type(source).__name__)
        return _by_features(HuggingFaceSource(ByObject(source), None, workers), image, f"dataset {mark}", typed)
    if hasattr(source, "features") and hasattr(source, "cast_column"):
        return _hugging_face(source, workers, image)
    if isinstance(source, Mapping):
        raise PlanError(f"this is several datasets ({', '.join(map(str, source))}): pack each into a folder of its own")
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise PlanError(
            f"a {type(source).__name__} cannot be packed: give a folder of class folders, a CSV or JSON-lines list, "
            "a dataset with a length and items by number, or a ps.Dataset"
        )
    return _map_style(source, workers, image)


def shuffled(plan: Plan) -> Plan:
    """The plan in an order by the seed, unless it has an order of its own."""
    if any(isinstance(stage, Shuffle | LateShuffle) for stage in plan.stages):
        return plan
    if getattr(plan.source, "streams", False) and isinstance(plan.source, HuggingFaceSource):
        return replace(plan, stages=(LateShuffle(1000), *plan.stages))
    if plan.commutes and not any(stage.name == "flat_map" for stage in plan.body):
        return plan.then(Shuffle(None, 16, plan.source.random_access))
    *before, last = plan.stages
    if not isinstance(last, Encode):
        return plan.then(LateShuffle(1000))
    return replace(plan, stages=(*before, LateShuffle(1000), last))  # the same as after it, of smaller values


def _by_path(path: str, workers: Workers, storage: Storage | None) -> PackInput:
    place = local_path(path) if on_disk(path) else None
    if place is None and path.lower().endswith(LISTS):
        raise PlanError(f"{redacted(path)}: lists, and the files they name, are read from this machine's disks only")
    if place is not None and os.path.isdir(place) and not _holds_shards(place):
        return _listed(list_folder(place.rstrip("/") or "/", workers))
    if place is not None and place.lower().endswith(LISTS):
        return _listed(read_list(place, workers))
    if place is not None and not place.endswith(TAR_SUFFIXES) and not os.path.isdir(place):
        if not os.path.exists(place):
            raise PlanError(f"{path}: there is no such folder or list")
        raise PlanError(f"{path}: no list of a known kind ({', '.join(LISTS)}), and no shard")
    source: Any = TarSource(spell(path), workers, storage=storage)
    plan = Plan(source, (Encode(),))
    manifest = read_manifest_at(place) if place is not None and os.path.isdir(place) else None
    return PackInput(plan, None if manifest is None else manifest.classes, False, "shards")


def _holds_shards(folder: str) -> bool:
    with os.scandir(folder) as found:
        names = [entry.name for entry in islice(found, 100_000) if entry.is_file()]
    return MANIFEST in names or any(name.endswith(TAR_SUFFIXES) for name in names)


def _listed(files: FileList) -> PackInput:
    return PackInput(Plan(files), files.classes, True, files.identity())


def _map_style(dataset: Any, workers: Workers, image: str) -> PackInput:
    files = _files_of(dataset)
    classes = _names(getattr(_innermost(dataset), "classes", None))
    if files is not None:
        return _listed(FileList(type(dataset).__name__, files, classes, workers))
    return _fetched(dataset, workers, image, classes, f"{type(dataset).__qualname__} of {len(dataset)}")


def _fetched(dataset: Any, workers: Workers, image: str, classes: tuple[str, ...] | None, said: str) -> PackInput:
    # Such datasets are made for worker processes that each have a copy; that threads may share one, nobody says.
    asking = Resources(1) if workers is None else Resources(workers, "processes")
    storing = Resources((1, os.cpu_count() or 1)) if workers is None else asking
    stages = (Ask(ByObject(dataset), resources=asking), StoreFields(image, resources=storing))
    return PackInput(Plan(ItemsSource(ByObject(range(len(dataset)))), stages), classes, True, said)


def _innermost(dataset: Any) -> Any:
    """The dataset below choices of items."""
    while _is_choice(dataset):
        dataset = dataset.dataset
    return dataset


def _is_choice(dataset: Any) -> bool:
    return isinstance(getattr(dataset, "indices", None), Sequence) and hasattr(dataset, "dataset")


def _files_of(dataset: Any) -> list[Entry] | None:
    """The files behind a dataset of images in folders, if its items are nothing but them."""
    if _is_choice(dataset):
        below = _files_of(dataset.dataset)
        return None if below is None else [below[i] for i in dataset.indices]
    rows = getattr(dataset, "samples", None) or getattr(dataset, "imgs", None)
    changed = any(getattr(dataset, name, None) is not None for name in ("transform", "target_transform", "transforms"))
    if changed or not isinstance(rows, Sequence) or not rows or len(rows) != len(dataset):
        return None
    if not all(isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) for row in rows):
        return None
    if not (all(isinstance(row[1], int) for row in rows) and os.path.isfile(rows[0][0]) and _plain(dataset, rows[0])):
        return None
    labels = {label: {"cls": b"%d" % label} for _, label in rows}
    return [Entry(path, labels[label]) for path, label in rows]


def _plain(dataset: Any, row: tuple[str, int]) -> bool:
    """Whether the first item is the image of the first file, as far as one can see."""
    item = dataset[0]
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and type(item[0]).__module__.partition(".")[0] == "PIL"
        and bool(item[1] == row[1])
    )


def _by_features(source: HuggingFaceSource, image: str, said: str, typed: bool) -> PackInput:
    """A dataset whose features say what its fields are, read by the engine's workers."""
    if typed:
        return PackInput(Plan(source), None, False, said, typed)
    known = source.open().features or {}
    labels = (_names(feature.names) for feature in known.values() if isinstance(feature, ClassLabel))
    store = StoreFields(image, resources=Resources(source.workers))
    return PackInput(Plan(source, (store,)), next(labels, None), True, said)


def _hugging_face(dataset: Any, workers: Workers, image: str) -> PackInput:
    classes = None
    for name, feature in dict(dataset.features).items():
        kind = type(feature).__name__
        if kind in ("Image", "Audio") and getattr(feature, "decode", True):
            dataset = dataset.cast_column(name, type(feature)(decode=False))  # the bytes as they are
        elif kind == "ClassLabel" and classes is None:
            classes = _names(getattr(feature, "names", None))
    if not hasattr(dataset, "__len__"):
        raise PlanError("a streaming dataset cannot be packed; load it without streaming=True")
    mark = getattr(dataset, "_fingerprint", None) or sorted(dataset.features)
    return _fetched(dataset, workers, image, classes, f"dataset {mark} of {len(dataset)}")


def _names(given: Any) -> tuple[str, ...] | None:
    usable = isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(name, str) for name in given)
    return tuple(given) if usable and given else None
