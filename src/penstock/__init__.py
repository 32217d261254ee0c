"""Penstock feeds accelerators: packs datasets into shards and streams them, in one exact order, at full speed.

Names are loaded when they are first used, so that ``import penstock`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Cache": "storage",
    "Dataset": "dataset",
    "Limits": "codecs",
    "Loader": "feed",
    "Packed": "packing",
    "S3": "storage",
    "TarWriter": "formats.tar",
    "col": "plan",
    "convert": "dataset",
    "errors": "errors",
    "from_arrow": "dataset",
    "features": "codecs.features",
    "from_huggingface": "dataset",
    "from_items": "dataset",
    "from_ray": "dataset",
    "from_torch": "dataset",
    "ledger": "feed.ledger",
    "mix": "dataset",
    "pack": "packing",
    "pad": "plan",
    "process": "jobs",
    "read_arrow": "dataset",
    "read_csv": "dataset",
    "read_files": "dataset",
    "read_images": "dataset",
    "read_json": "dataset",
    "read_parquet": "dataset",
    "read_tar": "dataset",
    "read_text": "dataset",
    "read_tfrecords": "dataset",
    "vision": "vision",
}

if TYPE_CHECKING:
    from penstock import errors as errors
    from penstock import vision as vision
    from penstock.codecs import Limits as Limits
    from penstock.codecs import features as features
    from penstock.dataset import Dataset as Dataset
    from penstock.dataset import convert as convert
    from penstock.dataset import from_arrow as from_arrow
    from penstock.dataset import from_huggingface as from_huggingface
    from penstock.dataset import from_items as from_items
    from penstock.dataset import from_ray as from_ray
    from penstock.dataset import from_torch as from_torch
    from penstock.dataset import mix as mix
    from penstock.dataset import read_arrow as read_arrow
    from penstock.dataset import read_csv as read_csv
    from penstock.dataset import read_files as read_files
    from penstock.dataset import read_images as read_images
    from penstock.dataset import read_json as read_json
    from penstock.dataset import read_parquet as read_parquet
    from penstock.dataset import read_tar as read_tar
    from penstock.dataset import read_text as read_text
    from penstock.dataset import read_tfrecords as read_tfrecords
    from penstock.feed import Loader as Loader
    from penstock.feed.ledger import ledger as ledger
    from penstock.formats.tar import TarWriter as TarWriter
    from penstock.jobs import process as process
    from penstock.packing import Packed as Packed
    from penstock.packing import pack as pack
    from penstock.plan import col as col
    from penstock.plan import pad as pad
    from penstock.storage import S3 as S3
    from penstock.storage import Cache as Cache

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"penstock has no {name!r}; it has {', '.join(sorted(_WHERE))}")
    room = import_module(f"penstock.{_WHERE[name]}")
    value = room if name in ("errors", "features", "vision") else getattr(room, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
