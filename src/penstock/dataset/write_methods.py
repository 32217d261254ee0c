"""Methods that write all samples, in order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from penstock import landing
from penstock.codecs.stage import Encode
from penstock.dataset.table_methods import TableMethods
from penstock.formats.rows.encoding import AsCsv, AsExample, AsJson, RowStage
from penstock.formats.tables.source import require_arrow
from penstock.plan import check_count, size_in_bytes, takes_mode
from penstock.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa


class WriteMethods(TableMethods):
    """A plan whose samples can be written; a file becomes visible only when it is complete.

    All methods have a ``mode``: ``"new"`` continues an interrupted run of the same dataset and options, returns a
    complete one as it is, and refuses a target that holds files, or an unfinished run, of anything else. ``"replace"``
    replaces the files of the target when all new ones are complete. ``"append"`` adds files. A run is recognised by the
    stamps of its sources, its stages and the code of its functions; ``version`` distinguishes what is not seen there.
    """

    __slots__ = ()

    def _upcoming_epoch(self) -> int:
        """Return the epoch that is written."""
        return self.plan.epoch or 0

    @takes_mode
    def write_tar(
        self,
        url: str | os.PathLike[str],
        max_bytes: float | str = 1e9,
        max_samples: int = 100_000,
        compress: Literal["gz", "zst", "bz2", "xz"] | None = None,
        *,
        mode: landing.Mode = "new",
        version: str = "",
        trust_pickle: bool = False,
        progress: bool = False,
        storage: Storage | None = None,
    ) -> landing.Packed:
        """Write the samples into tar shards, in order. Samples without ``__key__`` get their number as key.

        Args:
            url: A folder (for ``shard-000000.tar``, ...), a pattern (``out/train-%06d.tar``), or one ``.tar`` file; a
                path or a URL.
            max_bytes: The maximum size of a shard, unless a single sample is larger.
            max_samples: The maximum number of samples in a shard.
            compress: How to compress the shards.
            mode: What to do with what the target holds: ``"new"``, ``"replace"`` or ``"append"``.
            version: Distinguishes runs whose code differs in a way that cannot be seen.
            trust_pickle: Store values as pickle if no codec supports them.
            progress: Show a progress bar.
            storage: How to reach the URL; by default set by its scheme and the environment.

        Raises:
            DataError: A sample cannot be stored.
            PlanError: An argument is out of range, the plan reads from the target, or the target holds something else.
            StorageError: The target cannot be written.
        """
        check_count("max_samples", max_samples, least=1)
        limits = landing.ShardLimits(size_in_bytes("max_bytes", max_bytes), max_samples, compress)
        target = landing.tar_target(url, compress, storage)
        program = landing.exact_program(self.plan.then(Encode(trust_pickle)))
        target.check_not_source(program)
        options = {"max_bytes": limits.max_bytes, "max_samples": max_samples, "compress": compress, "version": version}
        sink, shown = landing.TarSink(limits), None if progress else False
        return landing.land(program, self._upcoming_epoch(), target, sink, options, mode=mode, progress=shown)

    @takes_mode
    def write_csv(
        self,
        url: str | os.PathLike[str],
        max_bytes: float | str | None = None,
        *,
        delimiter: str = ",",
        mode: landing.Mode = "new",
        version: str = "",
        progress: bool = False,
        storage: Storage | None = None,
    ) -> landing.Packed:
        """Write the samples as CSV, in order: into one ``.csv`` file, or into a folder (``00000-of-00010.csv``, ...).

        ``max_bytes`` limits the size of each file in a folder. The files become visible when the last one is complete.

        Raises:
            DataError: A value cannot be written as CSV, or a sample does not have the fields of the first.
            PlanError: An argument is out of range, or the target holds something else.
            StorageError: The target cannot be written.
        """
        return self._write_rows(url, AsCsv(delimiter), max_bytes, mode, version, progress, storage)

    @takes_mode
    def write_json(
        self,
        url: str | os.PathLike[str],
        max_bytes: float | str | None = None,
        *,
        mode: landing.Mode = "new",
        version: str = "",
        progress: bool = False,
        storage: Storage | None = None,
    ) -> landing.Packed:
        """Write the samples as JSON lines, in order: into one ``.jsonl`` file, or into a folder, like ``write_csv``.

        Raises:
            DataError: A value cannot be written as JSON.
            PlanError: An argument is out of range, or the target holds something else.
            StorageError: The target cannot be written.
        """
        return self._write_rows(url, AsJson(), max_bytes, mode, version, progress, storage)

    @takes_mode
    def write_tfrecords(
        self,
        url: str | os.PathLike[str],
        max_bytes: float | str | None = None,
        *,
        mode: landing.Mode = "new",
        version: str = "",
        progress: bool = False,
        storage: Storage | None = None,
    ) -> landing.Packed:
        """Write the samples as ``tf.train.Example``, in order: into one ``.tfrecord`` file, or into a folder.

        Raises:
            DataError: A value cannot be written as a ``tf.train.Feature``.
            PlanError: An argument is out of range, or the target holds something else.
            StorageError: The target cannot be written.
        """
        return self._write_rows(url, AsExample(), max_bytes, mode, version, progress, storage)

    def _write_rows(
        self,
        url: str | os.PathLike[str],
        encoder: RowStage,
        max_bytes: float | str | None,
        mode: landing.Mode,
        version: str,
        progress: bool,
        storage: Storage | None,
    ) -> landing.Packed:
        limit = None if max_bytes is None else size_in_bytes("max_bytes", max_bytes)
        target = landing.row_target(url, encoder.suffixes, limit, storage)
        program = landing.exact_program(self.plan.then(encoder))
        options: dict[str, Any] = {"max_bytes": limit, "version": version}
        sink, shown = landing.RowSink(encoder, limit), None if progress else False
        return landing.land(program, self._upcoming_epoch(), target, sink, options, mode=mode, progress=shown)

    @takes_mode
    def write_parquet(
        self,
        url: str | os.PathLike[str],
        max_bytes: float | str = "500MB",
        max_samples: int | None = None,
        compression: str = "zstd",
        *,
        mode: landing.Mode = "new",
        version: str = "",
        schema: pa.Schema | None = None,
        progress: bool = False,
        storage: Storage | None = None,
    ) -> landing.Packed:
        """Write the samples into Parquet files in a folder, in order: ``00000-of-00010.parquet`` and so on.

        The files become visible together when the last one is complete.

        Args:
            url: The folder: a path or a URL.
            max_bytes: The maximum size of a file, unless a single sample is larger.
            max_samples: The maximum number of samples in a file.
            compression: How to compress columns; columns of media are not compressed again.
            mode: What to do with what the folder holds: ``"new"``, ``"replace"`` or ``"append"``.
            version: Distinguishes runs whose code differs in a way that cannot be seen.
            schema: The types of the columns; inferred from the first samples by default.
            progress: Show a progress bar.
            storage: How to reach the URL; by default set by its scheme and the environment.

        Raises:
            DataError: A sample cannot be stored.
            MissingExtra: pyarrow is not installed.
            PlanError: An argument is out of range, the plan reads from the folder, or it holds something else.
            StorageError: The target cannot be written.
        """
        tables = landing.TableOptions(max_bytes, max_samples, compression, schema)
        require_arrow("writing Parquet")
        target, program = landing.parquet_target(url, storage), landing.exact_program(self.plan)
        target.check_not_source(program)
        limit = size_in_bytes("max_bytes", max_bytes)
        options: dict[str, Any] = {"max_bytes": limit, "max_samples": max_samples, "compression": compression}
        options |= {"schema": None if schema is None else str(schema), "version": version}
        sink, shown = landing.ParquetSink(program, tables), None if progress else False
        return landing.land(program, self._upcoming_epoch(), target, sink, options, mode=mode, progress=shown)
