"""The program of each library for batches of augmented photos, written as its documentation shows it.

Every function takes the number of photos and yields batches of 64 images (224 x 224 x 3, uint8, in the layout that the
library prefers) with their classes, in order, created by two workers. Files in a library's own format are written once,
before anything is measured. A library that leaves decoding and cropping to its user is given a function of ``crops``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import crops
import data
import photos
from data import StoredData

BATCH = 64
WORKERS = 2

Batch = tuple[Any, Any]  # images and classes
Batches = Callable[[int], Iterable[Batch]]


class Files:
    """Single files as a map-style dataset of (image, class)."""

    def __init__(self, count: int, crop: str) -> None:
        """Use the ``count`` photos, decoded and cropped by ``crops.CROPS[crop]``."""
        self.labeled_paths = photos.labeled_paths(photos.files(count))
        self.crop = crops.CROPS[crop]

    def __len__(self) -> int:
        return len(self.labeled_paths)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        path, label = self.labeled_paths[number]
        return self.crop(Path(path).read_bytes()), label


def _stack(samples: Iterable[tuple[Any, int]]) -> Batch:
    import numpy as np

    images, labels = zip(*samples, strict=True)
    return np.stack(images), np.array(labels)


# torch


def torch(crop: str, count: int) -> Iterable[Batch]:
    """Use a DataLoader over single files."""
    from torch.utils.data import DataLoader

    dataset: Any = Files(count, crop)
    return DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)


def torchvision(count: int) -> Iterable[Batch]:
    """Use the program of most tutorials: ImageFolder, torchvision's transforms, a DataLoader."""
    from torch.utils.data import DataLoader

    _declare_torchvision_operators()
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = v2.Compose([v2.RandomResizedCrop(crops.SIDE), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    folder = ImageFolder(str(photos.files(count).folder), steps)
    classes = [int(name) for name in folder.classes]
    for images, labels in DataLoader(folder, batch_size=BATCH, num_workers=WORKERS):
        yield images, [classes[label] for label in labels.tolist()]


@cache
def _declare_torchvision_operators() -> Any:
    """Let torchvision be imported where its compiled part cannot be loaded, for example with a torch without CUDA."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # the cache keeps a reference: without one, the declarations are removed


def webdataset(crop: str, count: int) -> Iterable[Batch]:
    """Use a pipeline over shards inside a DataLoader."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    dataset: Any = wds.WebDataset(photos.photos(count).shards, shardshuffle=False)
    batches = dataset.to_tuple("jpg", "cls").map_tuple(crops.CROPS[crop], int).batched(BATCH)
    return DataLoader(batches, batch_size=None, num_workers=WORKERS)


def litdata(crop: str, count: int) -> Iterable[Batch]:
    """Use litdata's chunks and its loader."""
    import litdata as ld

    def write(folder: Path) -> None:
        samples = [(sample["jpg"], int(sample["cls"])) for sample in data.read_samples(photos.photos(count))]
        ld.optimize(_identity, samples, str(folder), chunk_bytes="64MB", num_workers=1, keep_data_ordered=True)

    stored = data.create_once(f"images-{count}-litdata", count, write)
    dataset = ld.StreamingDataset(str(stored.folder), shuffle=False, transform=partial(_crop_sample, crop))
    return ld.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)


def _identity(sample: Any) -> Any:
    return sample


def _crop_sample(crop: str, sample: tuple[bytes, int]) -> tuple[Any, int]:
    return crops.CROPS[crop](sample[0]), sample[1]


def mosaic(crop: str, count: int) -> Iterable[Batch]:
    """Use Mosaic's shards in a DataLoader."""
    _declare_torchvision_operators()  # streaming imports torchvision
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    def write(folder: Path) -> None:
        with MDSWriter(out=str(folder / "mds"), columns={"jpg": "bytes", "cls": "int"}) as writer:
            for sample in data.read_samples(photos.photos(count)):
                writer.write({"jpg": sample["jpg"], "cls": int(sample["cls"])})

    class Cropped(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return crops.CROPS[crop](sample["jpg"]), sample["cls"]

    stored = data.create_once(f"images-{count}-mosaic", count, write)
    clean_stale_shared_memory()
    dataset = Cropped(local=str(stored.folder / "mds"), batch_size=BATCH, shuffle=False)
    return DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)


# Hugging Face datasets


def huggingface_streaming(crop: str, count: int) -> Iterable[Batch]:
    """Stream the shards in a DataLoader."""
    import datasets as hf
    from torch.utils.data import DataLoader

    _quiet_huggingface()
    shards = photos.photos(count).shards
    stream = hf.load_dataset("webdataset", data_files=shards, split="train", streaming=True).decode(False)
    samples = stream.map(partial(_hf_sample, crop), remove_columns=stream.column_names)
    return _pairs(DataLoader(samples, BATCH, num_workers=WORKERS))


def huggingface_map(crop: str, count: int) -> Iterable[Batch]:
    """Read the shards through the Arrow cache, by position."""
    import datasets as hf
    from torch.utils.data import DataLoader

    _quiet_huggingface()
    dataset = hf.load_dataset("webdataset", data_files=photos.photos(count).shards, split="train")
    dataset = dataset.cast_column("jpg", hf.Image(decode=False)).with_transform(partial(_hf_batch, crop))
    return _pairs(DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS))


