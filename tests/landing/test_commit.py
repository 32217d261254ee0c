"""A set of files lands once: after kills, full disks and failing servers, readers see the old set or the new one."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PenstockError, PlanError, StorageError
from penstock.formats.manifest import write_manifest_at
from penstock.formats.tar.index import Index
from penstock.landing import commit
from penstock.storage import S3, Memory, Upload, open_storage
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server

FULL = os.environ.get("PENSTOCK_FULL") == "1"
KILLS = 10 if FULL else 1
KINDS = ["tar", "parquet", "csv", "pack-tar", "pack-parquet", "shards-tar", "shards-parquet", "shards-csv"]
PLACES = ["disk", "s3"]
KILLED = [(kind, where) for where in PLACES for kind in KINDS] if FULL else [("shards-tar", "disk"), ("csv", "s3")]
REPLACED = [(kind, where) for where in PLACES for kind in KINDS[:3]] if FULL else [("csv", "disk"), ("tar", "s3")]
COUNT = 120 if FULL else 60
INPUTS = 80 if FULL else 20

# One interpreter for all runs: it reads commands, and forks a process for each, which is killed after a while.
WRITING = """
import json, os, signal, sys, tempfile, time
from pathlib import Path
import pyarrow.parquet
import penstock as ps
import penstock.landing.parquet_sink, penstock.landing.row_sink, penstock.landing.tar_sink, penstock.packing.packer
import penstock.engines.local, penstock.formats.tar.reader, penstock.storage.s3
import penstock.dataset.write_methods, penstock.jobs.runner

def row(sample):
    time.sleep(0.002)
    return {"__key__": f"{sample['n']:04d}", "txt": f"{sample['n']} " * 40}

def work(path, out):
    time.sleep(0.005)
    number = int(path.name)
    for part in range(1 + number % 2):
        out.path(f"{number % 3}/{number:04d}-{part}.txt").write_text(f"{number} {part}" + "-" * 3000)
    return {"number": number}

def write(kind, url, server, count, mode):
    options = {"storage": ps.S3(*server.split()) if server else None}
    if kind == "job":
        inputs = [str(Path(tempfile.gettempdir()).parent / "in" / str(n)) for n in range(count)]
        ps.process(inputs, work, url, f"{url}/rows.csv", workers=4, on="threads", **options)
        return
    ds = ps.from_items([{"n": n} for n in range(count)]).map(row, workers=2)
    options["mode"] = mode
    if kind.startswith("pack"):
        ps.pack(ds, url, format=kind.partition("-")[2], max_samples=9, shuffle=False, **options)
    elif kind.startswith("shards"):
        getattr(ds, f"write_{kind.partition('-')[2]}")(url, shards=7, **options)
    elif kind == "csv":
        ds.write_csv(url, 2_000, **options)
    else:
        getattr(ds, f"write_{kind}")(url, max_samples=9, **options)

for line in sys.stdin:
    temporary, kill_s, *arguments = json.loads(line)
    child, began = os.fork(), time.monotonic()
    if not child:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary
        try:
            write(*arguments)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = None
    while status is None and time.monotonic() < began + (kill_s or 300):
        status = os.waitstatus_to_exitcode(found[1]) if (found := os.waitpid(child, os.WNOHANG))[0] else None
        time.sleep(0.002)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(json.dumps([status, time.monotonic() - began]), flush=True)
