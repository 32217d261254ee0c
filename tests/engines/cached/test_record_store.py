"""Records are added by many processes and read by all; kills, damage and full disks lose no other record."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from penstock.engines.cached.record_store import RecordStore

COUNT = 10_000


def _find(store: RecordStore, *numbers: int) -> list[bytes | None]:
    entries = store.find(np.array(numbers, np.uint64))
    found = []
    for row, file in enumerate(entries.file.tolist()):
        one = entries.take(row)
        data = None if file < 0 else store.read(file, int(one.offset), int(one.nbytes), int(one.crc))
        found.append(None if data is None else data.tobytes())
    return found


def test_records_are_found_by_the_process_that_added_them_and_by_others(tmp_path: Path) -> None:
    store = RecordStore(str(tmp_path))
    assert _find(store, 5) == [None]
    store.add([(5, b"five"), (1 << 63, b"")])
    assert _find(store, 5, 6, 1 << 63) == [b"five", None, b""]
    assert _find(RecordStore(str(tmp_path)), 5, 6, 1 << 63) == [b"five", None, b""]


def test_a_record_that_does_not_exist_cannot_be_read(tmp_path: Path) -> None:
    store = RecordStore(str(tmp_path))
    store.add([(5, b"five")])
    absent = [int(column[0]) for column in store.find(np.array([4], np.uint64))]
    assert absent == [-1, -1, -1, -1]
    with pytest.raises(LookupError, match="no such record"):
        store.read(*absent)


def test_many_records_are_found_in_any_order(tmp_path: Path) -> None:
    store = RecordStore(str(tmp_path))
    numbers = np.random.default_rng(0).permutation(COUNT)
    for part in np.array_split(numbers, 50):
        store.add([(int(n), b"%d" % n) for n in part])
    for reader in (store, RecordStore(str(tmp_path))):
        entries = reader.find(np.arange(COUNT + 1, dtype=np.uint64))
        assert (entries.file[:COUNT] == 0).all()
        assert entries.file[COUNT] == -1
        assert _find(reader, 0, 4321, COUNT - 1) == [b"0", b"4321", b"%d" % (COUNT - 1)]


def test_two_writers_have_files_of_their_own_and_see_each_other(tmp_path: Path) -> None:
    stores = [RecordStore(str(tmp_path)) for _ in range(2)]
    for number, store in enumerate(stores):
        store.add([(number, b"own")])
    assert sorted(path.name for path in tmp_path.glob("*.records")) == ["0000.records", "0001.records"]
    assert _find(RecordStore(str(tmp_path)), 0, 1) == [b"own", b"own"]


def test_a_record_that_exists_is_not_added_again(tmp_path: Path) -> None:
    store = RecordStore(str(tmp_path))
    store.add([(1, b"first")])
    store.add([(1, b"second"), (2, b"other")])
    assert (tmp_path / "0000.records").read_bytes() == b"firstother"


@pytest.mark.parametrize("damage", ["flipped", "cut", "removed"])
def test_a_damaged_record_counts_as_absent_and_can_be_added_again(tmp_path: Path, damage: str) -> None:
    RecordStore(str(tmp_path)).add([(1, b"one"), (2, b"two")])
    records = tmp_path / "0000.records"
    if damage == "removed":
        records.unlink()
    else:
        records.write_bytes(b"onetwx" if damage == "flipped" else b"onet")
    store = RecordStore(str(tmp_path))
    assert _find(store, 2) == [None]
    store.add([(2, b"two")])
    assert _find(store, 2) == [b"two"]


def test_a_process_killed_at_any_moment_leaves_whole_records_and_nothing_else(tmp_path: Path) -> None:
    for round_number in range(3):
        pid = os.fork()
        if not pid:
            try:
                store = RecordStore(str(tmp_path))
                for number in range(1_000_000):
                    store.add([(round_number << 32 | number, b"%d" % number * 100)])
            finally:
                os._exit(1)
        while not (tmp_path / "0000.index").exists() or (tmp_path / "0000.index").stat().st_size < 500 * round_number:
            os.sched_yield()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    store = RecordStore(str(tmp_path))
    entries = np.fromfile(tmp_path / "0000.index", "<u8")[::3]
    assert len(entries)
    for number in entries.tolist():
        assert _find(store, number) == [b"%d" % (number & 0xFFFFFFFF) * 100]
    store.add([(1 << 60, b"last")])
    used = sum(len(b"%d" % (number & 0xFFFFFFFF)) * 100 for number in entries.tolist())
    assert (tmp_path / "0000.records").stat().st_size == used + 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000.index", "0000.records"]


def test_a_full_disk_is_one_warning_and_what_was_added_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RecordStore(str(tmp_path))
    store.add([(1, b"x" * 1000)])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limit[1]))
        for number in (2, 3):
            store.add([(number, b"y" * 10_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous)
    (record,) = caplog.records
    assert "no more results are added" in record.getMessage()
    assert _find(store, 1, 2) == [b"x" * 1000, None]
    assert (tmp_path / "0000.records").stat().st_size == 1000


def test_a_link_planted_in_the_folder_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "0000.records").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("precious")
    RecordStore(str(tmp_path / "results")).add([(1, b"one")])
    assert (tmp_path / "precious").read_text() == "precious"
    assert len(caplog.records) == 1
