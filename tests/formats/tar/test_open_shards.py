"""What a reader closes when it opens another shard."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.blobs.content import Content, MappedFile
from penstock.blobs.prefetch import Fetcher, PrefetchedBytes
from penstock.formats.tar.located import OpenShard
from penstock.formats.tar.open_shards import Opened, shards_to_close
from penstock.formats.tar.scan import scan
from penstock.storage import Info, Memory

EMPTY = scan(bytes(1024))


def local() -> Opened:
    return OpenShard("a.tar", EMPTY, Content(b""))


def remote() -> Opened:
    content = PrefetchedBytes(Fetcher(), Memory(), "memory://a.tar", "memory://a.tar", Info(1024, "tag", True))
    return OpenShard("memory://a.tar", EMPTY, Content(content))


def temporary(size: int) -> Opened:
    return OpenShard("a.tar.gz", EMPTY, Content(mmap.mmap(-1, size)))


def test_the_shard_that_was_used_least_recently_is_closed_before_those_opened_ahead() -> None:
    opened = {number: local() for number in range(33)}
    assert shards_to_close(opened, set(), 32) == {0}
    assert shards_to_close(opened, {0, 1, 2}, 32) == {3}
    assert shards_to_close({number: local() for number in range(32)}, set(), 31) == set()


def test_remote_shards_stay_open_while_their_indexes_are_small() -> None:
    assert shards_to_close({number: remote() for number in range(1024)}, set(), 1023) == set()
    assert shards_to_close({number: remote() for number in range(1030)}, set(), 1029) == {0, 1, 2, 3, 4, 5}


def test_temporary_files_take_half_of_what_the_folder_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=40_000))
    stored = tmp_path / "stored"
    stored.write_bytes(bytes(500_000))
    with stored.open("rb") as file:
        opened: dict[int, Opened] = {0: OpenShard("b.tar", EMPTY, Content(MappedFile.of(file)))}
    opened |= {number: temporary(20_000) for number in range(1, 5)}
    assert shards_to_close(opened, set(), 4) == {1}  # 120,000 bytes: 60,000 may be taken
    assert shards_to_close({7: temporary(90_000)}, set(), 7) == set()
