"""Files and image files as samples."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock.codecs import Limits
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats import files
from penstock.storage import Memory
from penstock.testing import fingerprint
from penstock.testing.servers import webdav_server
from penstock.testing.storages import write


def save_image(path: Path, mode: str, format: str = "PNG") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    out = io.BytesIO()
    Image.new(mode, (6, 4), 7 if mode == "L" else (1, 2, 3) if mode == "RGB" else (1, 2, 3, 4)).save(out, format)
    path.write_bytes(out.getvalue())


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    save_image(root / "dog" / "2.png", "RGB")
    save_image(root / "dog" / "1.PNG", "L")
    save_image(root / "cat" / "deep" / "9.jpeg", "RGB", "JPEG")
    save_image(root / "cat" / "1.png", "RGBA")
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "cat" / ".hidden.png").write_bytes(b"")
    return root


def relative_paths(ds: ps.Dataset, root: Path) -> list[str]:
    return [os.path.relpath(sample["path"], root) for sample in ds]


def test_images_are_read_in_the_order_of_their_paths(photos: Path) -> None:
    assert relative_paths(ps.read_images(str(photos)), photos) == [
        "cat/1.png",
        "cat/deep/9.jpeg",
        "dog/1.PNG",
        "dog/2.png",
    ]


def test_images_are_decoded_as_stored(photos: Path) -> None:
    images = {Path(s["path"]).name: s["image"] for s in ps.read_images(str(photos))}
    assert {name: image.shape for name, image in images.items()} == {
        "1.png": (4, 6, 4),
        "9.jpeg": (4, 6, 3),
        "1.PNG": (4, 6),
        "2.png": (4, 6, 3),
    }
    assert {image.dtype for image in images.values()} == {np.dtype(np.uint8)}


@pytest.mark.parametrize(("mode", "shape"), [("RGB", (4, 6, 3)), ("L", (4, 6)), ("RGBA", (4, 6, 4))])
def test_a_mode_applies_to_all_images(photos: Path, mode: Any, shape: tuple[int, ...]) -> None:
    assert {s["image"].shape for s in ps.read_images(str(photos), mode=mode)} == {shape}


def test_labels_number_the_class_folders_by_name(photos: Path) -> None:
    samples = ps.read_images([f"{photos}/dog", f"{photos}/cat/*.png"], labels="folder")
    assert [s["label"] for s in samples] == [1, 1, 0]


def test_samples_have_a_label_only_if_labels_are_requested(photos: Path) -> None:
    assert set(ps.read_images(str(photos)).first()) == {"image", "path"}
    assert set(ps.read_images(str(photos), labels="folder").first()) == {"image", "path", "label"}


def test_unknown_values_of_mode_and_labels_are_refused() -> None:
    with pytest.raises(PlanError, match=r"mode='CMYK'.*'RGB'"):
        ps.read_images("photos", mode="CMYK")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"labels='name'.*'folder'"):
        ps.read_images("photos", labels="name")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="workers=0"):
        ps.read_images("photos", workers=0)


def test_an_image_that_no_stage_needs_is_not_decoded(photos: Path) -> None:
    (photos / "cat" / "1.png").write_bytes(b"not an image")
    paths = ps.read_images(str(photos), labels="folder").select("path", "label")
    assert len(list(paths)) == 4
    assert next(iter(ps.read_images(str(photos), labels="folder").to_tuple("label"))) == (0,)


def test_the_error_of_a_damaged_image_names_it(photos: Path) -> None:
    (photos / "dog" / "2.png").write_bytes(b"not an image")
    with pytest.raises(DataError) as caught:
        list(ps.read_images(str(photos)))
    assert (caught.value.shard, caught.value.key) == (str(photos / "dog"), "2.png")
    assert len(list(ps.read_images(str(photos)).on_error("skip"))) == 3


def test_images_are_the_same_with_any_number_of_workers(photos: Path) -> None:
    expected = [fingerprint(s) for s in ps.read_images(str(photos)).on("serial")]
    for workers in (1, 4):
        assert [fingerprint(s) for s in ps.read_images(str(photos), workers=workers)] == expected


def test_the_limit_of_pixels_applies(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "Limits", lambda: Limits(pixels=10))
    with pytest.raises(DataError, match="pixels"):
        list(ps.read_images(str(photos)))


def test_samples_of_files_have_path_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("z.bin", "a.txt", "b/c"):
        (tmp_path / name).write_bytes(name.encode())
    samples = list(ps.read_files(str(tmp_path)))
    assert samples == [{"path": str(tmp_path / n), "bytes": n.encode()} for n in ("a.txt", "b/c", "z.bin")]


def test_files_keep_the_order_of_a_list(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "cab"]
    for path in paths:
        path.write_bytes(b"")
    assert [s["path"] for s in ps.read_files(map(str, paths))] == list(map(str, paths))


def test_files_are_counted_without_being_read(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}").symlink_to("nowhere")
    ds = ps.read_files(str(tmp_path))
    assert len(ds) == ds.count() == 5


def test_the_error_of_a_missing_file_names_it(tmp_path: Path) -> None:
    ds = ps.read_files([str(tmp_path / "a"), str(tmp_path / "gone")])
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(DataError) as caught:
        list(ds)
    assert caught.value.key == "gone"
    assert [s["bytes"] for s in ds.on_error("skip")] == [b"x"]


def test_a_folder_without_images_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(StorageError, match=r"holds no files ending in \.jpg, \.jpeg, \.png"):
        list(ps.read_images(str(tmp_path)))


def test_files_are_not_listed_before_the_dataset_is_read() -> None:
    ds: Any = ps.read_files("/nowhere/at/all").limit(3)
    assert "read_files('/nowhere/at/all')" in repr(ds)


def test_the_source_is_described_as_the_call_that_created_it() -> None:
    ds = ps.read_images("photos", mode="RGB", labels="folder")
    assert "read_images('photos', mode='RGB', labels='folder')" in repr(ds)


def test_remote_files_and_images_are_read_like_local_ones(tmp_path: Path) -> None:
    memory = Memory()
    for name in ("a/1.png", "a/2.png", "b/3.png", ".hidden"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 3), (len(name), 2, 3)).save(file, "png")
        with memory.put(f"memory://remote-files/{name}") as put:
            put.write(file.read_bytes())
            put.commit()
    local, remote = ps.read_files(str(tmp_path)), ps.read_files("memory://remote-files")
    assert [sample["bytes"] for sample in remote] == [sample["bytes"] for sample in local]
    assert remote[0]["path"] == "memory://remote-files/a/1.png"
    images = ps.read_images("memory://remote-files/", labels="folder", storage=memory)
    assert [(sample["image"].shape, sample["label"]) for sample in images] == [((3, 4, 3), n) for n in (0, 0, 1)]
    memory.delete("memory://remote-files/a/2.png")
    with pytest.raises(DataError, match=r"no such object.*2\.png"):
        list(ps.read_files(["memory://remote-files/a/1.png", "memory://remote-files/a/2.png"]))
    with pytest.raises(StorageError, match="holds no files"):
        list(ps.read_files("memory://remote-files/nothing"))


def test_a_list_of_images_may_be_a_file_url_behind_a_password_and_have_a_byte_order_mark(tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    save_image(lists / "photo.png", "RGB")
    (lists / "list.txt").write_text("\ufeffphoto.png\n")
    (lists / "urls.txt").write_text(f"{(lists / 'photo.png').as_uri()}\nmemory://lists/photo.png\n")
    write(Memory(), "memory://lists/photo.png", (lists / "photo.png").read_bytes())
    with webdav_server(lists, "--user", "me", "--pass", "word") as port:
        for url in (lists / "list.txt").as_uri(), f"http://me:word@127.0.0.1:{port}/list.txt":
            assert ps.read_images(url).count() == len(ps.read_images(url).take_all()) == 1
    assert len(ps.read_images(lists / "urls.txt", storage=Memory()).take_all()) == 2
    (lists / "list.txt").write_bytes(b"\xfc.png\n")
    with pytest.raises(DataError, match=r"the list of files is not UTF-8.*list\.txt"):
        ps.read_images(lists / "list.txt").take_all()


def test_remote_files_are_fetched_concurrently() -> None:
    active, most, lock = 0, 0, threading.Lock()

    class SlowMemory(Memory):
        """Memory whose reads take a moment, and are counted."""

        def stream(self, url: str) -> Iterator[bytes]:
            nonlocal active, most
            with lock:
                active += 1
                most = max(most, active)
            time.sleep(0.02)
            with lock:
                active -= 1
            return super().stream(url)

    folder = f"memory://{uuid4().hex}"
    for number in range(64):
        with Memory().put(f"{folder}/{number:02}.bin") as put:
            put.write(b"%d" % number)
            put.commit()
    samples = ps.read_files(folder, storage=SlowMemory()).take_all()
    assert [sample["bytes"] for sample in samples] == [b"%d" % number for number in range(64)]
    assert most >= 4


def test_files_signed_anew_are_one_shard_per_folder_and_show_no_signature() -> None:
    paths = [f"http://h/d/{name}?X-Amz-Credential=secret{name}/2026/s3" for name in ("a.jpg", "b.jpg")]
    reader = files.FilesReader(paths, lambda path, content, fields: {})
    assert reader.names == ["files"]
    assert (reader.key(0, 1), reader.url(0)) == ("b.jpg", "http://h/d")
