"""Penstock feeds accelerators: it packs datasets into shards and streams them in one exact order, at full speed.

Names are loaded when they are first used, so ``import penstock`` is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

__version__ = "0.2.0"

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
    from penstock.dataset import read_lmdb as read_lmdb
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
    from penstock.serving import connect as connect
    from penstock.serving import serve as serve
    from penstock.storage import HTTP as HTTP
    from penstock.storage import S3 as S3
    from penstock.storage import Cache as Cache
else:

    def _instead_of(name):
        from penstock.plan.peer_names import FUNCTIONS  # not above: ``import penstock`` loads nothing

        return FUNCTIONS.get(name)

    __getattr__, __dir__, __all__ = lazy(__name__)
