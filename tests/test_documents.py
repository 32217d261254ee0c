"""The programs of two well-known documents run on Penstock with other imports."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pyarrow.parquet
import pytest
import soundfile
import torch

import penstock as ps


@pytest.fixture
def speech(tmp_path: Path) -> datasets.Dataset:
    """A Hugging Face dataset of audio, images and text, whose media are stored in separate files."""
    rows: dict[str, list[Any]] = {"id": [], "audio": [], "image": [], "text": []}
    for number in range(43):
        audio, image = tmp_path / f"{number}.wav", tmp_path / f"{number}.png"
        soundfile.write(audio, np.sin(np.arange(800) * (number + 1) / 50), 8000, subtype="PCM_16")
        PIL.Image.fromarray(np.full((6, 5, 3), number, np.uint8)).save(image)
        row = {"id": number, "audio": str(audio), "image": str(image), "text": f"text {number}"}
        for name, value in row.items():
            rows[name].append(value)
    dataset = datasets.Dataset.from_dict(rows)
    return dataset.cast_column("audio", datasets.Audio(sampling_rate=8000)).cast_column("image", datasets.Image())


def _read(part: bytes) -> list[int]:
    """Read a pickled part as a training worker does; return the ids."""
    return [number for batch in pickle.loads(part).iter_batches(8) for number in batch["id"].tolist()]


def test_a_hugging_face_dataset_reaches_four_training_workers_through_parquet(
    speech: datasets.Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    packed = ps.from_huggingface(speech).write_parquet(out, max_bytes="30KB")
    assert len(packed.shards) > 1
    assert all(os.path.getsize(out / name) <= 30_000 for name in packed.shards)
    for path in tmp_path.glob("*.wav"):  # the media are embedded
        path.unlink()

    ds = ps.read_parquet(str(out)).decode(workers=(1, 8))
    sample = ds[7]
    assert sample["image"].tolist() == np.full((6, 5, 3), 7).tolist()
    assert (sample["audio"]["array"].shape, sample["audio"]["sampling_rate"], sample["text"]) == (
        (800,),
        8000,
        "text 7",
    )

    parts = ds.split(4, equal=True)
    equal = [_read(pickle.dumps(part)) for part in parts]
    assert [len(ids) for ids in equal] == [10, 10, 10, 10]
    assert len({number for ids in equal for number in ids}) == 40
    complete = [_read(pickle.dumps(part)) for part in ds.split(4)]
    assert sorted(number for ids in complete for number in ids) == list(range(43))

    schema = pyarrow.parquet.read_schema(out / packed.shards[0])
    assert datasets.Features.from_arrow_schema(schema) == speech.features


class Featurizer:
    """Replaces the document's feature extractor, which is downloaded from a hub."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        pixels = np.stack([np.moveaxis(image[:4, :4], -1, 0) / np.float32(255) for image in batch["image"]])
        return {"pixel_values": pixels, "labels": batch["label"]}


def _write_images(folder: Path, count: int, gray: int) -> str:
    folder.mkdir()
    for number in range(count):
        shape = (5, 6) if number < gray else (5 + number % 2, 6, 3)
        PIL.Image.fromarray(np.full(shape, number, np.uint8)).save(folder / f"{number:04d}.png")
    return str(folder)


def test_images_and_labels_become_batches_as_in_a_course_on_data_pipelines(tmp_path: Path) -> None:
    dog_images_path = _write_images(tmp_path / "dogs", 23, gray=2)
    fish_images_path = _write_images(tmp_path / "fish", 25, gray=1)
    labels = tmp_path / "labels.csv"
    labels.write_text("label\n" + "0\n" * 20 + "1\n" * 20)

    images = ps.read_images(dog_images_path).limit(20).union(ps.read_images(fish_images_path).limit(20))
    assert images.schema()["image"] == "array<uint8>[5, 6]"
    im = images.take(1)[0]["image"]
    assert im.ndim == 2  # grayscale
    PIL.Image.fromarray(im)

    table = ps.read_csv(str(labels))
    assert table.schema() == {"label": "int"}
    assert table.take(4) == [{"label": 0}] * 4

    labeled = images.zip(table)
    assert {"image", "label"} <= labeled.schema().keys()
    dims = labeled.map(lambda record: {"dims": record["image"].ndim}).groupby("dims").count().take_all()
    assert dims == [{"dims": 2, "count": 3}, {"dims": 3, "count": 37}]
    assert labeled.unique("label") == [0, 1]

    filtered = labeled.filter(lambda record: record["image"].ndim == 3)
    featurized = filtered.map_batches(Featurizer, workers=2)
    assert featurized.schema()["pixel_values"] == "array<float32>[3, 4, 4]"

    train, valid = featurized.train_test_split(test_size=0.2)
    assert train.count() + valid.count() == 37
    assert valid.count() in range(5, 12)
    batches = list(train.iter_torch_batches(batch_size=16))
    assert all(isinstance(batch["pixel_values"], torch.Tensor) for batch in batches)
    assert sum(len(batch["labels"]) for batch in batches) == train.count()
    forced = ps.read_images(dog_images_path, mode="RGB").take(1)[0]["image"]
    assert forced.shape == (5, 6, 3)
