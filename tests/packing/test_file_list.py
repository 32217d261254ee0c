"""Folders and lists of files become samples, and an error names the line of the list that is not valid."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError
from penstock.packing.file_list import FileEntry, FileList, list_folder, list_remote_folder, read_list, safe_stem
from penstock.plan import Fields
from penstock.storage import Memory

ZERO = np.zeros(1, np.int64)
BUCKET = f"memory://file-list-{os.getpid()}"  # of this process: runs lock their targets


def write_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def relative_entries(files: FileList, folder: Path) -> list[tuple[str, dict[str, bytes]]]:
    return [(str(Path(str(path)).relative_to(folder)), fields) for path, fields, *_ in files.entries]


def test_classes_are_numbered_by_name_and_files_sorted_by_path(tmp_path: Path) -> None:
    write_files(tmp_path, "dog/b.jpg", "dog/deep/a.jpg", "cat/z.png", "cat/.hidden", ".git/x", "readme.txt")
    (tmp_path / "empty").mkdir()
    files = list_folder(str(tmp_path))
    assert files.classes == ("cat", "dog", "empty")
    assert relative_entries(files, tmp_path) == [
        ("cat/z.png", {"cls": b"0"}),
        ("dog/b.jpg", {"cls": b"1"}),
        ("dog/deep/a.jpg", {"cls": b"1"}),
    ]


def test_a_folder_without_subfolders_has_no_classes(tmp_path: Path) -> None:
    files = list_folder(str(write_files(tmp_path, "b.jpg", "a.jpg")))
    assert files.classes is None
    assert relative_entries(files, tmp_path) == [("a.jpg", {}), ("b.jpg", {})]


def test_an_image_beside_class_folders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"b\.JPG is beside the class folders"):
        list_folder(str(write_files(tmp_path, "cat/a.jpg", "b.JPG")))


def test_an_empty_or_missing_folder_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no files to pack"):
        list_folder(str(tmp_path))
    with pytest.raises(StorageError, match="cannot read: No such file"):
        list_folder(str(tmp_path / "missing"))


def test_the_identity_depends_on_names_labels_and_stamps_but_not_on_the_folder(tmp_path: Path) -> None:
    def identity(name: str, *paths: str, time_ns: int = 5) -> str:
        write_files(tmp_path / name, *paths)
        for path in (tmp_path / name).rglob("*.jpg"):
            os.utime(path, ns=(time_ns, time_ns))
        return list_folder(str(tmp_path / name)).identity()

    one = identity("one", "cat/a.jpg", "dog/b.jpg")
    assert one == identity("two", "cat/a.jpg", "dog/b.jpg")
    assert one != identity("two", time_ns=6)
    assert one != identity("three", "cat/a.jpg", "dog/c.jpg")


def write_text(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_columns_become_fields(tmp_path: Path) -> None:
    write_files(tmp_path, "img/a.JPG", "img/b.png")
    text = "File,Label,caption,width,note\nimg/a.JPG,3,one,10,x\nimg/b.png,4,two,20,\n"
    ps.pack(write_text(tmp_path / "list.csv", text), tmp_path / "out", shuffle=False)
    first, second = ps.read_tar(str(tmp_path / "out")).decode(jpg="bytes", png="bytes")
    assert first["jpg"] == b"img/a.JPG"
    assert (first["cls"], first["txt"], first["json"]) == (3, "one", {"width": "10", "note": "x"})
    assert second["png"] == b"img/b.png"
    assert first["__key__"] == "000000000-a"


def test_json_lines_keep_their_types_and_labels_are_numbered(tmp_path: Path) -> None:
    write_files(tmp_path, "a.jpg", "b.jpg")
    rows: list[dict[str, Any]] = [
        {"path": "a.jpg", "label": "zebra", "box": [1, 2.5]},
        {"path": "b.jpg", "label": "ape", "box": None},
    ]
    files = read_list(write_text(tmp_path / "l.jsonl", "\n\n".join(map(json.dumps, rows))))
    assert files.classes == ("ape", "zebra")
    assert [entry.fields["cls"] for entry in files.entries] == [b"1", b"0"]
    assert json.loads(files.entries[0].fields["json"]) == {"box": [1, 2.5]}
    assert [entry.line for entry in files.entries] == [1, 3]


def test_a_list_of_texts_needs_no_files(tmp_path: Path) -> None:
    ps.pack(write_text(tmp_path / "l.tsv", "text\tlabel\nh\u00e9\t1\nyo\t0\n"), tmp_path / "out", shuffle=False)
    assert [(s["txt"], s["cls"]) for s in ps.read_tar(str(tmp_path / "out")).decode()] == [("h\u00e9", 1), ("yo", 0)]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("l.csv", "path,label\na.jpg,1\nb.jpg\n", "line 3: expected 2 columns, as in the first line, but found 1"),
        ("l.csv", "path,label\na.jpg,1\nb.jpg,1,2\n", "line 3: expected 2 columns, as in the first line, but found 3"),
        ("l.csv", "path,label\n,1\n", "line 2: no path in column 'path'"),
        ("l.jsonl", '{"path": "a"}\n{"path": \n', "line 2: not valid JSON"),
        ("l.jsonl", '{"path": "a"}\n[1]\n', "line 2: expected a JSON object, not list"),
        ("l.jsonl", '{"path": "a"}\n{"path": 7}\n', "line 2: no path"),
    ],
)
def test_an_error_names_the_line_that_is_not_valid(name: str, text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem):
        read_list(write_text(tmp_path / name, text))


def test_a_list_without_paths_or_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no column holds paths or texts.*its columns are \['a', 'b'\]"):
        read_list(write_text(tmp_path / "l.csv", "a,b\n1,2\n"))
    with pytest.raises(StorageError, match="empty"):
        read_list(write_text(tmp_path / "l.csv", "path,label\n"))


@pytest.mark.parametrize(
    ("stem", "safe"), [("a.b c", "a_b_c"), ("n01_2-x", "n01_2-x"), ("\u00fc/..", "_"), ("x" * 99, "x" * 60)]
)
def test_a_stem_has_no_characters_that_are_special_in_a_key(stem: str, safe: str) -> None:
    assert safe_stem(stem) == safe


def test_a_file_without_an_extension_is_packed_as_bin(tmp_path: Path) -> None:
    ps.pack(write_files(tmp_path / "src", "a/README", "a/x.Tiff", "a/y.tar.gz"), tmp_path / "out", shuffle=False)
    found = [sorted(set(s) - {"__url__", "__key__", "cls"}) for s in ps.read_tar(str(tmp_path / "out"))]
    assert found == [["bin"], ["tif"], ["gz"]]


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_a_file_of_any_size_is_read_whole(size: int, tmp_path: Path) -> None:
    data = bytes(number % 251 for number in range(size))
    (tmp_path / "a.bin").write_bytes(data)
    (sample,), bad = list_folder(str(tmp_path)).open().locate(ZERO, ZERO, Fields()).read()
    assert (sample["bin"], bad) == (data, {})


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.bin")

    def feed() -> None:
        with (tmp_path / "a.bin").open("wb", buffering=0) as pipe:
            for part in (b"one", b"two" * 30_000, b"three"):
                pipe.write(part)
                time.sleep(0.02)

    feeder = threading.Thread(target=feed)
    feeder.start()
    files = FileList(str(tmp_path), [FileEntry(str(tmp_path / "a.bin"), {})])
    (sample,), bad = files.open().locate(ZERO, ZERO, Fields()).read()
    feeder.join()
    assert (sample["bin"], bad) == (b"one" + b"two" * 30_000 + b"three", {})


def test_a_pipe_in_a_class_folder_is_not_waited_for(tmp_path: Path) -> None:
    write_files(tmp_path, "cat/1.jpg")
    os.mkfifo(tmp_path / "cat/pipe.jpg")
    assert [entry.path for entry in list_folder(str(tmp_path)).entries] == [str(tmp_path / "cat/1.jpg")]


def test_subfolders_of_a_class_folder_belong_to_the_class_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    for name in ("cat/1.jpg", "cat/more/2.jpg", "cat/.hidden/3.jpg", "cat/more/.4.jpg", "dog/5.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = [(entry.path, entry.fields["cls"]) for entry in list_folder(str(tmp_path)).entries]
    assert found == [
        (f"{tmp_path}/{name}", label)
        for name, label in (("cat/1.jpg", b"0"), ("cat/more/2.jpg", b"0"), ("dog/5.jpg", b"1"))
    ]


@pytest.fixture
def photos() -> Iterator[Memory]:
    """A storage with class folders below ``photos``, and lists beside it."""
    storage = Memory()
    files = {"photos/cat/a b.jpg": b"cat", "photos/dog/ä.jpg": b"dog", "photos/dog/deep/c.jpg": b"deep"}
    rows = f"path,label\nphotos/cat/a b.jpg,cat\n{BUCKET}/photos/dog/ä.jpg,dog\n"
    for name, data in {**files, "photos/.hidden": b"", "list.csv": rows.encode()}.items():
        with storage.put(f"{BUCKET}/{name}") as upload:
            upload.write(data)
            upload.commit()
    yield storage
    for entry in list(storage.list(f"{BUCKET}/")):
        storage.delete(entry.url)


def test_a_remote_folder_has_classes_and_packs_like_a_local_one(photos: Memory, tmp_path: Path) -> None:
    files = list_remote_folder(f"{BUCKET}/photos/", None, None)
    assert files is not None
    assert files.classes == ("cat", "dog")
    assert [(entry.path, entry.fields["cls"]) for entry in files.entries] == [
        (f"{BUCKET}/photos/cat/a b.jpg", b"0"),
        (f"{BUCKET}/photos/dog/deep/c.jpg", b"1"),
        (f"{BUCKET}/photos/dog/ä.jpg", b"1"),
    ]
    before = files.identity()
    ps.pack(f"{BUCKET}/photos", f"{BUCKET}/packed", shuffle=False, storage=photos)
    assert [sample["jpg"] for sample in ps.read_tar(f"{BUCKET}/packed")] == [b"cat", b"deep", b"dog"]
    estimate = ps.pack(f"{BUCKET}/photos", tmp_path / "out", dry_run=True)
    assert (estimate.samples, estimate.nbytes) == (3, ps.pack(f"{BUCKET}/photos", tmp_path / "out").nbytes)
    with photos.put(f"{BUCKET}/photos/cat/a b.jpg") as upload:
        upload.write(b"other")
        upload.commit()
    changed = list_remote_folder(f"{BUCKET}/photos", None, None)
    assert changed is not None
    assert changed.identity() != before


@pytest.mark.parametrize("local", [True, False])
def test_a_list_names_objects_by_url_or_relative_to_itself(photos: Memory, tmp_path: Path, local: bool) -> None:
    source: str | Path = f"{BUCKET}/list.csv"
    if local:
        source = tmp_path / "list.csv"
        source.write_text(f"path,label\n{BUCKET}/photos/cat/a b.jpg,cat\n{BUCKET}/missing,cat\n")
    packed = ps.pack(source, tmp_path / "out", shuffle=False, on_error="skip", storage=photos)
    found = [sample["jpg"] for sample in ps.read_tar(str(tmp_path / "out"))]
    assert found == ([b"cat"] if local else [b"cat", b"dog"])
    assert packed.skipped == int(local)


def test_a_remote_folder_of_shards_is_not_one_of_files(photos: Memory) -> None:
    ps.pack(f"{BUCKET}/photos", f"{BUCKET}/packed")
    assert list_remote_folder(f"{BUCKET}/packed", None, None) is None
    assert list_remote_folder(f"{BUCKET}/nothing", None, None) is None
    assert ps.pack(f"{BUCKET}/packed", f"{BUCKET}/again").samples == 3


def test_a_remote_folder_is_not_packed_into_itself_and_its_images_have_classes(photos: Memory) -> None:
    with pytest.raises(PlanError, match="inside the folder"):
        ps.pack(f"{BUCKET}/photos", f"{BUCKET}/photos/packed")
    with photos.put(f"{BUCKET}/photos/loose.jpg") as upload:
        upload.commit()
    with pytest.raises(PlanError, match=r"loose\.jpg is beside the class folders"):
        ps.pack(f"{BUCKET}/photos", f"{BUCKET}/packed")