def _quiet_huggingface() -> None:
    import datasets as hf

    hf.config.HF_DATASETS_CACHE = data.HOME / "huggingface"
    hf.disable_progress_bars()


def _hf_sample(crop: str, sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": crops.CROPS[crop](sample["jpg"]["bytes"]), "label": int(sample["cls"])}


def _hf_batch(crop: str, batch: dict[str, Any]) -> dict[str, Any]:
    images = [crops.CROPS[crop](jpg["bytes"]) for jpg in batch["jpg"]]
    return {"image": images, "label": [int(label) for label in batch["cls"]]}


def _pairs(batches: Iterable[dict[str, Any]]) -> Iterator[Batch]:
    for batch in batches:
        yield batch["image"], batch["label"]


# Threads


def grain_threads(crop: str, count: int) -> Iterable[Batch]:
    """Let the reading threads decode too."""
    import grain

    source = grain.MapDataset.source(Files(count, crop))  # type: ignore[arg-type]
    samples = source.to_iter_dataset(grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * BATCH))
    return samples.batch(BATCH)


def grain_processes(crop: str, count: int) -> Iterable[Batch]:
    """Use worker processes with one thread each."""
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["grain"])  # grain's workers expect absl to have parsed the command line
    source = grain.MapDataset.source(Files(count, crop))  # type: ignore[arg-type]
    samples = source.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=BATCH))
    return samples.batch(BATCH).mp_prefetch(grain.MultiprocessingOptions(num_workers=WORKERS))


def spdl(crop: str, count: int) -> Iterable[Batch]:
    """Use a pipeline in which each task creates a batch."""

    def create_batch(batch: list[tuple[bytes, int]]) -> Batch:
        return _stack((crops.CROPS[crop](jpg), label) for jpg, label in batch)

    return _spdl_run(_spdl_samples(count), create_batch)


def spdl_own(count: int) -> Iterable[Batch]:
    """Use the same pipeline with SPDL's own decoding, by FFmpeg."""
    import random

    import numpy as np
    import spdl.io

    rng = random.Random()

    def decode(jpg: bytes) -> Any:
        packets = spdl.io.demux_image(jpg)
        left, top, wide, high = crops.random_box(packets.width, packets.height, rng)
        side = crops.SIDE
        steps = [f"crop={wide}:{high}:{left}:{top}:exact=1", f"scale={side}:{side}:flags=bilinear"]
        graph = ",".join([*steps, *["hflip"] * (rng.random() < 0.5), "format=pix_fmts=rgb24"])
        return spdl.io.to_numpy(spdl.io.convert_frames(spdl.io.decode_packets(packets, filter_desc=graph)))

    def create_batch(batch: list[tuple[bytes, int]]) -> Batch:
        return np.stack([decode(jpg) for jpg, _ in batch]), np.array([label for _, label in batch])

    samples = list(_spdl_samples(count))
    decode(samples[0][0])  # raises here if decoding does not work; a failing function would end the pipeline silently
    return _spdl_run(samples, create_batch)


