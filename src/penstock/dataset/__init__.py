"""The fluent face: a dataset is a value; each method adds one stage or calls one room below."""

from penstock.dataset.fluent import Dataset
from penstock.dataset.sources import from_items, from_torch, mix, read_files, read_images, read_tar

__all__ = ["Dataset", "from_items", "from_torch", "mix", "read_files", "read_images", "read_tar"]
