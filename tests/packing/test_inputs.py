"""A source is recognised by its methods, and the original bytes of files are packed where they exist."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import pytest
from PIL import Image

import penstock as ps
from penstock.errors import PlanError, StorageError
from penstock.formats.manifest import read_manifest_at
from penstock.packing.inputs import recognise


class ImageFolder:
    """Has the interface of torchvision's class of that name: paths and labels, and images on request."""

    def __init__(self, folder: Path, transform: Any = None) -> None:
        self.classes = ["cat", "dog"]
        self.samples = [
            (str(folder / name / f"{n}.jpg"), label) for label, name in enumerate(self.classes) for n in (1, 2)
        ]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        path, label = self.samples[number]
        image = Image.open(path).convert("RGB")
        return (self.transform(image) if self.transform else image), label


class Subset:
    def __init__(self, dataset: Any, indices: list[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> Any:
        return self.dataset[self.indices[number]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "src" / name).mkdir(parents=True)
        for number in (1, 2):
            Image.new("RGB", (8, 8), (label * 100, number * 50, 0)).save(tmp_path / "src" / name / f"{number}.jpg")
    return tmp_path / "src"


def pack_and_read(source: Any, **options: Any) -> list[dict[str, Any]]:
    url = "memory://inputs/out"
    ps.pack(source, url, shuffle=False, mode="replace", **options)
    return ps.read_tar(url).take_all()


def test_the_files_of_a_dataset_are_packed_unchanged(folder: Path) -> None:
    samples = pack_and_read(ImageFolder(folder))
    assert [s["jpg"] for s in samples] == [
        (folder / n).read_bytes() for n in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/2.jpg")
    ]
    assert [s["cls"] for s in samples] == [b"0", b"0", b"1", b"1"]
    manifest = read_manifest_at("memory://inputs/out")
    assert manifest is not None
    assert manifest.classes == ("cat", "dog")


def test_the_files_of_a_subset_are_packed_unchanged(folder: Path) -> None:
    samples = pack_and_read(Subset(Subset(ImageFolder(folder), [3, 2, 0]), [1, 0]))
    assert [s["jpg"] for s in samples] == [(folder / n).read_bytes() for n in ("dog/1.jpg", "dog/2.jpg")]


def test_the_items_of_a_dataset_with_a_transform_are_encoded(folder: Path) -> None:
    samples = pack_and_read(ImageFolder(folder, lambda image: image.resize((4, 4))))
    assert [sorted(set(s) - {"__key__", "__url__"}) for s in samples] == [["cls", "png"]] * 4


def test_the_items_of_a_dataset_are_packed_if_they_differ_from_its_files(folder: Path) -> None:
    class Relabelled(ImageFolder):
        def __getitem__(self, number: int) -> tuple[Any, int]:
            image, label = super().__getitem__(number)
            return image, label + 5

    assert [s["cls"] for s in pack_and_read(Relabelled(folder))] == [b"5", b"5", b"6", b"6"]


@dataclass
class ClassLabel:
    names: list[str]


@dataclass
class Value:
    dtype: str


@dataclass
class Image_:
    decode: bool = True


Image_.__name__ = "Image"


class HuggingFace:
    """Has the part of the interface of a Hugging Face dataset that packing uses."""

    def __init__(self, rows: list[dict[str, Any]], features: dict[str, Any]) -> None:
        self.rows, self.features = rows, features

    def cast_column(self, name: str, feature: Any) -> HuggingFace:
        return HuggingFace(self.rows, {**self.features, name: feature})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = dict(self.rows[number])
        if self.features["image"].decode:
            row["image"] = Image.new("RGB", (2, 2))
        return row


def test_a_hugging_face_dataset_keeps_its_bytes_and_class_names() -> None:
    rows = [{"image": {"bytes": b"\xff\xd8\xff%d" % n, "path": None}, "label": n, "text": f"t{n}"} for n in range(2)]
    source = HuggingFace(rows, {"image": Image_(), "label": ClassLabel(["no", "yes"]), "text": Value("string")})
    samples = pack_and_read(source)
    assert [(s["jpg"], s["cls"], s["txt"]) for s in samples] == [
        (b"\xff\xd8\xff0", b"0", b"t0"),
        (b"\xff\xd8\xff1", b"1", b"t1"),
    ]
    manifest = read_manifest_at("memory://inputs/out")
    assert manifest is not None
    assert manifest.classes == ("no", "yes")


def test_a_dict_of_datasets_is_refused() -> None:
    with pytest.raises(PlanError, match=r"several datasets \(train, test\): pack each"):
        recognise({"train": [(1, 2)], "test": [(3, 4)]}, workers=None, image="png")


def test_a_streaming_dataset_is_refused() -> None:
    class Streaming:
        features: dict[str, Any] = {}  # noqa: RUF012

        def cast_column(self) -> None: ...

    with pytest.raises(PlanError, match="without streaming=True"):
        recognise(Streaming(), workers=None, image="png")


def test_a_path_that_is_not_a_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_text("")
    with pytest.raises(PlanError, match="it is not a folder, a shard or a list"):
        recognise(tmp_path / "a.xlsx", workers=None, image="png")
    with pytest.raises(StorageError, match="no such object"):
        recognise("memory://test-inputs/list.csv", workers=None, image="png")
    with pytest.raises(PlanError, match="no such folder or list"):
        recognise(str(tmp_path / "missing"), workers=None, image="png")


@pytest.mark.parametrize("subdir", [True, False])
def test_an_lmdb_environment_is_read_by_the_function_that_knows_its_fields(tmp_path: Path, subdir: bool) -> None:
    path, target = tmp_path / "a.lmdb", str(tmp_path / "out")
    with lmdb.open(str(path), map_size=1 << 20, subdir=subdir) as env, env.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
    with pytest.raises(PlanError, match=r"a\.lmdb: it is an LMDB environment.*ps\.pack\(ps\.read_lmdb\(path, fields="):
        ps.pack(path, target)
    assert ps.pack(ps.read_lmdb(path), target).samples == 1
