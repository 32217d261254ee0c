"""The contract of writable storages as a test class, for Penstock's storages and for yours.

A storage's test file is a few lines::

    class TestMine(StorageTests):
        @pytest.fixture
        def storage(self):
            return Mine()

        @pytest.fixture
        def root(self):
            return f"mine://bucket/{uuid4().hex}"
"""

from __future__ import annotations

import pickle
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.storage import NotFound, Storage, exists
from penstock.storage.protocol import LateBuffers

DATA = bytes(range(256)) * 41  # 10,496 bytes, with every byte value


def write(storage: Storage, url: str, data: bytes) -> None:
    """Write an object."""
    with storage.put(url) as upload:
        upload.write(data)
        upload.commit()


class StorageTests:
    """The contract of every writable storage.

    A subclass defines two fixtures: ``storage``, and ``root``, the URL of an empty folder for each test.
    """

    def test_what_is_written_is_read(self, storage: Storage, root: str) -> None:
        url = f"{root}/a/b.bin"
        with storage.put(url, size_hint=len(DATA)) as upload:
            for at in range(0, len(DATA), 1000):
                upload.write(memoryview(DATA)[at : at + 1000])
            committed = upload.commit()
        info = storage.info(url)
        assert (committed.size, info.size) == (len(DATA), len(DATA))
        assert committed.tag == info.tag
        assert storage.read(url, 0, len(DATA)) == DATA
        assert b"".join(storage.stream(url)) == DATA

    @pytest.mark.parametrize(("start", "stop"), [(0, 1), (5, 5), (7, 1009), (len(DATA) - 1, len(DATA)), (0, 0)])
    def test_a_range_is_exactly_those_bytes(self, storage: Storage, root: str, start: int, stop: int) -> None:
        url = f"{root}/range"
        write(storage, url, DATA)
        buffer = bytearray(stop - start)
        into = memoryview(buffer)
        assert storage.read(url, start, stop) == DATA[start:stop]
        assert storage.read(url, start, stop, into=into) is into
        assert buffer == DATA[start:stop]
        if isinstance(storage, LateBuffers):
            received = bytearray(stop - start)
            storage.receive(url, start, stop, lambda: memoryview(received), storage.info(url).tag)
            assert received == buffer

    @pytest.mark.parametrize(("start", "stop"), [(0, len(DATA) + 1), (len(DATA), len(DATA) + 1), (10**6, 10**6 + 5)])
    def test_a_range_beyond_the_end_is_an_error(self, storage: Storage, root: str, start: int, stop: int) -> None:
        url = f"{root}/short"
        write(storage, url, DATA)
        with pytest.raises(StorageError, match=f"{len(DATA):,} bytes"):
            storage.read(url, start, stop)

    @pytest.mark.parametrize(("start", "stop", "buffer_size"), [(-1, 4, 5), (4, 3, 0), (0, 4, 3)])
    def test_an_invalid_range_is_a_value_error(
        self, storage: Storage, root: str, start: int, stop: int, buffer_size: int
    ) -> None:
        with pytest.raises(ValueError, match="range"):
            storage.read(f"{root}/any", start, stop, into=memoryview(bytearray(buffer_size)))

    def test_an_empty_object_is_an_object(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/empty", b"")
        assert storage.info(f"{root}/empty").size == 0
        assert list(storage.stream(f"{root}/empty")) == []

    def test_a_missing_object_is_not_found(self, storage: Storage, root: str) -> None:
        url = f"{root}/none"
        assert not exists(storage, url)
        for action in (lambda: storage.info(url), lambda: storage.read(url, 0, 1), lambda: list(storage.stream(url))):
            with pytest.raises(NotFound) as caught:
                action()
            assert caught.value.url is not None
            assert caught.value.url.endswith("/none")
        storage.delete(url)

    def test_changed_content_has_another_tag_and_is_refused(self, storage: Storage, root: str) -> None:
        url = f"{root}/changing"
        write(storage, url, DATA)
        tag = storage.info(url).tag
        assert storage.read(url, 3, 9, tag=tag) == DATA[3:9]
        write(storage, url, DATA[::-1])
        assert storage.info(url).tag != tag
        with pytest.raises(StorageError, match="changed while it was being read"):
            storage.read(url, 3, 9, tag=tag)

    def test_nothing_is_visible_before_commit(self, storage: Storage, root: str) -> None:
        url = f"{root}/new/object"
        with storage.put(url) as upload:
            upload.write(DATA)
            assert not exists(storage, url)
            assert list(storage.list(f"{root}/new")) == []
        assert not exists(storage, url)
        assert list(storage.list(f"{root}/new")) == []

    def test_an_aborted_upload_leaves_the_old_object(self, storage: Storage, root: str) -> None:
        url = f"{root}/old"
        write(storage, url, b"old")
        with suppress(RuntimeError), storage.put(url) as upload:
            upload.write(DATA)
            raise RuntimeError
        assert storage.read(url, 0, 3) == b"old"
        with pytest.raises(StorageError, match="has ended"):
            upload.write(b"more")
        with pytest.raises(StorageError, match="has ended"):
            upload.commit()

    def test_a_listing_is_of_the_folder_recursive_and_sorted(self, storage: Storage, root: str) -> None:
        names = ["b/z", "b/a/x", "b/a-", "bc", "b.tar", "b/ü ü+%20", "b/2", "b/10"]
        for number, name in enumerate(names):
            write(storage, f"{root}/{name}", b"x" * number)
        want = sorted((f"{root}/{name}", number) for number, name in enumerate(names) if name.startswith("b/"))
        for prefix in (f"{root}/b", f"{root}/b/"):
            assert [(found.url, found.size) for found in storage.list(prefix)] == want
        for url, size in want:
            assert storage.info(url).size == size
        assert list(storage.list(f"{root}/nothing")) == []

    def test_a_deleted_object_is_gone(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/gone", DATA)
        storage.delete(f"{root}/gone")
        assert not exists(storage, f"{root}/gone")

    def test_a_storage_is_a_value_that_can_be_pickled(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/x", DATA)
        other: Storage = pickle.loads(pickle.dumps(storage))
        assert other == storage
        assert hash(other) == hash(storage)
        assert other.read(f"{root}/x", 0, 4) == DATA[:4]

    def test_threads_share_a_storage(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/shared", DATA)
        wrong: list[int] = []

        def work(number: int) -> None:
            for at in range(number, len(DATA) - 100, 997):
                if storage.read(f"{root}/shared", at, at + 100) != DATA[at : at + 100]:
                    wrong.append(at)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_local_path_is_a_file_or_none(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/object", DATA)
        path = storage.local_path(f"{root}/object")
        assert path is None or Path(path).read_bytes() == DATA
