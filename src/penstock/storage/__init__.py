"""Where bytes are stored: local files, S3, HTTP, memory and fsspec file systems; URL patterns, retries, the disk cache.

Each storage is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.storage.cache import Cache as Cache
    from penstock.storage.fsspec import FsspecStorage as FsspecStorage
    from penstock.storage.http import HTTP as HTTP
    from penstock.storage.local import Local as Local
    from penstock.storage.memory import Memory as Memory
    from penstock.storage.protocol import Forbidden as Forbidden
    from penstock.storage.protocol import Info as Info
    from penstock.storage.protocol import Listed as Listed
    from penstock.storage.protocol import NotFound as NotFound
    from penstock.storage.protocol import Storage as Storage
    from penstock.storage.protocol import Upload as Upload
    from penstock.storage.protocol import exists as exists
    from penstock.storage.protocol import open_storage as open_storage
    from penstock.storage.protocol import redacted as redacted
    from penstock.storage.protocol import register as register
    from penstock.storage.retry import Retry as Retry
    from penstock.storage.s3 import S3 as S3
    from penstock.storage.urls import STDIN as STDIN
    from penstock.storage.urls import expand as expand
    from penstock.storage.urls import expand_braces as expand_braces
    from penstock.storage.urls import folder_times as folder_times
    from penstock.storage.urls import local_path as local_path
    from penstock.storage.urls import relative_names as relative_names
    from penstock.storage.urls import traits_of as traits_of
    from penstock.storage.urls import url_patterns as url_patterns
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
