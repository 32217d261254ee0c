"""Small objects are requested side by side, within bounded memory, and read exactly."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.blobs import small_objects
from penstock.blobs.small_objects import ObjectFetcher
from penstock.errors import StorageError
from penstock.storage import S3
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server


@dataclass
class Scripted:
    """A storage whose objects are their own names; it counts requests, and answers when it may."""

    may_answer: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: int = 0
    most: int = 0
    requested: list[str] = field(default_factory=list)

    def stream(self, url: str) -> Iterator[bytes]:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.requested.append(url)
        assert self.may_answer.wait(60)
        with self.lock:
            self.running -= 1
        if "missing" in url:
            raise StorageError("there is no such object", url)
        yield url.encode()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _wait_for(condition: Any) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def test_announced_objects_are_requested_side_by_side() -> None:
    storage = Scripted()
    fetcher = ObjectFetcher(storage)
    urls = [f"x://{n}" for n in range(200)]
    fetcher.announce(urls)
    _wait_for(lambda: storage.running == small_objects.OBJECT_CONNECTIONS)
    storage.may_answer.set()
    assert [fetcher.read(url) for url in urls] == [url.encode() for url in urls]
    assert storage.most == small_objects.OBJECT_CONNECTIONS
    assert sorted(storage.requested) == sorted(urls)
    fetcher.stop()


def test_what_was_not_announced_or_not_requested_yet_is_fetched_by_its_reader() -> None:
    storage = Scripted()
    fetcher = ObjectFetcher(storage)
    fetcher.announce([f"x://{n}" for n in range(200)])
    _wait_for(lambda: storage.running == small_objects.OBJECT_CONNECTIONS)
    storage.may_answer.set()
    assert fetcher.read("x://199") == b"x://199"
    assert fetcher.read("x://other") == b"x://other"
    fetcher.stop()
    assert fetcher.read("x://7") == b"x://7"


def test_memory_is_bounded_and_reads_never_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_objects, "MAX_HELD_BYTES", 100)
    monkeypatch.setattr(small_objects, "OBJECT_CONNECTIONS", 4)
    storage = Scripted()
    storage.may_answer.set()
    fetcher = ObjectFetcher(storage)
    urls = [f"x://{n:08d}" for n in range(300)]
    fetcher.announce(urls)
    _wait_for(lambda: fetcher._held_bytes >= 100 and not storage.running)
    assert fetcher._held_bytes <= 100 + 4 * len(urls[0])
    assert [fetcher.read(url) for url in reversed(urls)] == [url.encode() for url in reversed(urls)]
    assert fetcher._held_bytes == 0
    fetcher.stop()


def test_an_error_is_raised_where_the_object_is_read() -> None:
    storage = Scripted()
    storage.may_answer.set()
    fetcher = ObjectFetcher(storage)
    fetcher.announce(["x://1", "x://missing", "x://2"])
    assert fetcher.read("x://1") == b"x://1"
    with pytest.raises(StorageError, match="no such object"):
        fetcher.read("x://missing")
    assert fetcher.read("x://2") == b"x://2"
    fetcher.stop()


def test_stopping_ends_the_threads_and_a_pickled_fetcher_holds_nothing() -> None:
    storage = Scripted()
    storage.may_answer.set()
    fetcher = ObjectFetcher(storage)
    fetcher.announce([f"x://{n}" for n in range(50)])
    threads = list(fetcher._threads)
    fetcher.stop()
    for thread in threads:
        thread.join(60)
    assert not fetcher._threads
    assert pickle.loads(pickle.dumps(ObjectFetcher())).read


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, S3]]:
    folder = tmp_path_factory.mktemp("s3")
    for number in range(120):
        path = folder / "raw" / f"class {number % 3}" / f"ü {number:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number * 100)
    with s3_server(folder) as port:
        yield folder, S3(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)


def test_objects_of_a_bucket_are_samples_in_path_order_with_exact_resume(bucket: tuple[Path, S3]) -> None:
    folder, storage = bucket
    want = [path.read_bytes() for path in sorted((folder / "raw").rglob("*.bin"))]
    for url in ("s3://raw", "s3://raw/**/*.bin", "s3://raw/class */*.bin"):
        assert [sample["bytes"] for sample in ps.read_files(url, storage=storage)] == want
    ds = ps.read_files("s3://raw", storage=storage).shuffle(seed=2)
    whole = [sample["path"] for sample in ds.epoch(0)]
    assert sorted(whole) == [sample["path"] for sample in ps.read_files("s3://raw", storage=storage)]
    loader = ds.loader()
    first = [sample["path"] for _, sample in zip(range(50), loader, strict=False)]
    again = ds.loader()
    again.load_state_dict(loader.state_dict())
    loader.close()
    assert first + [sample["path"] for sample in again] == whole


def test_a_missing_object_fails_alone(bucket: tuple[Path, S3]) -> None:
    _, storage = bucket
    urls = ["s3://raw/class 0/ü 000.bin", "s3://raw/nothing.bin", "s3://raw/class 1/ü 001.bin"]
    ds = ps.read_files(urls, storage=storage)
    assert [sample["bytes"][:1] for sample in ds.on_error("skip")] == [b"0", b"1"]


def test_a_list_of_images_is_read_beside_its_folder(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "photos").mkdir()
    for number in range(3):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "list.txt").write_text("photos/2.png\n\nphotos/0.png\n")
    images = [sample["image"][0, 0, 0] for sample in ps.read_images(tmp_path / "list.txt")]
    assert images == [2, 0]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(StorageError, match="the list of files is empty"):
        ps.read_images(tmp_path / "empty.txt").first()