def _spdl_samples(count: int) -> Iterator[tuple[bytes, int]]:
    from spdl.io import iter_tarfile

    for shard in photos.photos(count).shards:
        with open(shard, "rb") as file:
            members = iter_tarfile(file)
            for (_, jpg), (_, label) in zip(members, members, strict=True):
                yield jpg, int(label)


def _spdl_run(samples: Iterable[Any], create_batch: Callable[[list[Any]], Batch]) -> Iterator[Batch]:
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(samples).aggregate(BATCH)
    pipeline = builder.pipe(create_batch, concurrency=WORKERS).add_sink(WORKERS).build(num_threads=WORKERS)
    with pipeline.auto_stop():
        yield from pipeline


# Libraries with their own decoding


def tensorflow(antialias: bool, count: int) -> Iterable[Batch]:
    """Use tf.data over TFRecords, which decodes only the crop."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    features = {"jpg": tf.io.FixedLenFeature([], tf.string), "cls": tf.io.FixedLenFeature([], tf.int64)}

    def decode(record: Any) -> Any:
        sample = tf.io.parse_single_example(record, features)
        box = tf.zeros([0, 0, 4])
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(sample["jpg"]),
            box,
            aspect_ratio_range=crops.RATIO,
            area_range=crops.SCALE,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        image = tf.io.decode_and_crop_jpeg(sample["jpg"], window, channels=3)
        image = tf.image.resize(image, [crops.SIDE, crops.SIDE], antialias=antialias)
        return tf.cast(tf.image.random_flip_left_right(image), tf.uint8), sample["cls"]

    options = tf.data.Options()
    options.threading.private_threadpool_size = WORKERS
    options.threading.max_intra_op_parallelism = 1
    stored = data.create_once(f"images-{count}-tfrecords", count, partial(_write_tfrecords, photos.photos(count)))
    records = tf.data.TFRecordDataset([str(path) for path in sorted(stored.folder.iterdir())])
    dataset = records.map(decode, num_parallel_calls=WORKERS).batch(BATCH).prefetch(2).with_options(options)
    batches: Iterable[Batch] = dataset.as_numpy_iterator()
    return batches


def _write_tfrecords(stored: StoredData, folder: Path) -> None:
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(folder / "photos.tfrecord")) as writer:
        for sample in data.read_samples(stored):
            jpg = tf.train.Feature(bytes_list=tf.train.BytesList(value=[sample["jpg"]]))
            label = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(sample["cls"])]))
            example = tf.train.Example(features=tf.train.Features(feature={"jpg": jpg, "cls": label}))
            writer.write(example.SerializeToString())


def dali(antialias: bool, count: int) -> Iterator[Batch]:
    """Use a pipeline on the CPU over shards, which decodes only the crop."""
    import numpy as np
    from nvidia.dali import fn, pipeline_def, types

    shards = photos.photos(count).shards

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None)  # type: ignore[misc]
    def define() -> Any:
        jpg, label = fn.readers.webdataset(paths=shards, ext=["jpg", "cls"], missing_component_behavior="error")
        image = fn.decoders.image_random_crop(
            jpg, device="cpu", random_area=list(crops.SCALE), random_aspect_ratio=list(crops.RATIO)
        )
        image = fn.resize(
            image, resize_x=crops.SIDE, resize_y=crops.SIDE, interp_type=types.INTERP_LINEAR, antialias=antialias
        )
        return fn.flip(image, horizontal=fn.random.coin_flip()), label

    pipeline = define()
    pipeline.build()
    for _ in range(count // BATCH):  # the pipeline repeats its data without end
        images, labels = pipeline.run()
        yield images.as_array(), [int(bytes(np.asarray(label))) for label in labels]


def ffcv(count: int, side: int | None = None) -> Iterable[Batch]:
    """Use FFCV's file format, for which it encodes the photos again; it scales by area averaging.

    With ``side``, photos are stored with so many pixels on the short side, and not compressed.
    """
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    name = f"images-{count}-ffcv{'' if side is None else f'-{side}'}"
    stored = data.create_once(name, count, partial(_write_beton, count, side))
    crop = RandomResizedCropRGBImageDecoder((crops.SIDE, crops.SIDE), crops.SCALE, crops.RATIO)
    pipelines = {"image": [crop, RandomHorizontalFlip(), ToTensor()], "label": [IntDecoder(), ToTensor()]}
    order = OrderOption.SEQUENTIAL
    path = str(stored.folder / "photos.beton")
    return Loader(path, batch_size=BATCH, num_workers=WORKERS, order=order, pipelines=pipelines, os_cache=True)


def _write_beton(count: int, side: int | None, folder: Path) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    # 95: at this quality the JPEGs are about as large as the original photos.
    image = RGBImageField(write_mode="jpg", jpeg_quality=95) if side is None else RGBImageField(write_mode="raw")
    writer = DatasetWriter(str(folder / "photos.beton"), {"image": image, "label": IntField()}, num_workers=1)
    writer.from_indexed_dataset(_DecodedFiles(count, side))


class _DecodedFiles:
    """Single files as a map-style dataset of (PIL image, class)."""

    def __init__(self, count: int, side: int | None = None) -> None:
        self.labeled_paths = photos.labeled_paths(photos.files(count))
        self.side = side

    def __len__(self) -> int:
        return len(self.labeled_paths)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        from PIL import Image

        path, label = self.labeled_paths[number]
        image = Image.open(path).convert("RGB")
        if self.side is not None:
            factor = self.side / min(image.size)
            image = image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.LANCZOS)
        return image, label


# Ray Data


def ray(crop: str, count: int) -> Iterator[Batch]:
    """Use Ray Data's reader for shards, and decode in its tasks."""
    from ray_programs import running_ray

    with running_ray() as ray_data:
        shards = photos.photos(count).shards
        samples = ray_data.read_webdataset(shards, decoder=None)
        cropped = samples.map_batches(partial(ray_batch, crop), batch_size=BATCH, batch_format="numpy")
        for batch in cropped.iter_batches(batch_size=BATCH, batch_format="numpy"):
            yield batch["image"], batch["label"]


def ray_batch(crop: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Decode and crop a batch of Ray Data."""
    samples = ((crops.CROPS[crop](jpg), int(label)) for jpg, label in zip(batch["jpg"], batch["cls"], strict=True))
    images, labels = _stack(samples)
    return {"image": images, "label": labels}


# Penstock


def penstock(antialias: bool, count: int, *, shuffled: bool = False) -> Iterator[Batch]:
    """Decode and crop in one stage, in threads."""
    import penstock as ps

    return penstock_over(ps.read_tar(photos.photos(count).shards), antialias, shuffled=shuffled)


def penstock_over(ds: Any, antialias: bool, *, shuffled: bool = False) -> Iterator[Batch]:
    """Decode and crop the photos of a dataset in one stage."""
    from penstock import vision

    crop = vision.RandomResizedCrop(crops.SIDE, flip=True, antialias=antialias)
    ds = ds.shuffle() if shuffled else ds
    for batch in ds.decode(jpg=crop, workers=WORKERS).batched(BATCH):
        yield batch["jpg"], batch["cls"]
