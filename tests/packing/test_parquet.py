"""Packing into Parquet gives the samples that tar shards have, with media embedded and features in the schema."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import datasets
import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock import vision
from penstock.errors import DataError, PlanError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test
KILLED = """
import os, signal, sys
import penstock as ps
from penstock.landing import parquet_sink

file_finished = parquet_sink.ParquetSink._complete

def kill_after_third_file(self, file):
    file_finished(self, file)
    if len(self._landing.entries) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

parquet_sink.ParquetSink._complete = kill_after_third_file
ps.pack(sys.argv[1], sys.argv[2], format="parquet", max_bytes=20_000)
"""


@pytest.fixture(autouse=True)
def _no_bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    datasets.disable_progress_bars()
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # else it starts a thread for bars that are not shown
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two classes of 40 images each; the last image has another extension than the others."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number in range(40):
            image = Image.fromarray(rng.integers(0, 255, (16, 20, 3), np.uint8))
            image.save(folder / name / f"{number:02d}.{'png' if (name, number) == ('dog', 39) else 'JPEG'}")
    return folder


class Drawn:
    """A map-style dataset of computed images and labels."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, number: int) -> Any:
        return np.full((8, 9, 3), number, np.uint8), number % 3


def samples(ds: ps.Dataset) -> list[dict[str, Any]]:
    """Return decoded samples without their URLs and without fields that are None."""
    plain: list[dict[str, Any]] = []
    for sample in ds.decode():
        fields = {name: value for name, value in sorted(sample.items()) if value is not None and name != "__url__"}
        plain.append({name: getattr(value, "tolist", lambda value=value: value)() for name, value in fields.items()})
    return plain


def loaded(folder: Path, cache: Path) -> datasets.Dataset:
    """Load a folder with Hugging Face datasets."""
    return datasets.load_dataset("parquet", data_dir=str(folder), cache_dir=str(cache), split="train")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_list(folder: Path, text: str) -> Path:
    (folder / "list.csv").write_text(text)
    return folder / "list.csv"


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_folder_has_the_samples_that_shards_have(photos: Path, tmp_path: Path, shuffle: bool) -> None:
    ps.pack(photos, tmp_path / "tar", shuffle=shuffle, seed=3)
    packed = ps.pack(photos, tmp_path / "out", format="parquet", max_bytes=20_000, shuffle=shuffle, seed=3)
    assert packed.samples == 80
    assert len(packed.shards) > 3
    assert packed.shards[0] == f"00000-of-{len(packed.shards):05d}.parquet"
    sizes = [(tmp_path / "out" / name).stat().st_size for name in packed.shards]
    assert max(sizes) <= 20_000
    assert sum(sizes) == packed.nbytes
    assert samples(ps.read_parquet(tmp_path / "out")) == samples(ps.read_tar(str(tmp_path / "tar")))


@pytest.mark.parametrize("workers", [None, 2])
def test_items_have_the_samples_that_shards_have(tmp_path: Path, workers: Any) -> None:
    ps.pack(Drawn(), tmp_path / "tar")
    ps.pack(Drawn(), tmp_path / "out", format="parquet", workers=workers)
    assert samples(ps.read_parquet(tmp_path / "out")) == samples(ps.read_tar(str(tmp_path / "tar")))


def test_a_list_has_the_samples_that_shards_have(photos: Path, tmp_path: Path) -> None:
    rows = [f"{photos}/cat/{n:02d}.JPEG,{'even' if n % 2 == 0 else 'odd'},Größe {n},{n}" for n in range(9)]
    source = write_list(tmp_path, "\n".join(["path,label,caption,extra", *rows]))
    ps.pack(source, tmp_path / "tar")
    ps.pack(source, tmp_path / "out", format="parquet")
    found = samples(ps.read_parquet(tmp_path / "out"))
    assert found == samples(ps.read_tar(str(tmp_path / "tar")))
    assert found[0].keys() == {"__key__", "jpg", "cls", "txt", "json"}


def test_hugging_face_reads_the_files_with_their_features(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "out", format="parquet", shuffle=False)
    found = loaded(tmp_path / "out", tmp_path / "cache")
    assert found.features == datasets.Features(
        {
            "__key__": datasets.Value("string"),
            "jpg": datasets.Image(),
            "png": datasets.Image(),
            "cls": datasets.ClassLabel(names=["cat", "dog"]),
        }
    )
    assert found[0]["jpg"].size == (20, 16)
    assert found[79]["png"].size == (20, 16)
    again = ps.pack(found, tmp_path / "again", format="parquet", shuffle=False)  # tables keep their columns
    assert again.samples == 80
    assert samples(ps.read_parquet(tmp_path / "again")) == samples(ps.read_parquet(tmp_path / "out"))
    assert ps.from_huggingface(found).first() == ps.read_parquet(tmp_path / "again").first()


def test_media_of_shards_and_of_decoded_samples_are_embedded(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "tar", shuffle=False)
    shards = ps.read_tar(str(tmp_path / "tar"))
    for name, source in (("shards", tmp_path / "tar"), ("decoded", shards.decode("rgb8"))):
        ps.pack(source, tmp_path / name, format="parquet", shuffle=False)
        assert samples(ps.read_parquet(tmp_path / name)) == samples(shards)
        first = ps.read_parquet(tmp_path / name).first()
        assert "__url__" not in first
        assert first["jpg"].keys() == {"bytes", "path"}
    found = loaded(tmp_path / "shards", tmp_path / "cache")
    assert found.features["cls"].names == ["cat", "dog"]


