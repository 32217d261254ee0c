"""Methods that write all samples, in order."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from penstock import landing
from penstock.codecs.stage import Encode
from penstock.dataset.table_methods import TableMethods
from penstock.engines import Program
from penstock.formats.rows.encoding import AsCsv, AsExample, AsJson, RowStage
from penstock.formats.tables.source import require_arrow
from penstock.plan import size_in_bytes, takes_mode
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
        max_bytes: float | str | None = None,
        max_samples: int | None = None,
        shards: int | None = None,
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
            max_bytes: The maximum size of a shard before compression, unless a single sample is larger; 1e9 by
                default, none with ``shards``.
            max_samples: The maximum number of samples in a shard; 100,000 by default, none with ``shards``.
            shards: Cut the order into this many ranges, each one shard, and write them in parallel; shard ``k`` holds
                what ``shard(k, shards)`` yields. Where a limit is given, every name ends in ``-0``, ``-1``, ...
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
        limits = landing.ShardLimits.of(max_bytes, max_samples, compress, shards)
        target = landing.tar_target(url, compress, storage)
        program = landing.exact_program(self.plan.then(Encode(trust_pickle)), shards)
        target.check_not_source(program)
        options = limits.options() | {"version": version}
        sinks = landing.Sinks(partial(landing.TarSink, limits), shards, limits.limited)
        return self._write(program, target, sinks, options, mode, progress)

    def _write(
        self,
        program: Program,
        target: landing.Target,
        sinks: landing.Sinks,
        options: dict[str, Any],
        mode: landing.Mode,
        progress: bool,
    ) -> landing.Packed:
        """Write the samples of a program to a target."""
        shown = None if progress else False
        return landing.write_set(program, self._upcoming_epoch(), target, sinks, options, mode=mode, progress=shown)

    @takes_mode
    def write_csv(
        self,
        url: str | os.PathLike[str],
        max_bytes: float | str | None = None,
        shards: int | None = None,
        *,
        delimiter: str | None = None,
        mode: landing.Mode = "new",
        version: str = "",
        progress: bool = False,
        storage: Storage | None = None,
    ) -> landing.Packed:
        """Write the samples as CSV, in order: into one ``.csv`` file, or into a folder (``00000-of-00010.csv``, ...).

        ``delimiter`` is a comma, or a tab in a ``.tsv`` file. ``max_bytes`` limits the size of each file in a folder.
        ``shards`` cuts the order into that many ranges, which are written in parallel, each into one file. The files
        become visible when the last one is complete.

        Raises:
            DataError: A value cannot be written as CSV, or a sample does not have the fields of the first.
            PlanError: An argument is out of range, the plan reads from the target, or the target holds something else.
            StorageError: The target cannot be written.
        """
        if delimiter is None:
            delimiter = "\t" if landing.check_path("url", url).endswith(".tsv") else ","
        return self._write_rows(url, AsCsv(delimiter), (max_bytes, shards), mode, version, progress, storage)

    @takes_mode
    def write_json(
        self,
        url: str | os.PathLike[str],
        max_bytes: float | str | None = None,
        shards: int | None = None,
        *,
        mode: landing.Mode = "new",
        version: str = "",
        progress: bool = False,
        storage: Storage | None = None,
    ) -> landing.Packed:
        """Write the samples as JSON lines, in order: into one ``.jsonl`` file, or into a folder, like ``write_csv``.

        Raises:
            DataError: A value cannot be written as JSON.
            PlanError: An argument is out of range, the plan reads from the target, or the target holds something else.
            StorageError: The target cannot be written.
        """
        return self._write_rows(url, AsJson(), (max_bytes, shards), mode, version, progress, storage)

    @takes_mode
    def write_tfrecords(
        self,
        url: str | os.PathLike[str],
        max_bytes: float | str | None = None,
        shards: int | None = None,
        *,
        mode: landing.Mode = "new",
        version: str = "",
        progress: bool = False,
        storage: Storage | None = None,
    ) -> landing.Packed:
        """Write the samples as ``tf.train.Example``, in order: into one ``.tfrecord`` file, or into a folder.

        Raises:
            DataError: A value cannot be written as a ``tf.train.Feature``.
            PlanError: An argument is out of range, the plan reads from the target, or the target holds something else.
            StorageError: The target cannot be written.
        """
        return self._write_rows(url, AsExample(), (max_bytes, shards), mode, version, progress, storage)

    def _write_rows(
        self,
        url: str | os.PathLike[str],
        encoder: RowStage,
        sizes: tuple[float | str | None, int | None],
        mode: landing.Mode,
        version: str,
        progress: bool,
        storage: Storage | None,
    ) -> landing.Packed:
        max_bytes, shards = sizes
        limit = None if max_bytes is None else size_in_bytes("max_bytes", max_bytes)
        target = landing.row_target(url, encoder.suffixes, limit, storage)
        program = landing.exact_program(self.plan.then(encoder), shards)
        target.check_not_source(program)
        options: dict[str, Any] = {"max_bytes": limit, "version": version}
        sinks = landing.Sinks(partial(landing.RowSink, encoder, limit), shards, limit is not None)
        return self._write(program, target, sinks, options, mode, progress)

    @takes_mode
    def write_parquet(
        self,
        url: str | os.PathLike[str],
        max_bytes: float | str | None = None,
        shards: int | None = None,
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
            max_bytes: The maximum size of a file, unless a single sample is larger; "500MB" by default, none with
                ``shards``.
            shards: Cut the order into this many ranges, each one file, and write them in parallel; file ``k`` holds
                what ``shard(k, shards)`` yields. Where a limit is given, every name ends in ``-0``, ``-1``, ... On
                remote storage, files appear as they are completed, and the manifest at the end.
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
        limit = "500MB" if max_bytes is None and shards is None else max_bytes
        tables = landing.TableOptions(limit, max_samples, compression, schema)
        require_arrow("writing Parquet")
        target, program = landing.parquet_target(url, storage), landing.exact_program(self.plan, shards)
        target.check_not_source(program)
        options = tables.options() | {"version": version}
        sinks = landing.Sinks(partial(landing.ParquetSink, program.features(), tables), shards, tables.limited)
        return self._write(program, target, sinks, options, mode, progress)
