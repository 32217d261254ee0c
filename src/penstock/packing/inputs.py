"""Recognises what a user gives to ``ps.pack``: a plan that reads the source, its class names and its keys."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from penstock.codecs.features import ClassLabel
from penstock.codecs.stage import Encode
from penstock.errors import PlanError, StorageError
from penstock.formats.items import ItemsSource
from penstock.formats.lmdb import is_environment
from penstock.formats.manifest import MANIFEST, read_manifest_at
from penstock.formats.tables.huggingface import HuggingFaceSource, is_huggingface_dataset
from penstock.formats.tar.shard_names import TAR_SUFFIXES, on_disk
from penstock.formats.tar.source import TarSource
from penstock.packing.file_list import (
    LIST_SUFFIXES,
    FileEntry,
    FileList,
    file_entry,
    list_folder,
    list_remote_folder,
    read_list,
)
from penstock.packing.item_fields import EncodeItem, GetItem
from penstock.plan import ByObject, LateShuffle, Plan, Resources, Shuffle
from penstock.plan.values import Workers
from penstock.storage import Storage, exists, local_path, open_storage, redacted, url_patterns
from penstock.storage.protocol import scheme, without_query

_LATE_WINDOW = 1000  # samples of a window, where the order of the source cannot be shuffled
_MAX_LISTED = 100_000  # files of a folder among which shards are searched for


@dataclass(frozen=True, slots=True)
class PackInput:
    """A source to pack.

    Attributes:
        plan: Reads the source; the fields of its samples are bytes, unless ``typed``.
        classes: The class names by number, for the numbers in ``cls``; None if unknown.
        numbered_keys: Whether keys are made of the number of the sample (and the name of its file).
        typed: Whether the values of samples have their own types instead of being bytes.
    """

    plan: Plan
    classes: tuple[str, ...] | None = None
    numbered_keys: bool = True
    typed: bool = False

    @property
    def files(self) -> FileList | None:
        """The list of files, if the source is one."""
        return self.plan.source if isinstance(self.plan.source, FileList) else None

    def check_outside(self, folder: str) -> None:
        """Check that files are not packed into the folder that holds them.

        Raises:
            PlanError: The folder is the source folder or inside it.
        """
        if self.files is None:
            return
        inside = f"{redacted(folder)} is inside the folder that is packed; choose a folder outside of it"
        listed = scheme(folder) == scheme(self.files.origin) != "file" and not self.files.entries[0].line
        if listed and f"{folder.rstrip('/')}/".startswith(f"{self.files.origin}/"):
            raise PlanError(inside)
        if not on_disk(folder) or not os.path.isdir(self.files.origin):
            return
        source, target = os.path.realpath(self.files.origin), os.path.realpath(local_path(folder))
        if os.path.commonpath([source, target]) == source:
            raise PlanError(inside)


def recognise(
    source: Any, *, workers: Workers, image: str, storage: Storage | None = None, typed: bool = False
) -> PackInput:
    """Find out what kind of source was given.

    Args:
        source: The argument of the user.
        workers: How many workers read the source.
        image: The extension of images that are not encoded yet.
        storage: The storage of a source that is a URL.
        typed: Keep values as they are if the source knows their types.

    Raises:
        PlanError: The source cannot be packed.
        StorageError: The source is a path and cannot be read.
    """
    if isinstance(getattr(source, "plan", None), Plan):
        plan: Plan = source.plan
        return PackInput(plan if typed else plan.then(Encode()), None, False, typed)
    if isinstance(source, str) and source.startswith("hf:") and not source.startswith("hf://"):
        name, _, split = source.removeprefix("hf:").partition("#")
        return _feature_input(HuggingFaceSource(name, split or None, workers), image, typed)
    if isinstance(source, str | os.PathLike):
        return _path_input(os.fspath(source), workers, storage)
    if is_huggingface_dataset(source):
        return _feature_input(HuggingFaceSource(ByObject(source), None, workers), image, typed)
    if hasattr(source, "features") and hasattr(source, "cast_column"):
        return _hugging_face_input(source, workers, image)
    if hasattr(source, "columns") and (hasattr(source, "iloc") or hasattr(source, "to_arrow")):
        table = "pyarrow.Table.from_pandas(frame)" if hasattr(source, "iloc") else "frame.to_arrow()"
        name = type(source).__name__
        raise PlanError(f"a {name} cannot be packed as it is: write ps.pack(ps.from_arrow({table}), folder)")
    if isinstance(source, Mapping):
        names = ", ".join(map(str, source))
        raise PlanError(f"the source holds several datasets ({names}): pack each into its own folder")
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise PlanError(
            f"a {type(source).__name__} cannot be packed: give a folder of class folders, a CSV or JSON-lines list, "
            "a dataset with __len__ and __getitem__, or a ps.Dataset"
        )
    return _map_style_input(source, workers, image)


def shuffle_plan(plan: Plan) -> Plan:
    """Return the plan with its samples shuffled by its seed, unless it shuffles already."""
    if any(isinstance(stage, Shuffle | LateShuffle) for stage in plan.stages):
        return plan
    if plan.source.streams and isinstance(plan.source, HuggingFaceSource):
        return replace(plan, stages=(LateShuffle(_LATE_WINDOW), *plan.stages))
    if plan.commutes and not any(stage.name == "flat_map" for stage in plan.body):
        return plan.then(Shuffle(None, 16, plan.source.random_access))
    *before, last = plan.stages
    if not isinstance(last, Encode):
        return plan.then(LateShuffle(_LATE_WINDOW))
    # The same order as after the encoding, but the window holds smaller values.
    return replace(plan, stages=(*before, LateShuffle(_LATE_WINDOW), last))


def _path_input(path: str, workers: Workers, storage: Storage | None) -> PackInput:
    local = local_path(path) if on_disk(path) else None
    if local is None and scheme(path) != "file" and (files := _remote_files(path, workers, storage)) is not None:
        return _file_input(files)
    if local is not None and is_environment(local):
        advice = "write ps.pack(ps.read_lmdb(path, fields=...), folder), or use penstock convert"
        raise PlanError(f"{path}: it is an LMDB environment, whose records may be anything: {advice}")
    if local is not None and os.path.isdir(local) and not _holds_shards(local):
        return _file_input(list_folder(local.rstrip("/") or "/", workers))
    if local is not None and local.lower().endswith(LIST_SUFFIXES):
        return _file_input(read_list(local, workers, storage))
    if local is not None and not local.endswith(TAR_SUFFIXES) and not os.path.isdir(local):
        if not os.path.exists(local):
            raise PlanError(f"{path}: there is no such folder or list")
        raise PlanError(f"{path}: it is not a folder, a shard or a list ({', '.join(LIST_SUFFIXES)})")
    source: Any = TarSource(url_patterns(path), workers, storage=storage)
    plan = Plan(source, (Encode(),))
    manifest = read_manifest_at(local) if local is not None and os.path.isdir(local) else None
    return PackInput(plan, None if manifest is None else manifest.classes, False)


def _remote_files(url: str, workers: Workers, storage: Storage | None) -> FileList | None:
    """Return the files of a remote list, or of a remote folder without shards; None if the URL names shards."""
    if without_query(url).lower().endswith(LIST_SUFFIXES):
        return read_list(url, workers, storage)
    if without_query(url).endswith(TAR_SUFFIXES) or "::" in url or re.search(r"[*?\[{]", url.partition("://")[2]):
        return None
    if scheme(url) not in ("http", "https"):
        return list_remote_folder(url, workers, storage)
    try:  # of a server that cannot list, only a folder of shards with a manifest can be read
        shards = exists(open_storage(url, storage), f"{without_query(url).rstrip('/')}/{MANIFEST}")
        return None if shards else list_remote_folder(url, workers, storage)
    except StorageError:
        return None


def _holds_shards(folder: str) -> bool:
    with os.scandir(folder) as found:
        names = [entry.name for entry in islice(found, _MAX_LISTED) if entry.is_file()]
    return MANIFEST in names or any(name.endswith(TAR_SUFFIXES) for name in names)


def _file_input(files: FileList) -> PackInput:
    return PackInput(Plan(files), files.classes)


def _map_style_input(dataset: Any, workers: Workers, image: str) -> PackInput:
    files = _underlying_files(dataset)
    classes = _class_names(getattr(_base_dataset(dataset), "classes", None))
    if files is not None:
        return _file_input(FileList(type(dataset).__name__, files, classes, workers))
    return _item_input(dataset, workers, image, classes)


def _item_input(dataset: Any, workers: Workers, image: str, classes: tuple[str, ...] | None) -> PackInput:
    # Map-style datasets are written for worker processes that each have a copy; few promise that threads may share one.
    reading = Resources(1) if workers is None else Resources(workers, "processes")
    encoding = Resources((1, os.cpu_count() or 1)) if workers is None else reading
    stages = (GetItem(ByObject(dataset), resources=reading), EncodeItem(image, resources=encoding))
    return PackInput(Plan(ItemsSource(ByObject(range(len(dataset)))), stages), classes)


def _base_dataset(dataset: Any) -> Any:
    """Return the dataset that a subset, or a subset of a subset, selects from."""
    while _is_subset(dataset):
        dataset = dataset.dataset
    return dataset


def _is_subset(dataset: Any) -> bool:
    return isinstance(getattr(dataset, "indices", None), Sequence) and hasattr(dataset, "dataset")


def _underlying_files(dataset: Any) -> list[FileEntry] | None:
    """Return the files of a dataset such as torchvision's ``ImageFolder``; None if its items are not just its files."""
    if _is_subset(dataset):
        entries = _underlying_files(dataset.dataset)
        return None if entries is None else [entries[i] for i in dataset.indices]
    rows = getattr(dataset, "samples", None) or getattr(dataset, "imgs", None)
    transforms = ("transform", "target_transform", "transforms")
    has_transform = any(getattr(dataset, name, None) is not None for name in transforms)
    if has_transform or not isinstance(rows, Sequence) or not rows or len(rows) != len(dataset):
        return None
    if not all(isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) for row in rows):
        return None
    has_labels = all(isinstance(row[1], int) for row in rows)
    if not (has_labels and os.path.isfile(rows[0][0]) and _is_unchanged(dataset[0], rows[0])):
        return None
    labels = {label: {"cls": b"%d" % label} for _, label in rows}
    return [file_entry(path, labels[label]) for path, label in rows]


