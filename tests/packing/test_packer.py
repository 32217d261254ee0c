"""Packing is exact: the same bytes for any workers and after any interruption, and nothing half-written."""

from __future__ import annotations

import csv
import os
import random
import re
import resource
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock as ps
from penstock.blobs.stamp import Stamp
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.manifest import read_manifest, read_manifest_at
from penstock.formats.tar.index import Index
from penstock.storage import S3, Info, Listed, Memory, Storage, Upload, open_storage
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server

WORK_FILE = re.compile(r"(\d{8}-)?journal\.jsonl|owner\.json|lock|\..*")
FULL = os.environ.get("PENSTOCK_FULL") == "1"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two classes of 60 files each, of random sizes from 0 on."""
    folder = tmp_path_factory.mktemp("photos")
    rng = random.Random(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number in range(60):
            (folder / name / f"{name}.{number:03d}.JPEG").write_bytes(rng.randbytes(rng.randrange(6000)))
    return folder


def content(folder: str | Path) -> dict[str, bytes]:
    """Return all files of a folder, with indexes that have no modification times and inodes."""
    if not str(folder).startswith("memory:"):
        found = {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    else:
        memory = open_storage(str(folder))
        found = {one.url.rpartition("/")[2]: b"".join(memory.stream(one.url)) for one in memory.list(str(folder))}
    for name, data in found.items():
        if name.endswith(".index"):
            index = Index.from_bytes(data)
            found[name] = index.stamped(Stamp(index.shard_size), index.checksums).to_bytes()
    return found


def visible(folder: str | Path) -> dict[str, bytes]:
    """Return the files that readers see, without those in the work folder of a run."""
    return {name: data for name, data in content(folder).items() if not WORK_FILE.fullmatch(name)}


def tars(folder: str | Path) -> list[bytes]:
    return [data for name, data in sorted(content(folder).items()) if name.endswith(".tar")]


def keys(folder: str | Path) -> list[str]:
    return [sample["__key__"] for sample in ps.read_tar(str(folder))]


def test_a_folder_of_class_folders_becomes_shards(photos: Path, tmp_path: Path) -> None:
    packed = ps.pack(photos, tmp_path / "out", max_samples=50)
    assert packed.shards == ("shard-000000.tar", "shard-000001.tar", "shard-000002.tar")
    assert (packed.samples, packed.skipped, packed.estimated) == (120, 0, False)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.classes == ("cat", "dog")
    seen = []
    for number, sample in enumerate(ps.read_tar(str(tmp_path / "out"))):
        stem = sample["__key__"].partition("-")[2]
        label = int(sample["cls"])
        assert sample["__key__"].startswith(f"{number:09d}-")
        name = ("cat", "dog")[label]
        assert sample["jpg"] == (photos / name / f"{stem.replace('_', '.')}.JPEG").read_bytes()
        seen.append(stem)
    assert len(set(seen)) == 120
    assert seen != sorted(seen)
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


def test_without_shuffle_samples_are_sorted_by_path(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "out", shuffle=False)
    stems = [key.partition("-")[2] for key in keys(tmp_path / "out")]
    assert stems == sorted(stems)


def test_keys_sort_in_the_order_of_the_samples(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "out", max_samples=33)
    found = keys(tmp_path / "out")
    assert found == sorted(found)


def test_the_seed_determines_the_order(photos: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        ps.pack(photos, tmp_path / name, seed=seed)
    assert keys(tmp_path / "a") == keys(tmp_path / "b") != keys(tmp_path / "c")


@pytest.mark.parametrize("workers", [1, 2, 5, (1, 3)], ids=str)
def test_the_bytes_are_the_same_for_any_number_of_workers(photos: Path, tmp_path: Path, workers: Any) -> None:
    ps.pack(photos, tmp_path / "default", max_bytes=60_000)
    ps.pack(photos, tmp_path / "out", max_bytes=60_000, workers=workers)
    assert content(tmp_path / "out") == content(tmp_path / "default")
    assert max(len(data) for name, data in content(tmp_path / "out").items() if name.endswith(".tar")) <= 60_000


def test_remote_shards_have_the_bytes_of_local_ones(photos: Path, tmp_path: Path) -> None:
    local = ps.pack(photos, tmp_path / "out", max_samples=50)
    remote = ps.pack(photos, "memory://pack/remote", max_samples=50)
    assert (remote.shards, remote.nbytes) == (local.shards, local.nbytes)
    assert content("memory://pack/remote") == content(tmp_path / "out")
    assert keys("memory://pack/remote") == keys(tmp_path / "out")


@pytest.mark.parametrize("compress", ["gz", "zst"])
def test_shards_may_be_compressed(photos: Path, tmp_path: Path, compress: Any) -> None:
    packed = ps.pack(photos, tmp_path / "out", max_samples=100, compress=compress)
    assert packed.shards == (f"shard-000000.tar.{compress}", f"shard-000001.tar.{compress}")
    assert len(keys(tmp_path / "out")) == 120


@dataclass(frozen=True)
class Failing:
    """Memory whose uploads fail once ``room[0]`` bytes have been written."""

    room: list[int] = field(default_factory=lambda: [1 << 60])
    memory: Memory = field(default_factory=Memory)

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        return _FailingUpload(self.memory.put(url), self.room)

    def info(self, url: str) -> Info:
        return self.memory.info(url)

    def read(self, url: str, start: int, stop: int, **more: Any) -> bytes | memoryview:
        return self.memory.read(url, start, stop, **more)

    def stream(self, url: str) -> Iterator[bytes]:
        return self.memory.stream(url)

    def list(self, prefix: str) -> Iterator[Listed]:
        return self.memory.list(prefix)

    def delete(self, url: str) -> None:
        self.memory.delete(url)

    def local_path(self, url: str) -> str | None:
        return None


class _FailingUpload(Upload):
    def __init__(self, inner: Upload, room: list[int]) -> None:
        super().__init__(inner.url)
        self._inner, self._room = inner, room

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        self._room[0] -= len(data)
        if self._room[0] < 0:
            raise StorageError("there is no more room", self.url)
        self._inner.write(data)

    def _commit(self) -> Info:
        return self._inner.commit()

    def _abort(self) -> None:
        self._inner.abort()


@pytest.mark.parametrize("room", [0, 900, 40_000, 130_000, 200_000, 300_000])
def test_a_full_storage_holds_only_whole_shards_and_the_run_can_be_resumed(photos: Path, room: int) -> None:
    want_url, url = "memory://pack/never-full", f"memory://pack/full-{room}"
    ps.pack(photos, want_url, max_samples=20)
    want = content(want_url)
    storage: Any = Failing()
    storage.room[0] = room
    with pytest.raises(StorageError, match="no more room"):
        ps.pack(photos, url, max_samples=20, storage=storage)
    assert visible(url).items() <= want.items()
    assert "manifest.json" not in content(url)
    storage.room[0] = 1 << 60
    packed = ps.pack(photos, url, max_samples=20, storage=storage)
    assert packed.samples == 120
    assert content(url) == want


class Control(SimpleNamespace):
    """Directs and observes a run; it is pickled by a name, so that what it holds is not part of the code."""

    def __reduce__(self) -> str:
        return "control"


def test_a_resumed_run_reads_only_what_was_not_stored(tmp_path: Path) -> None:
    control = Control(fail_at=77, requested=deque())

    class Numbers:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, number: int) -> dict[str, Any]:
            control.requested.append(number)
            if number == control.fail_at:
                raise RuntimeError("out of order")
            return {"label": number}

    source = Numbers()
    with pytest.raises(DataError, match=r"item 77: out of order"):
        ps.pack(source, tmp_path / "out", max_samples=10, shuffle=False)
    complete = count_journal_entries(tmp_path / "out")
    assert 1 <= complete <= 7
    control.fail_at = None
    control.requested.clear()
    assert ps.pack(source, tmp_path / "out", max_samples=10, shuffle=False).samples == 100
    assert min(control.requested) <= complete * 10
    assert [s["cls"] for s in ps.read_tar(str(tmp_path / "out")).decode()] == list(range(100))


def count_journal_entries(folder: Path) -> int:
    return len((folder / ".penstock-tar" / "journal.jsonl").read_text().splitlines()) - 1


PACKING = """
import sys, time
import penstock as ps
def slowly(sample):
    time.sleep(0.001)
    return sample
