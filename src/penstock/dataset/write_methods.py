"""The methods that write: each writes all samples, in order."""

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
    """A plan whose samples can be written; a file appears only when it is complete."""

    __slots__ = ()

    def _coming(self) -> int:
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
            max_bytes: The most bytes of a shard, unless one sample alone is larger.
            max_samples: The most samples of a shard.
            compress: How to compress the shards.
            trust_pickle: Store values by pickle where no codec fits.
            resume: Resume an interrupted run of the same dataset and options that also had ``resume``: only missing
                shards are written. Needs a folder.
            progress: Show a progress bar.
            storage: How to reach the URL; by default as its scheme and the environment say.

        Raises:
            DataError: A sample cannot be stored.
            PlanError: The folder holds shards of another dataset, with ``resume``.
            StorageError: The target cannot be written.
        """
        if resume:
            if trust_pickle:
                raise PlanError("write_tar(resume=True) does not store pickles: leave out trust_pickle")
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
        """Write the samples as CSV, in order: into one ``.csv`` file, or into a folder (``00000-of-00010.csv``, ...).

        ``max_bytes`` bounds every file of a folder. The files appear when the last of them is complete; ``resume``
        resumes an interrupted run of the same dataset and options, where the files are on a local disk.

        Raises:
            DataError: A value cannot be written as CSV, or a sample has other fields than the first.
            StorageError: The target cannot be written, or already holds such files.
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
        """Write the samples as JSON lines, in order: into one ``.jsonl`` file, or into a folder, like ``write_csv``.

        Raises:
            DataError: A value cannot be written as JSON.
            StorageError: The target cannot be written, or already holds such files.
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
        """Write the samples as ``tf.train.Example``, in order: into one ``.tfrecord`` file, or into a folder.

        Raises:
            DataError: A value cannot be written as a ``tf.train.Feature``.
            StorageError: The target cannot be written, or already holds such files.
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

        The files appear together when the last one is complete.

        Args:
            url: The folder: a path or a URL.
            max_bytes: The most bytes of a file, unless one sample alone is larger.
            max_samples: The most samples of a file.
            compression: How to compress columns; media columns stay as they are.
            append: Write a new set beside the files that the folder holds.
            resume: Resume an interrupted run of the same dataset and options.
            schema: The types of the columns; inferred from the first samples by default.
            progress: Show a progress bar.
            storage: How to reach the URL; by default as its scheme and the environment say.

        Raises:
            DataError: A sample cannot be stored.
            MissingExtra: pyarrow is not installed.
            PlanError: An argument is out of range, or the folder already holds such files.
            StorageError: The target cannot be written.
        """
        options = packing.TableOptions(max_bytes, max_samples, compression, append, resume, schema)
        folder = os.fspath(url)
        return packing.write_tables(self.plan, self._coming(), folder, options, progress=progress, storage=storage)