def _is_unchanged(item: Any, row: tuple[str, int]) -> bool:
    """Return whether an item seems to be the image and the label of a row, without changes."""
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and type(item[0]).__module__.partition(".")[0] == "PIL"
        and bool(item[1] == row[1])
    )


def _feature_input(source: HuggingFaceSource, image: str, typed: bool) -> PackInput:
    """Return the input for a dataset that the engine's workers read, and whose features describe its fields."""
    if typed:
        return PackInput(Plan(source), None, False, typed)
    features = source.open().traits.features
    labels = (_class_names(feature.names) for feature in features.values() if isinstance(feature, ClassLabel))
    encode = EncodeItem(image, resources=Resources(source.workers))
    return PackInput(Plan(source, (encode,)), next(labels, None))


def _hugging_face_input(dataset: Any, workers: Workers, image: str) -> PackInput:
    classes = None
    for name, feature in dict(dataset.features).items():
        kind = type(feature).__name__
        if kind in ("Image", "Audio") and getattr(feature, "decode", True):
            dataset = dataset.cast_column(name, type(feature)(decode=False))  # keeps the original bytes
        elif kind == "ClassLabel" and classes is None:
            classes = _class_names(getattr(feature, "names", None))
    if not hasattr(dataset, "__len__"):
        raise PlanError("a streaming dataset cannot be packed; load it without streaming=True")
    return _item_input(dataset, workers, image, classes)


def _class_names(names: Any) -> tuple[str, ...] | None:
    """Return class names as a tuple; None if the value is not a list of names, or empty."""
    valid = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(name, str) for name in names)
    return tuple(names) if valid and names else None
