"""Samples into files: every method writes all of them, in order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from penstock import packing
from penstock.dataset.table_methods import Tabular
from penstock.errors import PlanError
from penstock.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa


class Writing(Tabular):
    """A plan whose samples can be written; nothing of it appears before it is whole."""

    __slots__ = ()

    def _coming(self) -> int:
        """The epoch that is written."""
        return self.plan.epoch or 0

    def write_tar(
        self,
        url: str,
        max_bytes: float | str = 1e9,
        max_samples: int = 100_000,
        compress: Literal["gz", "zst", "bz2", "xz"] | None = None,
        *,
        trust_pickle: bool = False,
        resume: bool = False,
        progress: bool = False,
        storage: Storage | None = None,
    ) -> packing.Packed:
        """Write the samples into tar shards, in order.

        ``url`` is a folder (``shard-000000.tar``, ...), a pattern (``out/train-%06d.tar``), or one ``.tar`` file; a
        path, or a URL that ``storage`` or its scheme knows how to write to. ``resume`` goes on with an interrupted run
        of the same dataset and options that had it too, makes only the shards that are missing, and needs a folder.

        Raises:
            DataError: a sample cannot be stored.
            PlanError: the folder holds shards of something else, with ``resume``.
            StorageError: the place cannot be written.
        """
        if resume:
            if trust_pickle:
                raise PlanError("write_tar(resume=True) stores no pickle: leave out trust_pickle")
            return packing.pack(
                self.epoch(self._coming()),
                url,
                max_bytes=max_bytes,
                max_samples=max_samples,
                shuffle=False,
                compress=compress,
                progress=progress,
                storage=storage,
            )
        return packing.write_shards(
            self.plan,
            self._coming(),
            url,
            max_bytes=max_bytes,
            max_samples=max_samples,
            compress=compress,
            trust_pickle=trust_pickle,
            progress=progress,
            storage=storage,
        )

    def write_csv(
        self,
        url: str,
        max_bytes: float | str | None = None,
        *,
        delimiter: str = ",",
        resume: bool = True,
        progress: bool = False,
        storage: Storage | None = None,
    ) -> packing.Packed:
        """Write the samples as CSV, in order: into one ``.csv`` file, or a folder (``00000-of-00010.csv``, ...).

        ``max_bytes`` bounds every file of a folder. Files appear when the last of them is done; ``resume`` goes on with
        an interrupted run of the same dataset and options, where files are on a disk.

        Raises:
            DataError: a value has no place in CSV, or a sample has other fields than the first.
            StorageError: the place cannot be written, or holds such files already.
        """
        return self._rows(url, packing.AsCsv(delimiter), max_bytes, resume, progress, storage)

    def write_json(
        self,
        url: str,
        max_bytes: float | str | None = None,
        *,
        resume: bool = True,
        progress: bool = False,
        storage: Storage | None = None,
    ) -> packing.Packed:
        """Write the samples as JSON lines, in order: into one ``.jsonl`` file, or a folder; as ``write_csv`` does.

        Raises:
            DataError: a value has no place in JSON.
            StorageError: the place cannot be written, or holds such files already.
        """
        return self._rows(url, packing.AsJson(), max_bytes, resume, progress, storage)

    def write_tfrecords(
        self,
        url: str,
        max_bytes: float | str | None = None,
        *,
        resume: bool = True,
        progress: bool = False,
        storage: Storage | None = None,
    ) -> packing.Packed:
        """Write the samples as ``tf.train.Example``, in order: into one ``.tfrecord`` file, or a folder.

        Raises:
            DataError: a value has no place there.
            StorageError: the place cannot be written, or holds such files already.
        """
        return self._rows(url, packing.AsExample(), max_bytes, resume, progress, storage)

    def _rows(
        self,
        url: str,
        kind: packing.RowStage,
        max_bytes: float | str | None,
        resume: bool,
        progress: bool,
        storage: Storage | None,
    ) -> packing.Packed:
        options: dict[str, Any] = {"max_bytes": max_bytes, "resume": resume, "progress": progress, "storage": storage}
        return packing.write_rows(self.plan, self._coming(), url, kind, **options)

    def write_parquet(
        self,
        url: str | os.PathLike[str],
        max_bytes: float | str = "500MB",
        max_samples: int | None = None,
        compression: str = "zstd",
        *,
        append: bool = False,
        resume: bool = True,
        schema: pa.Schema | None = None,
        progress: bool = False,
        storage: Storage | None = None,
    ) -> packing.Packed:
        """Write the samples into Parquet files of a folder, in order: ``00000-of-00010.parquet`` and so on.

        They appear together when the last one is complete; no file has more than ``max_bytes``, unless one sample alone
        has. ``append`` writes a new set beside those that are there; ``resume`` goes on with an interrupted run of the
        same dataset and options; ``schema`` says the types of columns, by default those of the first samples.

        Raises:
            DataError: a sample cannot be stored.
            MissingExtra: pyarrow is not installed.
            PlanError: an argument makes no sense, or the folder holds such files already.
            StorageError: the place cannot be written.
        """
        options = packing.TableOptions(max_bytes, max_samples, compression, append, resume, schema)
        where = os.fspath(url)
        return packing.write_tables(self.plan, self._coming(), where, options, progress=progress, storage=storage)
