"""Real Hugging Face datasets in and out, and a builder like that of a speech corpus written to Parquet."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import soundfile
from PIL import Image as Picture

import penstock as ps
from penstock.cli import main
from penstock.codecs.features import Audio, ClassLabel, Image, arrow_schema, features_from
from penstock.errors import DataError, PlanError, StorageError
from penstock.testing import fingerprint

FEATURES = datasets.Features(
    {
        "id": datasets.Value("int32"),
        "image": datasets.Image(),
        "sound": datasets.Audio(sampling_rate=16000),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "grid": datasets.Array2D((2, 3), "float32"),
        "tokens": datasets.List(datasets.Value("int64")),
        "inside": {"ok": datasets.Value("bool"), "shots": datasets.List(datasets.Image())},
    }
)
ROWS = 60


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No progress bars, no network, and not the user's cache."""
    datasets.disable_progress_bars()
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # starts no thread for disabled progress bars
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    yield
    datasets.enable_progress_bars()


def png(value: int) -> bytes:
    out = io.BytesIO()
    Picture.fromarray(np.full((4, 5, 3), value, np.uint8)).save(out, "png")
    return out.getvalue()


def wav(number: int, rate: int = 8000) -> bytes:
    """A tenth of a second of noise, which does not compress."""
    out = io.BytesIO()
    noise = np.random.default_rng(number).uniform(-1, 1, rate // 10).astype(np.float32)
    soundfile.write(out, noise, rate, format="WAV", subtype="PCM_16")
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Audio files that datasets store by path."""
    folder = tmp_path_factory.mktemp("sounds")
    for number in range(3):
        (folder / f"{number}.wav").write_bytes(wav(number))
    return folder


@pytest.fixture
def hf_dataset(folder: Path) -> datasets.Dataset:
    """A dataset with all kinds of features; its audio is stored by path. Built without a library that decodes audio."""
    rows = [
        {
            "id": n,
            "image": {"bytes": png(n), "path": None},
            "sound": {"bytes": None, "path": str(folder / f"{n % 3}.wav")},
            "label": n % 2,
            "grid": np.full((2, 3), n).tolist(),
            "tokens": list(range(n % 4)),
            "inside": {"ok": n % 3 == 0, "shots": [{"bytes": png(1), "path": None}] * (n % 2)},
        }
        for n in range(ROWS)
    ]
    schema = arrow_schema(features_from(FEATURES.to_dict()))
    tables = [pa.Table.from_pylist(rows[first : first + 16], schema=schema) for first in range(0, ROWS, 16)]
    cast = datasets.table.table_cast(pa.concat_tables(tables), FEATURES.arrow_schema)
    dataset = datasets.Dataset(datasets.table.InMemoryTable(cast))
    assert dataset.features == FEATURES
    return dataset


def test_rows_have_their_bytes_and_are_decoded_by_their_features(hf_dataset: datasets.Dataset) -> None:
    ds = ps.from_huggingface(hf_dataset)
    assert len(ds) == ROWS
    raw = ds[5]
    assert raw["image"] == {"bytes": png(5), "path": None}
    assert raw["sound"] == {"bytes": wav(2), "path": "2.wav"}  # read from the path in the dataset
    sample = ds.decode()[5]
    assert sample["id"] == 5
    assert sample["image"].tolist() == np.full((4, 5, 3), 5).tolist()
    assert (sample["sound"]["sampling_rate"], sample["sound"]["array"].shape) == (16000, (1600,))
    assert sample["label"] == 1
    np.testing.assert_array_equal(sample["grid"], np.full((2, 3), 5, np.float32))
    assert sample["tokens"].tolist() == [0]
    assert sample["inside"]["shots"][0].shape == (4, 5, 3)


def test_selected_and_shuffled_rows_keep_the_order_of_the_dataset(hf_dataset: datasets.Dataset) -> None:
    chosen = hf_dataset.shuffle(seed=3).select(range(7, 27))
    assert [row["id"] for row in ps.from_huggingface(chosen)] == chosen["id"][:]
    assert [row["id"] for row in ps.from_huggingface(hf_dataset.select([5, 5, 0]))] == [5, 5, 0]
    formatted = hf_dataset.with_format("numpy", columns=["label", "id"])
    assert ps.from_huggingface(formatted).first() == {"label": 0, "id": 0}


def test_batches_shuffles_and_splits_work_on_the_table(hf_dataset: datasets.Dataset) -> None:
    ds = ps.from_huggingface(hf_dataset).select("id", "label")
    batch = next(iter(ds.iter_batches(20)))
    assert batch["id"].tolist() == list(range(20))
    assert batch["id"].dtype == np.int32
    assert sorted(row["id"] for row in ds.shuffle(seed=1)) == list(range(ROWS))
    parts = ps.from_huggingface(hf_dataset).select("id").split(4, equal=True)
    assert [row["id"] for part in parts for row in part] == list(range(ROWS))


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_workers_decode_to_the_same_values(hf_dataset: datasets.Dataset, on: Any) -> None:
    ds = ps.from_huggingface(hf_dataset, workers=2).decode(workers=2, on=on)
    assert fingerprint(ds.take_all()) == fingerprint(ps.from_huggingface(hf_dataset).decode().on("serial").take_all())


def test_a_missing_audio_file_fails_one_sample(hf_dataset: datasets.Dataset, folder: Path) -> None:
    rows = [{"sound": {"bytes": None, "path": str(folder / name)}} for name in ("0.wav", "gone.wav", "1.wav")]
    table = pa.Table.from_pylist(rows, schema=arrow_schema({"sound": Audio()}))
    ds = ps.from_huggingface(datasets.Dataset(datasets.table.InMemoryTable(table)))
    with pytest.raises(DataError, match=r"field 'sound'.*key: row 1"):
        ds.take_all()
    assert [sample["sound"]["path"] for sample in ds.on_error("skip")] == ["0.wav", "1.wav"]


def test_one_split_of_several_is_chosen(hf_dataset: datasets.Dataset) -> None:
    splits = datasets.DatasetDict({"train": hf_dataset, "test": hf_dataset.select([1])})
    assert len(ps.from_huggingface(splits, split="test")) == 1
    with pytest.raises(PlanError, match="split='dev': the dataset has the splits 'train', 'test'"):
        ps.from_huggingface(splits, split="dev")


def test_a_dataset_of_several_splits_needs_one_of_them(hf_dataset: datasets.Dataset) -> None:
    splits = datasets.DatasetDict(train=hf_dataset, test=hf_dataset.select(range(3)))
    assert {name: len(ps.from_huggingface(splits, name)) for name in splits} == {"train": ROWS, "test": 3}
    with pytest.raises(PlanError, match="split=None: the dataset has the splits 'train', 'test'; give one of them"):
        ps.from_huggingface(splits)


def test_arrays_are_written_with_their_feature(tmp_path: Path) -> None:
    features = datasets.Features({"grid": datasets.Array2D((2, 3), "float32"), "n": datasets.Value("int8")})
    grids = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    stream = datasets.Dataset.from_dict({"grid": grids, "n": range(4)}, features=features).to_iterable_dataset()
    ps.from_huggingface(stream).write_parquet(tmp_path / "out")
    again = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "out/*"), cache_dir=tmp_path / "c", split="train"
    )
    assert again.features == features
    assert np.array_equal([s["grid"] for s in ps.read_parquet(tmp_path / "out").decode()], grids)


def test_a_streaming_dataset_is_read_front_to_back(hf_dataset: datasets.Dataset) -> None:
    ds = ps.from_huggingface(hf_dataset.to_iterable_dataset(num_shards=3))
    assert [row["id"] for row in ds] == list(range(ROWS))
    assert [row["id"] for row in ds] == list(range(ROWS))  # and again
    sample = ds.decode().first()
    assert (sample["image"].shape, sample["sound"]["sampling_rate"]) == ((4, 5, 3), 16000)
    with pytest.raises(PlanError, match="is read once, front to back"):
        ds.shuffle().take(1)


def test_a_folder_is_loaded_on_first_use(hf_dataset: datasets.Dataset, tmp_path: Path) -> None:
    ds = ps.from_huggingface(str(tmp_path / "saved"))
    with pytest.raises(StorageError, match="cannot be loaded"):
        len(ds)
    hf_dataset.remove_columns("sound").save_to_disk(tmp_path / "saved")
    assert ps.from_huggingface(tmp_path / "saved").decode()[7]["image"].shape == (4, 5, 3)
    datasets.DatasetDict(a=hf_dataset.select_columns("id"), b=hf_dataset.select_columns("id").select([3])).save_to_disk(
        tmp_path / "both"
    )
    assert ps.from_huggingface(tmp_path / "both", "b").take_all() == [{"id": 3}]
    with pytest.raises(PlanError, match="has the splits a, b: choose one with split="):
        ps.from_huggingface(tmp_path / "both").take(1)


def test_other_objects_and_transforms_are_refused(hf_dataset: datasets.Dataset) -> None:
    with pytest.raises(PlanError, match="needs a dataset, a builder, a folder or a name, not int"):
        ps.from_huggingface(3)
    with pytest.raises(PlanError, match=r"has a transform.*map\(\)"):
        ps.from_huggingface(hf_dataset.with_transform(lambda batch: batch))


def test_samples_become_a_dataset_with_the_same_features(hf_dataset: datasets.Dataset, tmp_path: Path) -> None:
    ds = ps.from_huggingface(hf_dataset)
    back = ds.to_huggingface()
    assert back.features == FEATURES
    assert fingerprint(ps.from_huggingface(back).take_all()) == fingerprint(ds.take_all())
    decoded = ds.decode().to_huggingface(tmp_path / "out" / "data.arrow")  # arrays are encoded again
    assert decoded.features == FEATURES
    seen = decoded.remove_columns("sound")
    assert np.asarray(seen[9]["image"]).tolist() == np.full((4, 5, 3), 9).tolist()
    assert seen[9]["grid"] == np.full((2, 3), 9.0).tolist()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data.arrow"]


def test_features_are_inferred_or_given() -> None:
    ds = ps.from_items([{"n": 1, "t": "x", "v": np.zeros((2, 2), np.uint8), "l": "b"}] * 3)
    inferred = ds.to_huggingface()
    assert inferred.features["v"] == datasets.Array2D((2, 2), "uint8")
    assert inferred[0]["t"] == "x"
    given = {"n": ps.features.Value("int8"), "t": ps.features.Value(), "v": Image(), "l": ClassLabel(("a", "b"))}
    typed = ds.to_huggingface(features=given)
    assert typed.features["v"] == datasets.Image()
    assert typed[0]["l"] == 1
    with pytest.raises(PlanError, match="is not a feature"):
        ds.to_huggingface(features={"n": "int8"})
    with pytest.raises(DataError, match=r"field 'n'.*key: sample 0|from 0 on"):
        ds.to_huggingface(features={**given, "n": Image()})
    with pytest.raises(DataError, match="samples from 1000 on do not match the features"):
        ps.from_items([{"n": 1}] * 1000 + [{"n": "x"}]).to_huggingface()


def test_no_samples_become_an_empty_dataset() -> None:
    assert len(ps.from_items([]).to_huggingface(features={"a": ps.features.Value("int8")})) == 0


def test_datasets_loads_our_parquet_with_its_features(hf_dataset: datasets.Dataset, tmp_path: Path) -> None:
    ps.from_huggingface(hf_dataset).write_parquet(str(tmp_path / "ours"), max_bytes="20KB")
    files = sorted(str(path) for path in (tmp_path / "ours").glob("*.parquet"))
    loaded = datasets.Dataset.from_parquet(files, cache_dir=str(tmp_path / "cache"))
    assert loaded.features == FEATURES
    assert loaded.remove_columns("sound")[11]["image"].getpixel((0, 0)) == (11, 11, 11)
    ours = ps.read_parquet(str(tmp_path / "ours")).decode()
    assert fingerprint(ours.take_all()) == fingerprint(ps.from_huggingface(hf_dataset).decode().take_all())


def test_parquet_files_of_datasets_are_decoded_by_their_features(hf_dataset: datasets.Dataset, tmp_path: Path) -> None:
    hf_dataset.remove_columns("sound").to_parquet(tmp_path / "hf.parquet")
    sample = ps.read_parquet(str(tmp_path / "hf.parquet")).decode()[3]
    assert sample["image"].shape == (4, 5, 3)
    np.testing.assert_array_equal(sample["grid"], np.full((2, 3), 3, np.float32))


# A builder like that of LJSpeech, with an archive of the same structure


class Speech(datasets.GeneratorBasedBuilder):  # type: ignore[misc]
    """Short sentences, read aloud."""

    VERSION = datasets.Version("1.1.0")

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(
            description="A small speech set.",
            features=datasets.Features(
                {
                    "id": datasets.Value("string"),
                    "audio": datasets.Audio(sampling_rate=22050),
                    "file": datasets.Value("string"),
                    "text": datasets.Value("string"),
                    "normalized_text": datasets.Value("string"),
                }
            ),
            supervised_keys=("file", "text"),
        )

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        root = dl_manager.download_and_extract(os.path.join(self.config.data_dir, "speech.tar.gz"))
        paths = {"wav_path": os.path.join(root, "wavs"), "csv_path": os.path.join(root, "metadata.csv")}
        return [datasets.SplitGenerator(name=datasets.Split.TRAIN, gen_kwargs=paths)]

    def _generate_examples(self, wav_path: str, csv_path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        with open(csv_path) as lines:
            for line in lines:
                uid, text, normalized = line.strip().split("|")
                name = os.path.join(wav_path, f"{uid}.wav")
                yield uid, {"id": uid, "audio": name, "file": name, "text": text, "normalized_text": normalized}


@pytest.fixture
def speech(tmp_path: Path) -> Speech:
    with tarfile.open(tmp_path / "speech.tar.gz", "w:gz") as archive:
        lines = "".join(f"LJ-{n:03d}|Text {n}|text {n}\n" for n in range(24)).encode()
        files = {"metadata.csv": lines} | {f"wavs/LJ-{n:03d}.wav": wav(n, 44100) for n in range(24)}
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return Speech(cache_dir=str(tmp_path / "cache"), data_dir=str(tmp_path))


def test_examples_of_a_builder_are_stored_and_decoded_by_our_features(speech: Speech) -> None:
    ds = ps.from_huggingface(speech)
    assert [sample["id"] for sample in ds] == [f"LJ-{n:03d}" for n in range(24)]
    sample = ds.decode().first()
    assert sample["text"] == "Text 0"
    assert (sample["audio"]["sampling_rate"], sample["audio"]["array"].shape) == (22050, (2205,))
    with pytest.raises(PlanError, match="has the splits train: choose one"):
        ps.from_huggingface(speech, "test").take(1)


def test_a_builder_is_written_to_parquet_and_split_for_ranks(speech: Speech, tmp_path: Path) -> None:
    ps.from_huggingface(speech).write_parquet(str(tmp_path / "out"), max_bytes="60KB")
    files = sorted((tmp_path / "out").glob("*.parquet"))
    assert len(files) > 3
    assert all(path.stat().st_size <= 60_000 for path in files)
    ds = ps.read_parquet(str(tmp_path / "out")).decode(workers=(1, 2))
    shares = [[sample["id"] for sample in part] for part in ds.split(4, equal=True)]
    assert [len(share) for share in shares] == [6] * 4
    assert sorted(name for share in shares for name in share) == [f"LJ-{n:03d}" for n in range(24)]
    assert ds.first()["audio"]["sampling_rate"] == 22050


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_builder_is_packed(speech: Speech, shuffle: bool, tmp_path: Path) -> None:
    packed = ps.pack(speech, str(tmp_path / "packed"), shuffle=shuffle)
    assert packed.samples == 24
    samples = ps.read_tar(str(tmp_path / "packed")).decode().take_all()
    assert ([sample["id.txt"] for sample in samples] == [f"LJ-{n:03d}" for n in range(24)]) is not shuffle
    assert {sample["txt"] for sample in samples} == {f"Text {n}" for n in range(24)}
    assert samples[0]["audio.wav"]["array"].shape == (4410,)


def test_datasets_are_packed_from_objects_and_folders(hf_dataset: datasets.Dataset, tmp_path: Path) -> None:
    chosen = hf_dataset.remove_columns(["inside"])
    packed = ps.pack(chosen, str(tmp_path / "a"), shuffle=False, workers=2)
    assert packed.samples == ROWS
    first = ps.read_tar(str(tmp_path / "a")).first()
    assert (first["png"], first["cls"], first["sound.wav"]) == (png(0), b"0", wav(0))
    chosen.remove_columns("sound").save_to_disk(tmp_path / "saved")
    assert main(["pack", f"hf:{tmp_path / 'saved'}", str(tmp_path / "b"), "--no-shuffle"]) == 0
    again = ps.read_tar(str(tmp_path / "b")).take_all()
    assert [sample["png"] for sample in again] == [png(n) for n in range(ROWS)]


def test_a_plan_over_a_dataset_is_a_value(hf_dataset: datasets.Dataset) -> None:
    assert "from_huggingface(Dataset, 60 rows)" in repr(ps.from_huggingface(hf_dataset))
    assert "from_huggingface('name', split='train')" in repr(ps.from_huggingface("name", "train"))
    assert ps.from_huggingface("name") == ps.from_huggingface("name")