source = sys.argv[1]
if len(sys.argv) > 3:
    source = ps.read_files(source).map(lambda s: {"bin": s["bytes"]}).map(slowly, workers=2)
print("started", flush=True)
ps.pack(source, sys.argv[2], max_samples=6)
"""


@pytest.mark.parametrize("kind", ["folder", "dataset"])
def test_a_run_that_is_killed_repeatedly_gives_the_same_bytes(
    photos: Path, tmp_path: Path, kind: str, warm_python: str
) -> None:
    more = ["dataset"] if kind == "dataset" else []
    script, out = [warm_python, "-c", PACKING, str(photos)], tmp_path / "out"
    started = time.monotonic()
    subprocess.run([*script, str(tmp_path / "want"), *more], check=True, stdout=subprocess.DEVNULL)
    want, rng = content(tmp_path / "want"), random.Random(5)
    took_s = min(time.monotonic() - started, 0.6)
    for _ in range(10 if FULL else 2):
        with subprocess.Popen([*script, str(out), *more], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(rng.random() * took_s)
            process.send_signal(signal.SIGRTMIN)
        seen = {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.exists() else set()
        assert {name: data for name, data in content(out).items() if name in seen}.items() <= want.items()
    subprocess.run([*script, str(out), *more], check=True, stdout=subprocess.DEVNULL)
    assert content(out) == want


UPLOADING = """
import sys, time
import penstock as ps
from penstock.storage import S3
def large(sample):
    time.sleep(0.1)
    return {"bin": bytes([sample["n"]]) * 9_000_000}