def test_a_killed_run_is_resumed_with_other_workers_and_gives_the_same_bytes(
    photos: Path, tmp_path: Path, warm_python: str
) -> None:
    call = [warm_python, "-c", KILLED, str(photos), str(tmp_path / "out")]
    assert subprocess.run(call, timeout=300, check=False).returncode == -9
    drafts = tmp_path / "out" / ".penstock-parquet"
    assert len(list(drafts.glob("*.parquet"))) >= 3
    assert not list((tmp_path / "out").glob("*.parquet"))
    os.utime(drafts / "00000.parquet", ns=(1, 1))
    packed = ps.pack(photos, tmp_path / "out", format="parquet", max_bytes=20_000, workers=3)
    assert (tmp_path / "out" / packed.shards[0]).stat().st_mtime_ns == 1
    assert packed == ps.pack(photos, tmp_path / "out", format="parquet", max_bytes=20_000)
    whole = ps.pack(photos, tmp_path / "whole", format="parquet", max_bytes=20_000)
    assert whole.shards == packed.shards
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_files_of_another_source_are_replaced_only_on_request(photos: Path, tmp_path: Path) -> None:
    first = ps.pack(photos, tmp_path / "out", format="parquet", max_bytes=20_000)
    with pytest.raises(PlanError, match=r"files of another run .* mode='replace' replaces"):
        ps.pack(photos, tmp_path / "out", format="parquet", seed=1)
    second = ps.pack(photos, tmp_path / "out", format="parquet", seed=1, mode="replace")
    assert second.shards != first.shards
    assert {name for name in content(tmp_path / "out") if not name.startswith(".")} == {*second.shards}
    ps.pack(photos, "memory://pack-parquet/out", format="parquet", max_bytes=20_000)
    remote = ps.pack(photos, "memory://pack-parquet/out", format="parquet", seed=1, mode="replace")
    assert ps.pack(photos, "memory://pack-parquet/out", format="parquet", seed=1) == remote
    assert [s["__key__"] for s in ps.read_parquet("memory://pack-parquet/out")] == [
        s["__key__"] for s in ps.read_parquet(tmp_path / "out")
    ]


def test_a_run_that_lost_or_changed_a_file_is_not_complete(photos: Path, tmp_path: Path) -> None:
    packed = ps.pack(photos, tmp_path / "out", format="parquet", max_samples=30)
    (tmp_path / "out" / packed.shards[1]).write_bytes(b"")
    with pytest.raises(PlanError, match="holds 3 files of another run"):
        ps.pack(photos, tmp_path / "out", format="parquet", max_samples=30)
    assert ps.pack(photos, tmp_path / "out", format="parquet", max_samples=30, mode="replace").samples == 80
    ps.from_items([{"a": 1}]).write_parquet(tmp_path / "out", mode="replace")
    assert [name for name in content(tmp_path / "out") if name[0] != "."] == ["set-002-00000-of-00001.parquet"]


def test_an_appended_set_continues_the_numbering(photos: Path, tmp_path: Path) -> None:
    for _ in range(2):
        packed = ps.pack(photos, tmp_path / "out", format="parquet", mode="append")
    assert packed.shards == ("set-001-00000-of-00001.parquet",)
    assert [int(s["__key__"][:9]) for s in ps.read_parquet(tmp_path / "out")] == list(range(160))


def test_a_dry_run_writes_nothing(photos: Path, tmp_path: Path) -> None:
    estimate = ps.pack(photos, tmp_path / "out", format="parquet", max_bytes=20_000, dry_run=True)
    assert not (tmp_path / "out").exists()
    packed = ps.pack(photos, tmp_path / "out", format="parquet", max_bytes=20_000)
    assert (estimate.samples, estimate.estimated) == (80, True)
    assert abs(estimate.nbytes - packed.nbytes) < packed.nbytes / 5
    few = ps.pack(Drawn(), tmp_path / "few", format="parquet", max_samples=7, dry_run=True)
    assert not few.estimated
    assert few == ps.pack(Drawn(), tmp_path / "few", format="parquet", max_samples=7)


def test_an_error_names_a_sample_that_cannot_be_stored_unless_it_is_skipped(photos: Path, tmp_path: Path) -> None:
    source = write_list(tmp_path, f"path,label\n{photos}/cat/00.JPEG,1\n{tmp_path}/gone.jpg,2\n")
    with pytest.raises(DataError, match="line 3"):
        ps.pack(source, tmp_path / "out", format="parquet")
    packed = ps.pack(source, tmp_path / "out", format="parquet", on_error="skip")
    assert (packed.samples, packed.skipped) == (1, 1)
    ps.from_items([{"__key__": "a", "cls": b"one"}]).write_tar(str(tmp_path / "tar"))
    with pytest.raises(DataError, match=r"field 'cls'.*key: a"):
        ps.pack(tmp_path / "tar", tmp_path / "bad", format="parquet")


def test_images_may_be_scaled_down(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "out", format="parquet", images=vision.Store(max_side=10), shuffle=False)
    assert ps.read_parquet(tmp_path / "out").decode().first()["jpg"].shape == (8, 10, 3)


def test_a_target_that_holds_shards_or_the_source_is_refused(photos: Path, tmp_path: Path) -> None:
    ps.pack(photos, tmp_path / "tar")
    with pytest.raises(PlanError, match="holds tar shards"):
        ps.pack(photos, tmp_path / "tar", format="parquet")
    with pytest.raises(PlanError, match="outside"):
        ps.pack(photos, photos / "packed", format="parquet")
    ps.pack(photos, tmp_path / "out", format="parquet")
    with pytest.raises(PlanError, match="reads from"):
        ps.pack(ps.read_parquet(tmp_path / "out"), tmp_path / "out", format="parquet", mode="replace")
