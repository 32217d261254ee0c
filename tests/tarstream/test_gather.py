"""Samples of many archives form one stream, read by one worker or by several."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from penstock.errors import DataError, StorageError
from penstock.storage import STDIN
from penstock.tarstream.gather import find_shards, gather_runs, gather_samples, mix_streams

MakeArchive = Callable[..., str]


def test_patterns_become_archives_in_order(make_archive: MakeArchive, tmp_path: Path) -> None:
    names = [make_archive(f"s{shard}.tar", ["a"]) for shard in range(3)]
    assert find_shards([str(tmp_path / "s{2..0}.tar"), STDIN]) == [*names[::-1], STDIN]
    assert find_shards([str(tmp_path)]) == names
    with pytest.raises(StorageError):
        find_shards([str(tmp_path / "none-*.tar")])


def test_one_worker_yields_samples_in_order(make_archive: MakeArchive) -> None:
    urls = [make_archive(f"s{shard}.tar", [f"{shard}-{number}" for number in range(3)]) for shard in range(2)]
    want = ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    assert [raw.key for raw in gather_samples(urls)] == want
    assert [key for run in gather_runs(urls, mapped=True) for key in run.keys] == want


def test_several_workers_yield_every_sample_once_and_each_archive_in_order(make_archive: MakeArchive) -> None:
    urls = [make_archive(f"s{shard}.tar", [f"{shard}-{n:02}" for n in range(40)], size=60_000) for shard in range(5)]
    want = [raw.key for raw in gather_samples(urls)]
    got = [raw.key for raw in gather_samples(urls, workers=3)]
    assert Counter(got) == Counter(want)
    for shard in range(5):
        assert [key for key in got if key.startswith(f"{shard}-")] == want[40 * shard : 40 * shard + 40]


def test_closing_the_stream_early_ends_its_threads(make_archive: MakeArchive) -> None:
    urls = [make_archive(f"s{shard}.tar", [f"{shard}-{n}" for n in range(40)], size=60_000) for shard in range(5)]
    before = threading.active_count()
    stream = gather_samples(urls, workers=3)
    next(stream)
    assert threading.active_count() > before
    stream.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_archive_raises_or_is_passed_to_on_error(
    workers: int, make_archive: MakeArchive, tmp_path: Path
) -> None:
    (tmp_path / "bad.tar").write_bytes(b"junk" * 1000)
    urls = [make_archive("good.tar", ["a"]), str(tmp_path / "bad.tar")]
    with pytest.raises(DataError, match=r"not a tar archive.*bad\.tar"):
        list(gather_samples(urls, workers=workers))
    errors: list[DataError] = []
    assert [raw.key for raw in gather_samples(urls, workers=workers, on_error=errors.append)] == ["a"]
    assert len(errors) == 1


def test_a_missing_archive_is_raised_from_any_worker(make_archive: MakeArchive, tmp_path: Path) -> None:
    urls = [make_archive("good.tar", ["a"]), str(tmp_path / "none.tar")]
    with pytest.raises(StorageError, match=r"none\.tar"):
        list(gather_samples(urls, workers=2))


@pytest.mark.parametrize("all", [False, True])
def test_a_mixture_ends_with_its_first_stream_or_with_all(all: bool, make_archive: MakeArchive) -> None:
    urls = [make_archive(f"{name}.tar", [f"{name}{n:03}" for n in range(50)]) for name in "ab"]
    mixture = mix_streams([gather_samples([url]) for url in urls], [3, 1], Random(1), all=all)
    got = [raw.key for raw in mixture]
    streams = {name: [key for key in got if key.startswith(name)] for name in "ab"}
    assert all is (len(got) == 100)
    assert len(streams["a"]) == 50
    assert sum(key.startswith("a") for key in got[:40]) > 20
    assert all or len(streams["b"]) < 50
    assert streams["b"] == [f"b{n:03}" for n in range(len(streams["b"]))]
