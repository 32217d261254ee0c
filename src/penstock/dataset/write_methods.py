"""Methods that write all samples, in order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from penstock import packing
from penstock.dataset.table_methods import TableMethods
from penstock.errors import PlanError
from penstock.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa


class WriteMethods(TableMethods):
    """A plan whose samples can be written; a file becomes visible only when it is complete."""

    __slots__ = ()

    def _upcoming_epoch(self) -> int:
        """Return the epoch that is written."""
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

        Args:
            url: A folder (for ``shard-000000.tar``, ...), a pattern (``out/train-%06d.tar``), or one ``.tar`` file; a
                path or a URL.
            max_bytes: The maximum size of a shard, unless a single sample is larger.
            max_samples: The maximum number of samples in a shard.
            compress: How to compress the shards.
            trust_pickle: Store values as pickle if no codec supports them.
            resume: Resume an interrupted run of the same dataset and options, and write only the missing shards. The
                interrupted run must have had ``resume``, too. Needs a folder.
            progress: Show a progress bar.
            storage: How to reach the URL; by default set by its scheme and the environment.

        Raises:
            DataError: A sample cannot be stored.
            PlanError: With ``resume``, the folder contains shards of another dataset, or ``trust_pickle`` is set.
            StorageError: The target cannot be written.
        """
        if resume:
            if trust_pickle:
                raise PlanError("write_tar(resume=True) does not store pickles; leave out trust_pickle")
            return packing.pack(
                self.epoch(self._upcoming_epoch()),
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
            self._upcoming_epoch(),
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
        """Write the samples as CSV, in order: into one ``.csv`` file, or into a folder (``00000-of-00010.csv``, ...).

        ``max_bytes`` limits the size of each file in a folder. The files become visible when the last one is complete.
        ``resume`` resumes an interrupted run of the same dataset and options if the files are on a local disk.

        Raises:
            DataError: A value cannot be written as CSV, or a sample does not have the fields of the first.
            StorageError: The target cannot be written, or already contains such files.
        """
        return self._write_rows(url, packing.AsCsv(delimiter), max_bytes, resume, progress, storage)

    def write_json(
        self,
        url: str,
        max_bytes: float | str | None = None,
        *,
        resume: bool = True,
        progress: bool = False,
        storage: Storage | None = None,
    ) -> packing.Packed:
        """Write the samples as JSON lines, in order: into one ``.jsonl`` file, or into a folder, like ``write_csv``.

        Raises:
            DataError: A value cannot be written as JSON.
            StorageError: The target cannot be written, or already contains such files.
        """
        return self._write_rows(url, packing.AsJson(), max_bytes, resume, progress, storage)

    def write_tfrecords(
        self,
        url: str,
        max_bytes: float | str | None = None,
        *,
        resume: bool = True,
        progress: bool = False,
        storage: Storage | None = None,
    ) -> packing.Packed:
        """Write the samples as ``tf.train.Example``, in order: into one ``.tfrecord`` file, or into a folder.

        Raises:
            DataError: A value cannot be written as a ``tf.train.Feature``.
            StorageError: The target cannot be written, or already contains such files.
        """
        return self._write_rows(url, packing.AsExample(), max_bytes, resume, progress, storage)

    def _write_rows(
        self,
        url: str,
        row_stage: packing.RowStage,
        max_bytes: float | str | None,
        resume: bool,
        progress: bool,
        storage: Storage | None,
    ) -> packing.Packed:
        options: dict[str, Any] = {"max_bytes": max_bytes, "resume": resume, "progress": progress, "storage": storage}
        return packing.write_rows(self.plan, self._upcoming_epoch(), url, row_stage, **options)

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
        """Write the samples into Parquet files in a folder, in order: ``00000-of-00010.parquet`` and so on.

        The files become visible together when the last one is complete.

        Args:
            url: The folder: a path or a URL.
            max_bytes: The maximum size of a file, unless a single sample is larger.
            max_samples: The maximum number of samples in a file.
            compression: How to compress columns; columns of media are not compressed again.
            append: Write a new set of files beside those in the folder.
            resume: Resume an interrupted run of the same dataset and options.
            schema: The types of the columns; inferred from the first samples by default.
            progress: Show a progress bar.
            storage: How to reach the URL; by default set by its scheme and the environment.

        Raises:
            DataError: A sample cannot be stored.
            MissingExtra: pyarrow is not installed.
            PlanError: An argument is out of range, or the folder already contains Parquet files.
            StorageError: The target cannot be written.
        """
        options = packing.TableOptions(max_bytes, max_samples, compression, append, resume, schema)
        folder = os.fspath(url)
        return packing.write_tables(
            self.plan, self._upcoming_epoch(), folder, options, progress=progress, storage=storage
        )
