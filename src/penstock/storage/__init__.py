"""WHERE bytes live: files, S3, HTTP, memory and what fsspec knows; the ways to name them; when to try again.

The storages are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.storage.protocol import (
    Forbidden,
    Info,
    Listed,
    NotFound,
    Storage,
    Upload,
    exists,
    open_storage,
    register,
    shown,
)
from penstock.storage.urls import STDIN, braces, expand, local_path, relative, spell

if TYPE_CHECKING:
    from penstock.storage.cache import Cache
    from penstock.storage.http import Http
    from penstock.storage.local import Local
    from penstock.storage.memory import Memory
    from penstock.storage.other import Other
    from penstock.storage.retry import Retry
    from penstock.storage.s3 import S3

_WHERE = {
    "Cache": "cache",
    "Http": "http",
    "Local": "local",
    "Memory": "memory",
    "Other": "other",
    "Retry": "retry",
    "S3": "s3",
}

__all__ = [
    "S3",
    "STDIN",
    "Cache",
    "Forbidden",
    "Http",
    "Info",
    "Listed",
    "Local",
    "Memory",
    "NotFound",
    "Other",
    "Retry",
    "Storage",
    "Upload",
    "braces",
    "exists",
    "expand",
    "local_path",
    "open_storage",
    "register",
    "relative",
    "shown",
    "spell",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"penstock.storage has no {name!r}")
    value = getattr(import_module(f"penstock.storage.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
