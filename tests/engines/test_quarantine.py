from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.engines.quarantine import Quarantine, read_identities
from penstock.errors import DataError, StorageError
from penstock.plan import Identity, Place, Skipped


def skip(index: int, shard: str | None = "a/0.tar", source: int = 0, samples: int = 1) -> Skipped:
    return Skipped(0, Place(f"/data/{shard}", f"k{index}", source, index, shard, samples), "map", f"no {index}")


def test_a_line_records_the_sample_the_stage_and_the_problem(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bad.jsonl"
    Quarantine(str(path)).add([skip(3, source=2)])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"source": 2, "shard": "a/0.tar", "index": 3, "key": "k3", "stage": "map", "problem": "no 3"}
    ]


def test_written_samples_are_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "bad.jsonl")
    first, second = Quarantine(path), Quarantine(path)
    first.add([skip(3), skip(1)])
    second.add([skip(3, "b/0.tar")])
    first.add([skip(4)])
    assert list(read_identities(path)) == [
        Identity(0, "a/0.tar", 3),
        Identity(0, "a/0.tar", 1),
        Identity(0, "b/0.tar", 3),
        Identity(0, "a/0.tar", 4),
    ]


def test_a_sample_is_listed_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    quarantine = Quarantine(str(path))
    quarantine.add([skip(3), skip(3)])
    quarantine.add([skip(3)])
    assert len(path.read_text().splitlines()) == 1


def test_the_file_is_created_before_anything_fails(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"source": 0, "shard": "s", "index": 1}\n')
    Quarantine(str(path))
    Quarantine(str(tmp_path / "other.jsonl"))
    assert list(read_identities(str(path))) == [Identity(0, "s", 1)]
    assert list(read_identities(str(tmp_path / "other.jsonl"))) == []


def test_an_unwritable_quarantine_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"quarantine cannot be written.*file/bad.jsonl"):
        Quarantine(str(tmp_path / "file" / "bad.jsonl"))


def test_in_a_folder_every_process_has_its_own_file(tmp_path: Path) -> None:
    existing, new = tmp_path / "existing", str(tmp_path / "new") + "/"
    existing.mkdir()
    for folder in (str(existing), new):
        Quarantine(folder).add([skip(1)])
        assert len(list(Path(folder).glob("*.jsonl"))) == 1
        (Path(folder) / "another.jsonl").write_text('{"source": 0, "shard": "s", "index": 2}\n')
        assert set(read_identities(folder)) == {Identity(0, "a/0.tar", 1), Identity(0, "s", 2)}


def test_items_made_from_several_samples_identify_none_of_them(tmp_path: Path) -> None:
    path = str(tmp_path / "bad.jsonl")
    Quarantine(path).add([skip(1, samples=4), skip(2), skip(5, None)])
    assert list(read_identities(path)) == [Identity(0, "a/0.tar", 2)]
    assert json.loads(Path(path).read_text().splitlines()[0])["samples"] == 4


def test_a_long_problem_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    Quarantine(str(path)).add([skip(1)._replace(problem="no " * 100_000)])
    assert path.stat().st_size < 2000


def _write(path: str, worker: int) -> None:
    quarantine = Quarantine(path)
    for index in range(300):
        quarantine.add([skip(index, f"{worker}.tar"), skip(index, f"{worker}-too.tar")])


def test_several_processes_can_write_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "bad.jsonl")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write, args=(path, worker)) for worker in range(4)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    assert len(list(read_identities(path))) == len(set(read_identities(path))) == 4 * 300 * 2


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"source": 0, "shard": "s"}',
        '{"source": "0", "shard": "s", "index": 1}',
        '{"source": 0, "shard": 7, "index": 1}',
        '{"source": 0, "shard": "s", "index": -1}',
        '{"source": 0, "shard": "s", "index": 1}{"source": 0, "shard": "s", "index": 2}',
        "\udcff",
    ],
)
def test_a_damaged_line_is_named_with_its_file(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    good = '{"source": 0, "shard": "s", "index": 1}'
    path.write_bytes(f"{good}\n\n{line}\n{good}\n".encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"bad\.jsonl, line 3: not a line of a quarantine"):
        list(read_identities(str(path)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"No such file.*nowhere\.jsonl"):
        list(read_identities(str(tmp_path / "nowhere.jsonl")))


def test_half_a_line_after_a_full_disk_is_followed_by_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"source": 0, "shard": "a.tar", "index": 1, "key": "k"}\n{"source": 0, "shard": "a.ta')

    def fails(sample: Any) -> Any:
        raise ValueError("bad")

    list(ps.from_items([1]).map(fails).on_error("skip", quarantine=str(path)))
    assert path.read_bytes().count(b"\n") == 3
    assert [identity.index for identity in read_identities(str(path))] == [1, 0]