"""


@dataclass(frozen=True)
class Writer:
    """The interpreter that writes, and the server that it may write to."""

    process: subprocess.Popen[str]
    server: str

    def run(self, temporary: Path, kill_s: float, *arguments: Any) -> tuple[bool, float]:
        """Return whether a run ended before it was killed, and how long it took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(temporary), kill_s, *arguments]) + "\n")
        self.process.stdin.flush()
        status, seconds = json.loads(self.process.stdout.readline())
        assert status in (0, None)
        return status == 0, seconds


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writer]:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "bucket").mkdir()
    call = [sys.executable, "-c", WRITING]
    with (
        s3_server(folder) as port,
        subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        yield Writer(process, f"http://127.0.0.1:{port} {ACCESS_KEY} {SECRET_KEY}")
        assert process.stdin is not None
        process.stdin.close()


@dataclass
class Place:
    """A target on a disk or in a bucket."""

    url: str
    server: str = ""

    @property
    def storage(self) -> Any:
        if not self.server:
            return None
        endpoint, access_key, secret_key = self.server.split()
        return S3(endpoint, access_key, secret_key)

    def read(self, kind: str) -> list[str]:
        """Return the keys that readers see; an empty list if they see no set at all."""
        read: Any = {"tar": ps.read_tar, "parquet": ps.read_parquet, "csv": ps.read_csv, "json": ps.read_json}
        try:
            found = read[kind.rpartition("-")[2]](self.url, storage=self.storage)
            return [f"{int(sample['__key__']):04d}" for sample in found]  # a CSV file has numbers
        except StorageError:
            return []

    def files(self) -> dict[str, bytes]:
        storage = open_storage(self.url, self.storage)
        found = {}
        for one in storage.list(self.url + "/"):
            name, data = one.url.rpartition(self.url.rstrip("/") + "/")[2], b"".join(storage.stream(one.url))
            found[name] = data if not name.endswith(".index") else b"%d" % Index.from_bytes(data).samples
        return found


@dataclass
class Kills:
    """Kills runs at random moments of the time that a whole run takes."""

    writer: Writer
    where: str
    folder: Path
    rng: random.Random
    done: int = 0
    duration_s: float = 0

    def place(self, name: str) -> Place:
        if self.where == "disk":
            return Place(str(self.folder / name))
        return Place(f"s3://bucket/{self.folder.name}-{name}", self.writer.server)

    def write(self, place: Place, kind: str, count: int, mode: str = "new") -> Place:
        complete, self.duration_s = self.writer.run(
            self.folder / "temporary", 0, kind, place.url, place.server, count, mode
        )
        assert complete
        return place

    def until_complete(self, place: Place, kind: str, count: int, mode: str = "new") -> Iterator[bool]:
        """Kill runs until one ends before it is killed; yield after each whether it did."""
        complete = False
        while not complete:
            kill_s = self.rng.random() * self.duration_s * 1.2
            complete, _ = self.writer.run(self.folder / "temporary", kill_s, kind, place.url, place.server, count, mode)
            self.done += not complete
            yield complete


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary folder of this test's own, to see what stays there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(("kind", "where"), KILLED)
def test_a_run_that_is_killed_lands_once(kind: str, where: str, writer: Writer, tmp_path: Path) -> None:
    keys = [f"{n:04d}" for n in range(COUNT)]
    kills = Kills(writer, where, tmp_path, random.Random(f"{kind} {where}"))
    want = kills.write(kills.place("want"), kind, COUNT).files()
    for number in range(100):
        out = kills.place(f"out{number}")
        for complete in kills.until_complete(out, kind, COUNT):
            seen = out.read(kind)
            in_ranges = kind.startswith("shards")  # in any order
            assert seen == ([key for key in keys if key in seen] if in_ranges else keys[: len(seen)])
            # New shards appear one by one, as all files of ranges do on S3; tables and rows appear together.
            assert kind.endswith("tar") or (in_ranges and where == "s3") or seen in ([], keys)
            assert not complete or seen == keys
        assert out.files() == want
        if kills.done >= KILLS:
            break
    assert os.listdir(tmp_path / "temporary") == []


@pytest.mark.parametrize(("kind", "where"), REPLACED)
def test_a_replacement_that_is_killed_is_the_old_set_or_the_new(
    kind: str, where: str, writer: Writer, tmp_path: Path
) -> None:
    old, new = ([f"{n:04d}" for n in range(count)] for count in (25, COUNT))
    kills = Kills(writer, where, tmp_path, random.Random(f"{kind} {where}"))

    def contents(place: Place) -> list[bytes]:
        # Without names: a run that is killed at its very end is complete, and the next one replaces its files again.
        return [data for name, data in sorted(place.files().items()) if "manifest" not in name]

    want = contents(kills.write(kills.write(kills.place("want"), kind, 25), kind, COUNT, "replace"))
    duration_s = kills.duration_s
    for number in range(100):
        out = kills.write(kills.place(f"out{number}"), kind, 25)
        kills.duration_s = duration_s
        for complete in kills.until_complete(out, kind, COUNT, "replace"):
            assert out.read(kind) in ([new] if complete else [old, new])
        assert contents(out) == want
        if kills.done >= KILLS:
            break
    assert os.listdir(tmp_path / "temporary") == []


@pytest.mark.parametrize("where", PLACES if FULL else ["s3"])
def test_a_job_that_is_killed_lands_once(where: str, writer: Writer, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(INPUTS):
        (tmp_path / "in" / str(number)).write_text(str(number))
    kills = Kills(writer, where, tmp_path, random.Random(where))

    def outputs(place: Place) -> dict[str, bytes]:
        return {name: data for name, data in place.files().items() if not name.startswith(".penstock-job/")}

    want = outputs(kills.write(kills.place("want"), "job", INPUTS))
    assert len(want) == INPUTS * 3 // 2 + 1
    for number in range(100):
        out = kills.place(f"out{number}")
        for complete in kills.until_complete(out, "job", INPUTS):
            seen = outputs(out)
            assert seen.items() <= want.items()  # no output is ever partial
            assert not complete or seen == want
        if kills.done >= KILLS:
            break
    assert os.listdir(tmp_path / "temporary") == []


@dataclass(frozen=True)
class Watched(Memory):
    """Memory that counts open uploads, and fails at one of the calls that write."""

    open: list[int] = field(default_factory=list)  # how many uploads were open, at each beginning
    left: list[int] = field(default_factory=lambda: [1 << 60])
    lock: Any = field(default_factory=threading.Lock)

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        self._count(url)
        return _WatchedUpload(super().put(url, size_hint=size_hint), self)

    def delete(self, url: str) -> None:
        self._count(url)
        super().delete(url)

    def _count(self, url: str) -> None:
        with self.lock:
            self.left[0] -= 1
        if self.left[0] < 0:
            raise StorageError("gone", url)


class _WatchedUpload(Upload):
    def __init__(self, inner: Upload, storage: Watched) -> None:
        super().__init__(inner.url)
        self._inner, self._storage = inner, storage
        self._add(1)

    def _add(self, number: int) -> None:
        with self._storage.lock:
            self._storage.open.append((self._storage.open or [0])[-1] + number)

    def _write(self, data: Any) -> None:
        self._inner.write(data)

    def _commit(self) -> Any:
        self._add(-1)
        return self._inner.commit()

    def _abort(self) -> None:
        self._add(-1)
        self._inner.abort()


def samples(count: int) -> ps.Dataset:
    return ps.from_items([{"__key__": f"{n:04d}", "txt": f"text {n}"} for n in range(count)])


def write(kind: str, count: int, url: str, **options: Any) -> Any:
    limit = {} if kind == "json" else {"max_samples": options.pop("max_samples", 5)}
    return getattr(samples(count), f"write_{kind}")(url, **({"max_bytes": 200} if kind == "json" else limit), **options)


@pytest.mark.parametrize("kind", ["tar", "parquet", "json"])
def test_the_uploads_of_200_files_are_bounded(kind: str) -> None:
    storage, url = Watched(), f"memory://bounded/{kind}"
    for mode in ("new", "replace"):
        packed = write(kind, 1000, url, mode=mode, storage=storage)
        assert len(packed.shards) >= 190
    assert max(storage.open) <= (8 + 2 if kind == "tar" else 4 + 1)  # of files; and the index and the journal
    assert storage.open[-1] == 0


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_replacement_that_fails_at_any_request_leaves_the_old_set(kind: str) -> None:
    old, new = ([f"{n:04d}" for n in range(count)] for count in (10, 15))
    want = f"memory://failing-{kind}/want"
    write(kind, 10, want)
    write(kind, 15, want, mode="replace")
    for calls in range(0, 60, 1 if FULL else 2):
        url, storage = f"memory://failing-{kind}/{calls}", Watched(left=[calls])
        write(kind, 10, url)
        complete = True
        try:
            write(kind, 15, url, mode="replace", storage=storage)
        except StorageError:
            complete = False
            assert Place(url).read(kind) in (old, new)
            write(kind, 15, url, mode="replace")
        assert Place(url).read(kind) == new
        found = Place(url).files()
        found.pop(f"{LANDING[kind]}/owner.json", None)  # if its removal fails, it names a run that is not alive
        assert found == Place(want).files()
        if complete and storage.left[0] >= 0:
            break
    assert 10 < calls < 60


@pytest.mark.parametrize("kind", ["tar", "parquet", "json"])
def test_a_reader_of_a_folder_that_is_replaced_sees_one_set(kind: str, tmp_path: Path) -> None:
    out, stop = Place(str(tmp_path / "out")), threading.Event()
    seen: list[Any] = []
    write(kind, 40, out.url)

    def read() -> None:
        read_set: Any = getattr(ps, f"read_{kind}")
        while not stop.is_set():
            try:
                seen.append(len(read_set(out.url)))
            except PenstockError as exc:  # a file that was listed is deleted before it is opened
                seen.append(-1 if "no such" in str(exc).lower() else str(exc))

    thread = threading.Thread(target=read)
    thread.start()
    for count in (60, 40, 60, 40):
        write(kind, count, out.url, mode="replace")
    stop.set()
    thread.join()
    assert {*seen} <= {40, 60, -1}
    assert {40, 60} & {*seen}


LANDING = {"tar": ".penstock-tar", "parquet": ".penstock-parquet", "json": ".penstock-jsonl"}
HEADER = {"v": 2, "source": "", "stages": "", "stream": False, "options": {}, "mode": "new", "first": 0, "number": 0}


@pytest.mark.parametrize("name", ["../victim", "/victim", "link/victim", "notes.txt", ".hidden", "", "a/../../victim"])
@pytest.mark.parametrize("kind", [*LANDING])
@pytest.mark.parametrize("mode", ["new", "replace", "append"])
def test_a_crafted_journal_names_no_file_outside_of_its_set(kind: str, name: str, mode: str, tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    write(kind, 12, str(out))
    victims = [tmp_path / "victim", outside / "victim", out / "notes.txt", out / ".hidden"]
    for victim in victims:
        victim.write_text("precious")
    (out / "link").symlink_to(outside)
    name = str(tmp_path / "victim") if name == "/victim" else name
    work = out / LANDING[kind]
    draft = {"tar": "shard-000000.tar", "parquet": "00000.parquet", "json": "00000.jsonl"}[kind]
    for line in (
        {"entry": [name, 1, 8, ""], "position": None},
        {"commit": [name], "old": [], "skipped": 0, "classes": None},
        {"commit": [], "old": [name], "skipped": 0, "classes": None},
    ):
        work.mkdir(exist_ok=True)
        entry = {"entry": [draft, 1, 8, ""], "position": None}
        lines = [HEADER, *([entry] if line.get("commit") else []), line]
        (work / "journal.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        (work / draft).unlink(missing_ok=True)
        (work / draft).symlink_to(tmp_path / "victim")
        if mode == "replace":
            assert write(kind, 15, str(out), mode=mode).samples == 15
        else:
            with pytest.raises(PlanError, match=r"journal cannot be read.*mode='replace' starts over"):
                write(kind, 15, str(out), mode=mode)
    assert [victim.read_text() for victim in victims] == ["precious"] * 4


def test_a_work_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "00000.parquet").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".penstock-parquet").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PlanError, match="is a link, which a run does not follow"):
        write("parquet", 5, str(tmp_path / "out"), mode="replace")
    assert (tmp_path / "elsewhere" / "00000.parquet").read_text() == "precious"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tar", ".penstock-pack.json"),
        ("parquet", ".penstock-parquet/names.json"),
        ("parquet", ".penstock-parquet/journal.json"),
        ("json", ".rows.jsonl.partial/journal.json"),
    ],
)
@pytest.mark.parametrize("mode", ["new", "replace", "append"])
def test_a_journal_of_an_old_format_is_refused(kind: str, name: str, mode: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(json.dumps({"files": [["x", "../victim"]], "old": ["../victim"]}))
    with pytest.raises(PlanError, match="the journal of an unfinished run of another version of Penstock"):
        write(kind, 5, str(tmp_path), mode=mode)


def test_interrupted_renames_are_finished_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_replace, renamed = os.replace, []

    def failing_replace(source: Any, target: Any) -> None:
        if str(target).endswith(".parquet") and "/.penstock" not in str(target):
            renamed.append(target)
            if len(renamed) == 3:
                raise OSError("power failure")
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(StorageError, match="power failure"):
        write("parquet", 60, str(tmp_path))
    monkeypatch.undo()
    with pytest.raises(StorageError, match="is incomplete"):
        len(ps.read_parquet(tmp_path))
    with pytest.raises(PlanError, match="unfinished run of another source"):
        write("parquet", 61, str(tmp_path))
    assert write("parquet", 60, str(tmp_path)).samples == 60
    assert len(ps.read_parquet(tmp_path)) == 60


def test_a_file_that_is_not_of_the_set_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    write("tar", 12, str(tmp_path))
    samples(3).write_tar(tmp_path / "extra-%03d.tar")
    (tmp_path / "mine.tar").write_bytes(b"")
    with pytest.raises(PlanError, match="mode='append' adds"):
        write("tar", 13, str(tmp_path))
    samples(4).write_tar(tmp_path / "extra-%03d.tar", mode="replace")
    visible = sorted(name for name in os.listdir(tmp_path) if name.endswith(".tar"))
    assert visible == ["extra-001.tar", "mine.tar", *(f"shard-{n:06d}.tar" for n in range(3))]


@pytest.mark.parametrize("remote", [False, True])
def test_one_shard_that_is_replaced_can_be_read_at_any_time(
    remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{'memory://single' if remote else tmp_path}/all.tar"
    samples(9).write_tar(url)

    def interrupted_write(*args: Any, **options: Any) -> Any:
        if args[2]:  # entries
            raise StorageError("interrupted")
        return write_manifest_at(*args, **options)

    monkeypatch.setattr(commit, "write_manifest_at", interrupted_write)
    with pytest.raises(StorageError, match="interrupted"):
        samples(4).write_tar(url, mode="replace")
    assert len(ps.read_tar(url).take_all()) == len(ps.read_tar(url.removesuffix("all.tar")).take_all()) == 4
    monkeypatch.undo()
    packed = samples(4).write_tar(url, mode="replace")
    assert samples(4).write_tar(url) == packed
    assert len(ps.read_tar(url)) == 4


@pytest.mark.parametrize("name", ["50%%-%04d.tar", "%%d-%d.tar", "my%20data.csv", "50%discount.jsonl", "a%d.tfrecord"])
def test_a_name_with_a_percent_sign_is_found_again(name: str, tmp_path: Path) -> None:
    methods = {".tar": "write_tar", ".csv": "write_csv", ".jsonl": "write_json", ".tfrecord": "write_tfrecords"}
    method, rows = methods[Path(name).suffix], [{"n.cls": n} for n in range(9)]
    packed = getattr(ps.from_items(rows), method)(tmp_path / name)
    assert packed.samples == 9
    assert getattr(ps.from_items(rows), method)(tmp_path / name) == packed
    with pytest.raises(PlanError, match="written from another source"):
        getattr(ps.from_items(rows[:4]), method)(tmp_path / name)
    if method == "write_tar":
        assert getattr(ps.from_items(rows[:4]), method)(tmp_path / name, mode="append").shards == (name % 1,)
        assert len(ps.read_tar(tmp_path)) == 13
    else:
        with pytest.raises(PlanError, match="give a folder"):
            getattr(ps.from_items(rows[:4]), method)(tmp_path / name, mode="append")
    getattr(ps.from_items(rows[:4]), method)(tmp_path / name, mode="replace")
    assert len([one for one in tmp_path.iterdir() if one.suffix == Path(name).suffix]) == 1


def test_a_full_disk_is_one_error_and_the_rerun_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_fsync, synced = os.fsync, []

    def full_disk(fd: int) -> None:
        synced.append(fd)
        if len(synced) > 9:
            raise OSError(28, "No space left on device")
        real_fsync(fd)

    for kind in ("tar", "parquet", "json"):
        synced.clear()
        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(StorageError, match="cannot write: No space left on device"):
            write(kind, 60, str(tmp_path / kind))
        monkeypatch.undo()
        assert len((tmp_path / kind / LANDING[kind] / "journal.jsonl").read_text().splitlines()) > 2
        write(kind, 60, str(tmp_path / kind))
        write(kind, 60, str(tmp_path / f"{kind}-want"))
        assert Place(str(tmp_path / kind)).files() == Place(str(tmp_path / f"{kind}-want")).files()


def test_drafts_of_remote_runs_are_found_again_and_removed_at_the_end(temporary: Path) -> None:
    url, storage = "memory://drafts/out", Watched(left=[8])
    with pytest.raises(StorageError):
        write("parquet", 60, url, storage=storage)
    (folder,) = temporary.iterdir()
    assert [path.name for path in folder.iterdir()]
    os.utime(folder / "00000.parquet", ns=(1, 1))
    (temporary / (folder.name[:-8] + "other000")).symlink_to("/")  # not a folder of ours
    assert write("parquet", 60, url).samples == 60
    assert len(ps.read_parquet(url)) == 60
    assert [path.name for path in temporary.iterdir()] == [folder.name[:-8] + "other000"]


def test_a_folder_with_files_of_others_is_not_replaced(tmp_path: Path) -> None:
    ds = ps.from_items([{"a": 1}])
    ds.write_parquet(tmp_path)
    (tmp_path / "foreign.parquet").write_bytes(b"")
    with pytest.raises(PlanError, match=r"holds foreign\.parquet, which Penstock did not write.*; remove them"):
        ds.write_parquet(tmp_path, mode="replace", version="2")
    (tmp_path / "foreign.parquet").unlink()
    assert ds.write_parquet(tmp_path, mode="replace", version="2").samples == 1


def test_removing_what_an_append_left_drops_it(tmp_path: Path) -> None:
    def write(failing: bool, mode: Any) -> ps.Packed:
        def check(row: dict[str, Any]) -> dict[str, Any]:
            if failing and row["a"] == 30:
                raise ValueError("thirty")
            return row

        return ps.from_items([{"a": n} for n in range(40)]).map(check).write_csv(tmp_path, max_bytes=40, mode=mode)

    first = write(False, "new")
    with pytest.raises(PenstockError, match="thirty"):
        write(True, "append")
    with pytest.raises(
        PlanError, match=r"unfinished run .*; repeat that run to finish it, or remove (.*) to drop"
    ) as it:
        write(False, "append")
    shutil.rmtree(str(it.value).rpartition("remove ")[2].partition(" to drop")[0])
    assert write(False, "append").shards != first.shards
    assert [row["a"] for row in ps.read_csv(str(tmp_path))] == [*range(40)] * 2


def test_a_rerun_after_another_epoch_is_the_same_run(tmp_path: Path) -> None:
    ds = ps.from_items([{"a": n} for n in range(4)])
    first = ds.write_csv(tmp_path)
    assert list(ds) == list(ds)
    assert ds.write_csv(tmp_path) == first


@pytest.mark.parametrize("method", ["write_tar", "write_parquet", "write_csv", "write_json", "write_tfrecords"])
def test_a_complete_run_says_again_what_was_skipped(method: str, tmp_path: Path) -> None:
    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row["cls"] in (3, 5):
            raise ValueError("wrong")
        return row

    write = getattr(ps.from_items([{"cls": n} for n in range(8)]).map(check).on_error("skip"), method)
    first = write(tmp_path)
    assert (first.samples, first.skipped) == (6, 2)
    assert write(tmp_path) == first


@pytest.mark.parametrize("method", ["write_tar", "write_parquet", "write_csv", "write_json", "write_tfrecords"])
def test_a_set_without_samples_can_be_read(method: str, tmp_path: Path) -> None:
    packed = getattr(ps.from_items([]), method)(tmp_path)
    assert (len(packed.shards), packed.samples) == (1, 0)
    assert getattr(ps, method.replace("write", "read"))(str(tmp_path)).take_all() == []


def test_time_is_not_part_of_what_is_written(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write("tar", 20, str(tmp_path / name))
        time.sleep(0.01)
    assert Place(str(tmp_path / "a")).files() == Place(str(tmp_path / "b")).files()
