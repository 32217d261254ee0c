from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DataError, PlanError, StorageError
from penstock.plan.block import Place, Skipped
from penstock.plan.quarantine import Identity, Quarantine, digest, exclusions, identity, listed


def skip(index: int, shard: str | None = "a/0.tar", source: int = 0, samples: int = 1) -> Skipped:
    return Skipped(0, Place(f"/data/{shard}", f"k{index}", source, index, shard, samples), "map", f"no {index}")


def test_a_line_says_which_sample_failed_where_and_why(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bad.jsonl"
    Quarantine(str(path)).add([skip(3, source=2)])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"source": 2, "shard": "a/0.tar", "index": 3, "key": "k3", "stage": "map", "problem": "no 3"}
    ]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "bad.jsonl")
    first, second = Quarantine(path), Quarantine(path)
    first.add([skip(3), skip(1)])
    second.add([skip(3, "b/0.tar")])
    first.add([skip(4)])
    assert list(listed(path)) == [
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


def test_the_file_is_there_before_anything_fails(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"source": 0, "shard": "s", "index": 1}\n')
    Quarantine(str(path))
    Quarantine(str(tmp_path / "other.jsonl"))
    assert list(listed(str(path))) == [Identity(0, "s", 1)]
    assert list(listed(str(tmp_path / "other.jsonl"))) == []


def test_a_quarantine_that_cannot_be_written_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"quarantine cannot be written.*file/bad.jsonl"):
        Quarantine(str(tmp_path / "file" / "bad.jsonl"))


def test_in_a_folder_every_process_has_its_own_file(tmp_path: Path) -> None:
    there, new = tmp_path / "there", str(tmp_path / "new") + "/"
    there.mkdir()
    for folder in (str(there), new):
        Quarantine(folder).add([skip(1)])
        assert len(list(Path(folder).glob("*.jsonl"))) == 1
        (Path(folder) / "another.jsonl").write_text('{"source": 0, "shard": "s", "index": 2}\n')
        assert set(listed(folder)) == {Identity(0, "a/0.tar", 1), Identity(0, "s", 2)}


def test_what_was_made_of_several_samples_names_none_of_them(tmp_path: Path) -> None:
    path = str(tmp_path / "bad.jsonl")
    Quarantine(path).add([skip(1, samples=4), skip(2), skip(5, None)])
    assert list(listed(path)) == [Identity(0, "a/0.tar", 2)]
    assert json.loads(Path(path).read_text().splitlines()[0])["samples"] == 4


def test_a_long_problem_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    Quarantine(str(path)).add([skip(1)._replace(problem="no " * 100_000)])
    assert path.stat().st_size < 2000


def _write(path: str, worker: int) -> None:
    quarantine = Quarantine(path)
    for index in range(300):
        quarantine.add([skip(index, f"{worker}.tar"), skip(index, f"{worker}-too.tar")])


def test_many_processes_may_write_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "bad.jsonl")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write, args=(path, worker)) for worker in range(4)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    assert len(list(listed(path))) == len(set(listed(path))) == 4 * 300 * 2


@pytest.mark.parametrize(
    "line",
    [
        '{"source": 0, "shard": "s", "ind',
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
        list(listed(str(path)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"No such file.*nowhere\.jsonl"):
        list(listed(str(tmp_path / "nowhere.jsonl")))


def test_samples_are_named_by_identity_or_as_they_were_skipped(tmp_path: Path) -> None:
    one = Identity(1, "s", 2)
    assert identity((1, "s", 2)) == identity(one) == identity((1, "s", 2, 0)) == one
    assert exclusions(["bad.jsonl", Path("x"), [(1, "s", 2), skip(3)], (1, "s", 2)]) == (
        "bad.jsonl",
        "x",
        one,
        Identity(0, "a/0.tar", 3),
        one,
    )


@pytest.mark.parametrize("value", [3, None, (1, "s"), ("s", 1, 2), (0, "s", -1), [3], {"source": 0}, b"bad.jsonl"])
def test_what_names_no_sample_is_refused(value: Any) -> None:
    with pytest.raises(PlanError, match=r"names no sample: give \(source, shard, index\)"):
        exclusions([value])


def test_the_digest_is_that_of_the_set() -> None:
    one, two = Identity(0, "s", 1), Identity(0, "s", 2)
    assert digest([one, two]) == digest([two, one, one]) != digest([one])
