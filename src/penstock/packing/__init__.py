"""Any dataset into shards: on disk or elsewhere, in one exact order, taken up again where it was interrupted."""

from penstock.packing.packer import pack
from penstock.packing.rows import write_rows
from penstock.packing.writing import Packed, write_shards

__all__ = ["Packed", "pack", "write_rows", "write_shards"]
