"""``ps.pack``: write any dataset to shards, in one exact order, and continue where a run was interrupted."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

from penstock.blobs.compression import COMPRESSION_SUFFIXES
from penstock.engines import EngineName, engine_options
from penstock.errors import PlanError
from penstock.landing import (
    MODES,
    Mode,
    Packed,
    ParquetSink,
    ShardLimits,
    Sinks,
    TableOptions,
    Target,
    TarSink,
    check_path,
    exact_program,
    parquet_target,
    storage_errors,
    tar_target,
    write_set,
)
from penstock.packing.estimate import estimate_shards
from penstock.packing.inputs import PackInput, recognise, shuffle_plan
from penstock.packing.parquet import parquet_compression, parquet_sinks
from penstock.plan import OnError, Resources, check_choice, check_count, check_flag, takes_mode
from penstock.plan.values import Workers
from penstock.storage import Storage, redacted
from penstock.storage.protocol import scheme
from penstock.vision.store import Store, StoreImages
from penstock.vision.tiles import TileImages

Compress = Literal["gz", "zst", "bz2", "xz", "zstd", "snappy", "gzip", "lz4", "brotli", "none"]
_MAX_BYTES = 1e8  # of a shard, by default
_MEASURED_SAMPLES = 64  # samples that a dry run encodes as Parquet; its estimate is based on them


@takes_mode
def pack(
    source: Any,
    url: str | os.PathLike[str],
    *,
    format: Literal["tar", "parquet"] = "tar",
    max_bytes: float | str | None = None,
    max_samples: int | None = None,
    shards: int | None = None,
    workers: Workers = None,
    shuffle: bool = True,
    seed: int = 0,
    mode: Mode = "new",
    compress: Compress | None = None,
    image: Literal["png", "jpg"] = "png",
    images: Store | None = None,
    tiles: bool = False,
    on_error: Literal["raise", "skip"] | None = None,
    progress: bool | None = None,
    dry_run: bool = False,
    version: str = "",
    storage: Storage | None = None,
    engine: EngineName | None = None,
) -> Packed:
    """Pack a dataset into shards in a folder, local or remote; the same source, seed and options give the same bytes.

    A shard appears when it is complete, with an index beside it; the manifest is written last. Parquet files appear
    together, with images and sounds embedded and the types of fields in the schema.

    Args:
        source: A folder of class folders, a CSV or JSON-lines list, a map-style dataset of (image, label), a
            Hugging Face dataset, a ``ps.Dataset``, or shards. The bytes of files are stored unchanged.
        url: The folder to write to: a path or URL.
        format: Write tar archives or Parquet files.
        max_bytes: The most bytes of a shard, unless one sample alone is larger; 1e8 by default, none with ``shards``.
        max_samples: The most samples of a shard; 100,000 by default, none with ``shards``.
        shards: Cut the order into this many ranges, each one shard, and write them in parallel; on a cluster, where the
            samples are. Where a limit is given, every name ends in ``-0``, ``-1``, ...
        workers: How many workers read the source, or (min, max): threads for files, processes for datasets.
        shuffle: Shuffle the samples by ``seed``; a ``ps.Dataset`` that is shuffled already keeps its order.
        seed: Determines the order.
        mode: ``"new"`` continues an interrupted run of the same source and options where it stopped, returns a
            complete one as it is, and refuses a folder that holds anything else. ``"replace"`` replaces the shards in
            the folder, when all new ones are complete. ``"append"`` adds shards.
        compress: Compress shards (``"zst"``, ``"gz"``, ``"bz2"``, ``"xz"``), which then cannot be read in part; in
            Parquet files, compress all columns that are not media, by ``"zstd"`` or another codec of
            ``write_parquet``.
        image: How to encode images that are not encoded yet.
        images: Scale images down and encode them again, such as ``vision.Store(max_side=512)``.
        tiles: Store JPEGs in tiles, without loss, so that crops of them decode faster; needs the program jpegtran.
        on_error: Raise or skip a sample that cannot be read or stored; by default as the dataset says.
        progress: Show a progress bar; ``None``: if standard error is a terminal.
        dry_run: Write nothing, and return what would be written.
        version: Distinguishes runs whose code differs in a way that cannot be seen; see the guide to packing.
        storage: The storage of ``url``, and of ``source`` and the files that a list names, if they are URLs; where
            the schemes of ``url`` and ``source`` differ, of ``url`` only.
        engine: The engine that reads the samples, such as ``"ray"``; by default that of the dataset. It writes the
            shards, too, if ``shards`` is given; otherwise this process does.

    Returns:
        The names of the shards, and the numbers of samples and bytes.

    Raises:
        DataError: A sample cannot be read or stored.
        PlanError: An argument is not valid, the source cannot be packed, the folder holds other shards, or another run
            is writing to it.
        StorageError: The source cannot be read, or the folder cannot be written.
    """
    check_choice("format", format, ("tar", "parquet"))
    folder, is_parquet = check_path("url", url), format == "parquet"
    for name, flag in {"shuffle": shuffle, "dry_run": dry_run, "tiles": tiles}.items():
        check_flag(name, flag)
    check_choice("mode", mode, MODES)
    check_choice("image", image, ("png", "jpg"))
    if images is not None and not isinstance(images, Store):
        raise PlanError(f"images={images!r}: give vision.Store(max_side=...)")
    check_count("seed", seed)
    if shards is not None:
        check_count("shards", shards, least=1)
    if compress is not None and not is_parquet:
        check_choice("compress", compress, COMPRESSION_SUFFIXES)
    compression = parquet_compression(compress) if is_parquet else ""
    # The storage serves every URL of the call, but a target on another kind of storage is the one that it is for.
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else ""
    same_storage = scheme(folder) == "file" or scheme(path) in ("file", scheme(folder))
    typed = is_parquet and images is None and not tiles  # images are stored anew in encoded fields
    origin = recognise(source, workers=workers, image=image, storage=storage if same_storage else None, typed=typed)
    limits = ShardLimits.of(max_bytes, max_samples, compress, shards, default_bytes=_MAX_BYTES)
    options = limits.options() | {"shuffle": shuffle, "seed": seed, "image": image, "version": version}
    plan = shuffle_plan(origin.plan) if shuffle else origin.plan
    if images is not None:
        options["images"] = asdict(images)
        plan = plan.then(StoreImages(images, resources=Resources(workers)))
    if tiles:
        options["tiles"] = True
        plan = plan.then(TileImages(resources=Resources(workers)))
    chosen = plan.engine if engine is None else engine_options(engine, {})
    plan = replace(plan, engine=chosen, seed=seed if plan.seed is None else plan.seed)
    if on_error is not None:
        plan = replace(plan, errors=OnError(on_error))
    origin = replace(origin, plan=plan)
    with storage_errors(folder):
        if is_parquet:
            tables = TableOptions(limits.max_bytes, limits.max_samples, compression)
            return _pack(origin, parquet_target(folder, storage), tables, shards, options, mode, progress, dry_run)
        return _pack(origin, tar_target(folder, compress, storage), limits, shards, options, mode, progress, dry_run)


def _pack(
    origin: PackInput,
    target: Target,
    limits: ShardLimits | TableOptions,
    shards: int | None,
    options: dict[str, Any],
    mode: Mode,
    progress: bool | None,
    dry_run: bool,
) -> Packed:
    _check_target(target, origin)
    classes, epoch, ranges = None, origin.plan.epoch or 0, None if dry_run else shards
    if isinstance(limits, TableOptions):
        program, make_sink = parquet_sinks(origin, limits, ranges)  # classes are in the schema
        sinks = Sinks(make_sink, shards, limits.limited)
    else:
        program, classes = exact_program(origin.plan, ranges), origin.classes
        sinks = Sinks(partial(TarSink, limits, origin.numbered_keys), shards, limits.limited)
    if origin.files is None:
        target.check_not_source(program)
    if dry_run and isinstance(limits, ShardLimits):
        first = target.next_number(target.sizes()) if mode != "new" else 0
        return estimate_shards(origin, epoch, redacted(target.folder), first, limits, shards)
    if dry_run and isinstance(sink := sinks.make(), ParquetSink):
        return sink.estimate(program, epoch, target.folder, _MEASURED_SAMPLES, shards)
    if classes is not None and mode == "append" and (manifest := target.manifest()) is not None:
        _check_classes(manifest.classes or classes, classes)
    packing: dict[str, Any] = {"kind": "packing run", "title": "packing", "progress": progress}
    return write_set(program, epoch, target, sinks, options, mode=mode, classes=classes, **packing)


def _check_target(target: Target, origin: PackInput) -> None:
    """Check that the target is a folder that this source may be packed into."""
    if target.label or target.folder.endswith((".tar", ".tgz", ".parquet")):
        raise PlanError(f"{redacted(target.url(target.label))}: packing writes a folder of shards; give a folder")
    origin.check_outside(target.folder)
    other = "parquet" if target.format == "tar" else "tar"
    if replace(target, format=other).manifest() is not None:
        holds = "tar shards" if other == "tar" else "Parquet files"
        raise PlanError(f"{redacted(target.folder)} holds {holds}; choose another folder for {target.format} files")


def _check_classes(existing: tuple[str, ...], new: tuple[str, ...]) -> None:
    if existing != new:
        raise PlanError(
            f"the existing shards have {len(existing)} classes ({', '.join(existing[:3])}, ...) and the source has "
            f"others ({', '.join(new[:3])}, ...): the same number would mean two things; choose another folder"
        )
