"""Crash-safe writing: a run that is killed at any moment resumes, and its output is complete or absent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.landing.commit import MODES as MODES
    from penstock.landing.commit import Landing as Landing
    from penstock.landing.commit import Mode as Mode
    from penstock.landing.commit import Packed as Packed
    from penstock.landing.commit import storage_errors as storage_errors
    from penstock.landing.fingerprint import code_digest as code_digest
    from penstock.landing.parquet_sink import PackSpec as PackSpec
    from penstock.landing.parquet_sink import ParquetSink as ParquetSink
    from penstock.landing.parquet_sink import TableOptions as TableOptions
    from penstock.landing.parquet_sink import parquet_target as parquet_target
    from penstock.landing.position import ResumableRun as ResumableRun
    from penstock.landing.position import exact_program as exact_program
    from penstock.landing.ranges import Sinks as Sinks
    from penstock.landing.ranges import write_set as write_set
    from penstock.landing.row_sink import RowSink as RowSink
    from penstock.landing.row_sink import row_target as row_target
    from penstock.landing.tar_sink import ShardLimits as ShardLimits
    from penstock.landing.tar_sink import TarSink as TarSink
    from penstock.landing.tar_sink import tar_target as tar_target
    from penstock.landing.target import Target as Target
    from penstock.landing.target import check_path as check_path
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