source = ps.from_items([{"n": number} for number in range(5)]).map(large)
ps.pack(source, sys.argv[1], max_bytes="40MB", shuffle=False, storage=S3(sys.argv[2], sys.argv[3], sys.argv[4]))
"""


def test_a_run_into_a_bucket_that_was_killed_and_resumed_leaves_no_uploads(tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "buckets" / "bucket").mkdir(parents=True)
    with s3_server(tmp_path / "buckets") as port:
        storage = S3(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)

        def pending() -> list[str]:
            try:
                found = storage.call("list_multipart_uploads", "s3://bucket/out", {"Bucket": "bucket"})
            except StorageError:  # how this server answers if there are none
                return []
            return [one["Key"] for one in found.get("Uploads", ())]

        call = [warm_python, "-c", UPLOADING, "s3://bucket/out", str(storage.endpoint), ACCESS_KEY, SECRET_KEY]
        with subprocess.Popen(call) as process:
            deadline = time.monotonic() + 120
            while not pending() and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGRTMIN)
        assert pending() == ["out/shard-000000.tar"]
        subprocess.run(call, check=True)
        assert pending() == []
        found = [sample["bin"] for sample in ps.read_tar("s3://bucket/out", storage=storage)]
        assert found == [bytes([number]) * 9_000_000 for number in range(5)]


def test_a_run_can_be_resumed_after_any_write(photos: Path) -> None:
    """The storage fails at each put and delete in turn; what was written before stays."""
    ps.pack(photos, "memory://pack/whole", max_samples=40)
    want = content("memory://pack/whole")

    class FailingAt(Failing):
        def put(self, url: str, *, size_hint: int | None = None) -> Upload:
            self.room[0] -= 1
            if self.room[0] < 0:
                raise StorageError("gone", url)
            return self.memory.put(url)

        def delete(self, url: str) -> None:
            self.room[0] -= 1
            if self.room[0] < 0:
                raise StorageError("gone", url)
            self.memory.delete(url)

    for step in range(0, 40, 1 if FULL else 2):
        url = f"memory://pack/failing-{step}"
        storage: Any = FailingAt([step])
        try:
            ps.pack(photos, url, max_samples=40, storage=storage)
        except StorageError:
            ps.pack(photos, url, max_samples=40)
        else:
            break
        assert content(url) == want
    assert 8 < step < 40


def test_a_complete_run_is_not_repeated(photos: Path, tmp_path: Path) -> None:
    first = ps.pack(photos, tmp_path / "out", max_samples=50)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert ps.pack(photos, tmp_path / "out", max_samples=50) == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_complete_run_that_lost_a_shard_is_refused(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "out", max_samples=50)
    (tmp_path / "out" / "shard-000001.tar").unlink()
    with pytest.raises(PlanError, match="mode='replace'"):
        ps.pack(photos, tmp_path / "out", max_samples=50)
    assert ps.pack(photos, tmp_path / "out", max_samples=50, mode="replace").samples == 120


def test_shards_of_another_source_are_replaced_only_on_request(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "out", max_samples=20)
    with pytest.raises(PlanError, match=r"holds 6 files of another run.*mode='append' adds.*mode='replace' replaces"):
        ps.pack(photos / "cat", tmp_path / "out", max_samples=20)
    ps.pack(photos / "cat", tmp_path / "out", max_samples=20, mode="replace")
    ps.pack(photos / "cat", tmp_path / "want", max_samples=20)
    assert tars(tmp_path / "out") == tars(tmp_path / "want")
    assert keys(tmp_path / "out") == keys(tmp_path / "want")


class FewShards(Failing):
    """Memory with room for ``room[0]`` shards."""

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        if url.endswith(".tar"):
            self.room[0] -= 1
            if self.room[0] < 0:
                raise StorageError("there is no more room", url)
        return self.memory.put(url)


def pack_interrupted(photos: Path, url: str, **options: Any) -> None:
    storage: Any = FewShards([3])
    with pytest.raises(StorageError):
        ps.pack(photos, url, max_samples=20, storage=storage, **options)


def test_an_unfinished_run_is_resumed_only_by_the_same_run(photos: Path) -> None:
    url = "memory://pack/unfinished"
    pack_interrupted(photos, url)
    with pytest.raises(PlanError, match=r"unfinished run of another source.*mode='replace'"):
        ps.pack(photos / "cat", url, max_samples=20)
    with pytest.raises(PlanError, match=r"unfinished run with other options \(max_samples, seed\)"):
        ps.pack(photos, url, max_samples=30, seed=4)
    ps.pack(photos / "cat", url, max_samples=30, mode="replace")
    ps.pack(photos / "cat", "memory://pack/fresh", max_samples=30)
    assert tars(url) == tars("memory://pack/fresh")
    assert keys(url) == keys("memory://pack/fresh")


def test_a_run_that_lost_a_shard_is_not_resumed(photos: Path) -> None:
    url = "memory://pack/lost"
    pack_interrupted(photos, url)
    Memory().delete(f"{url}/shard-000000.tar")
    with pytest.raises(PlanError, match=r"shard-000000\.tar.*gone or changed.*mode='replace'"):
        ps.pack(photos, url, max_samples=20)


def test_a_damaged_journal_does_not_prevent_starting_over(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".penstock-tar").mkdir(parents=True)
    (tmp_path / "out" / ".penstock-tar" / "journal.jsonl").write_text('{"v": 2}\n{"entry": 3}\n')
    with pytest.raises(PlanError, match="mode='replace'"):
        ps.pack(photos, tmp_path / "out")
    assert ps.pack(photos, tmp_path / "out", mode="replace").samples == 120


def test_appended_shards_follow_the_existing_ones(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ps.pack(photos, out, max_samples=50)
    before = content(out)
    more = ps.pack(photos, out, max_samples=50, mode="append", seed=3)
    assert more.shards == ("shard-000003.tar", "shard-000004.tar", "shard-000005.tar")
    after = content(out)
    assert {name: after[name] for name in before if name != "manifest.json"} == {
        name: data for name, data in before.items() if name != "manifest.json"
    }
    found = keys(out)
    assert len(set(found)) == 240
    assert found == sorted(found)
    manifest = read_manifest(out)
    assert manifest is not None
    assert [shard.samples for shard in manifest.shards] == [50, 50, 20] * 2


def test_an_interrupted_append_is_resumed(photos: Path) -> None:
    for url in ("memory://pack/append-a", "memory://pack/append-b"):
        ps.pack(photos, url, max_samples=20)
    pack_interrupted(photos, "memory://pack/append-a", mode="append")
    assert len(keys("memory://pack/append-b")) == 120
    for url in ("memory://pack/append-a", "memory://pack/append-b"):
        ps.pack(photos, url, max_samples=20, mode="append")
    assert content("memory://pack/append-a") == content("memory://pack/append-b")


def test_a_source_with_other_classes_is_not_appended(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "out")
    (tmp_path / "src" / "cow").mkdir(parents=True)
    (tmp_path / "src" / "cow" / "1.jpg").write_bytes(b"x")
    with pytest.raises(PlanError, match="the same number would mean two things"):
        ps.pack(tmp_path / "src", tmp_path / "out", mode="append")


def test_appending_to_a_new_folder_packs(photos: Path, tmp_path: Path) -> None:
    assert ps.pack(photos, tmp_path / "out", mode="append").samples == 120


@pytest.mark.parametrize("options", [{"max_samples": 7}, {"max_bytes": 30_000}, {"max_bytes": 9_000}, {}], ids=str)
def test_a_dry_run_of_files_is_exact_and_writes_nothing(photos: Path, tmp_path: Path, options: Any) -> None:
    estimate = ps.pack(photos, tmp_path / "out", dry_run=True, **options)
    assert not (tmp_path / "out").exists()
    assert estimate == ps.pack(photos, tmp_path / "out", **options)


def test_a_dry_run_of_values_to_encode_is_an_estimate(tmp_path: Path) -> None:
    images = [(np.full((40, 40, 3), number % 256, np.uint8), number) for number in range(200)]
    estimate = ps.pack(images, tmp_path / "out", max_samples=30, dry_run=True)
    packed = ps.pack(images, tmp_path / "out", max_samples=30)
    assert estimate.estimated
    assert (estimate.samples, estimate.shards) == (200, packed.shards)
    assert estimate.nbytes == pytest.approx(packed.nbytes, rel=0.2)


def test_an_error_names_a_missing_file_and_its_line_unless_it_is_skipped(photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        for number in range(10):
            name = "missing.jpg" if number == 6 else str(photos / "cat" / f"cat.{number:03d}.JPEG")
            rows.writerow([name, number])
    with pytest.raises(DataError, match=r"line 8: cannot read .*missing\.jpg.*No such file"):
        ps.pack(path, tmp_path / "out")
    packed = ps.pack(path, tmp_path / "out", on_error="skip")
    assert (packed.samples, packed.skipped) == (9, 1)


def test_a_map_style_dataset_gives_the_same_bytes_from_processes(tmp_path: Path) -> None:
    class Squares:  # local, so that it is pickled by value for the worker processes
        def __len__(self) -> int:
            return 40

        def __getitem__(self, number: int) -> Any:
            return np.full((8, 8, 3), number, np.uint8), number % 3

    source = Squares()
    for name, workers in (("none", None), ("one", 1), ("two", 2)):
        ps.pack(source, tmp_path / name, max_samples=15, workers=workers)
    assert content(tmp_path / "none") == content(tmp_path / "one") == content(tmp_path / "two")
    for sample in ps.read_tar(str(tmp_path / "two")).decode():
        assert sample["png"][0, 0, 0] % 3 == sample["cls"]


def test_a_torch_dataset_is_packed_without_torchvision(tmp_path: Path) -> None:
    images = torch.arange(5 * 3 * 6 * 4, dtype=torch.uint8).reshape(5, 3, 6, 4)
    source = torch.utils.data.TensorDataset(images, torch.arange(5))
    ps.pack(source, tmp_path / "out", shuffle=False)
    for number, sample in enumerate(ps.read_tar(str(tmp_path / "out")).decode()):
        assert np.array_equal(sample["png"], images[number].permute(1, 2, 0).numpy())
        assert sample["cls"] == number


@pytest.mark.parametrize(
    "image",
    [
        Image.new("L", (5, 4), 7),
        Image.new("RGBA", (5, 4), (1, 2, 3, 4)),
        Image.new("1", (5, 4), 1),
        Image.fromarray(np.arange(20, dtype=np.uint16).reshape(4, 5) * 3000),
        np.arange(20, dtype=np.uint16).reshape(4, 5) * 3000,
        np.arange(60, dtype=np.uint8).reshape(4, 5, 3),
        np.linspace(0, 1, 20, dtype=np.float32).reshape(4, 5),
    ],
    ids=["L", "RGBA", "1", "I;16", "uint16", "rgb", "float"],
)
def test_images_of_every_mode_round_trip(image: Any, tmp_path: Path) -> None:
    ps.pack([(image, 1)], tmp_path / "out")
    restored = ps.read_tar(str(tmp_path / "out")).decode().first()["png"]
    want = np.asarray(image)
    want = want.astype(np.uint8) * 255 if want.dtype == bool else want
    want = np.rint(want * 255).astype(np.uint8) if want.dtype == np.float32 else want
    assert np.array_equal(restored, want)
    assert restored.dtype == want.dtype


def test_images_may_be_stored_as_jpeg(tmp_path: Path) -> None:
    ps.pack([(Image.new("RGB", (8, 8), (200, 10, 10)), 1)], tmp_path / "out", image="jpg")
    assert ps.read_tar(str(tmp_path / "out")).first()["jpg"].startswith(b"\xff\xd8\xff")
    with pytest.raises(DataError, match=r"item 0: .*transparency"):
        ps.pack([(Image.new("RGBA", (8, 8)), 1)], tmp_path / "bad", image="jpg")


def test_a_dataset_keeps_its_keys_and_its_order(tmp_path: Path) -> None:
    items = [{"__key__": f"k{number:02d}", "txt": f"text {number}", "cls": number} for number in range(30)]
    ds = ps.from_items(items).shuffle(seed=9)
    ps.pack(ds, tmp_path / "out", max_samples=8)
    assert keys(tmp_path / "out") == [sample["__key__"] for sample in ds.epoch(0)]
    ps.pack(ps.from_items(items), tmp_path / "plain", shuffle=False)
    assert keys(tmp_path / "plain") == [item["__key__"] for item in items]


def test_repacked_shards_keep_the_class_names(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "one")
    ps.pack(tmp_path / "one", tmp_path / "two")
    manifest = read_manifest(tmp_path / "two")
    assert manifest is not None
    assert manifest.classes == ("cat", "dog")


def test_shards_may_be_repacked(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "small", max_samples=10)
    packed = ps.pack(tmp_path / "small", tmp_path / "large", shuffle=False)
    assert len(packed.shards) == 1
    assert keys(tmp_path / "large") == keys(tmp_path / "small")


def test_a_dataset_with_a_late_stage_is_packed_and_resumed(tmp_path: Path) -> None:
    def twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"txt": f"{sample['txt']} {part}"} for part in "ab"]

    source = ps.from_items([{"txt": str(number)} for number in range(50)]).flat_map(twice)
    ps.pack(source, "memory://pack/late", max_samples=9)
    storage: Any = Failing()
    storage.room[0] = 60_000
    with pytest.raises(StorageError):
        ps.pack(source, "memory://pack/late-2", max_samples=9, storage=storage)
    assert read_manifest_at("memory://pack/late-2") is None
    ps.pack(source, "memory://pack/late-2", max_samples=9)
    assert content("memory://pack/late-2") == content("memory://pack/late")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"format": "zip"}, "format"),
        ({"format": "parquet", "compress": "bz2"}, "compress"),
        ({"shuffle": "yes"}, "shuffle='yes': expected True or False"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_samples": 0}, "max_samples"),
        ({"workers": 0}, "workers"),
        ({"compress": "rar"}, "compress"),
        ({"image": "bmp"}, "image"),
        ({"seed": -1}, "seed"),
        ({"on_error": "ignore"}, "on_error"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_before_anything_is_written(
    photos: Path, tmp_path: Path, given: Any, problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        ps.pack(photos, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", [7, iter(()), None], ids=["number", "iterator", "nothing"])
def test_what_cannot_be_packed_is_refused(source: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be packed"):
        ps.pack(source, tmp_path / "out")


@pytest.mark.parametrize("url", [3, None, b"out", ""], ids=str)
def test_a_target_that_is_not_a_path_is_refused(photos: Path, url: Any) -> None:
    with pytest.raises(PlanError, match=r"url=.*: give a path or a URL"):
        ps.pack(photos, url)


def test_the_target_must_be_a_folder_outside_the_source(photos: Path, tmp_path: Path) -> None:
    for target in ("out.tar", "out-%d.tar", "out.parquet"):
        with pytest.raises(PlanError, match="give a folder"):
            ps.pack(photos, tmp_path / target)
    for inside in (photos, photos / "cat" / "packed"):
        with pytest.raises(PlanError, match="outside"):
            ps.pack(photos, inside)


def test_a_folder_that_cannot_be_written_is_a_storage_error(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        ps.pack(photos, tmp_path / "file" / "out")


def test_a_full_disk_leaves_only_whole_shards(photos: Path, tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        with pytest.raises(StorageError, match=r"cannot write.*large"):
            ps.pack(photos, tmp_path / "out", max_bytes=200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, old)
    assert os.listdir(tmp_path / "out") == []
    ps.pack(photos, tmp_path / "out", max_bytes=200_000)
    ps.pack(photos, tmp_path / "want", max_bytes=200_000)
    assert content(tmp_path / "out") == content(tmp_path / "want")


def test_drafts_of_killed_runs_are_removed_and_files_of_others_are_not(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".penstock-tar").mkdir(parents=True)
    with subprocess.Popen(["true"]) as gone:
        pass
    draft = out / ".penstock-tar" / f".shard-000000.tar.{gone.pid}-0123abcd.partial"
    dead, alive = (out / f".manifest.json.{pid}-0123abcd.partial" for pid in (gone.pid, os.getpid()))
    other = out / f".other.{gone.pid}-0123abcd.partial"
    for path in (draft, dead, alive, other):
        path.write_bytes(b"half")
    ps.pack(photos, out)
    assert [path for path in (draft, dead, alive, other) if path.exists()] == [alive, other]


def test_the_progress_bar_shows_samples_and_the_time_left(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.pack(photos, tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    ps.pack(photos, tmp_path / "out", progress=True)
    shown = capsys.readouterr().err
    assert "packing" in shown
    assert "120/120 samples" in shown
    assert "left" in shown


def test_the_manifest_does_not_name_the_source_folder(photos: Path) -> None:
    packed = ps.pack(photos, "memory://pack/manifest")
    text = content("memory://pack/manifest")["manifest.json"].decode()
    assert str(photos) not in text
    assert packed.folder == "memory://pack/manifest"


def _check(storage: Callable[[], Storage]) -> None:
    assert isinstance(storage(), Storage)


def test_the_failing_storage_is_a_storage() -> None:
    _check(Failing)


def test_a_bucket_gets_the_bytes_of_local_shards(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "buckets" / "bucket").mkdir(parents=True)
    want = ps.pack(photos, tmp_path / "out", max_samples=50)
    with s3_server(tmp_path / "buckets") as port:
        storage = S3(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)
        packed = ps.pack(photos, "s3://bucket/out", max_samples=50, storage=storage)
        assert (packed.folder, packed.shards) == ("s3://bucket/out", want.shards)
        assert ps.pack(photos, "s3://bucket/out", max_samples=50, storage=storage) == packed
        again = ps.pack("s3://bucket/out", "s3://bucket/again", max_samples=50, shuffle=False, storage=storage)
        assert (again.shards, again.nbytes) == (packed.shards, packed.nbytes)
        names = [one.url.rpartition("/")[2] for one in storage.list("s3://bucket/out")]
        assert names == sorted(os.listdir(tmp_path / "out"))
        for name in (*want.shards, "manifest.json"):
            assert b"".join(storage.stream(f"s3://bucket/out/{name}")) == (tmp_path / "out" / name).read_bytes()
