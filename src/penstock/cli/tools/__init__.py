"""The tar tools: commands that read and write shards as streams, for shells and pipes."""

from __future__ import annotations

TOOLS = {
    "cat": "concatenate shards; select samples and fields, rename keys, shuffle",
    "create": "create a shard from a table of fields and files",
    "first": "write one field of the first sample that meets a condition",
    "mix": "mix the samples of several sources at random, by weight",
    "proc": "run a command or a Python function on every sample of shards, in parallel (for files: penstock process)",
    "show": "show samples: text, images drawn in the terminal, audio as waveforms",
    "shuffle": "shuffle all samples, however many there are",
    "sort": "sort samples by key or by a field, however many there are",
    "split": "split a stream into shards, with indexes and a manifest",
    "tsv": "write fields as a table: TSV, CSV, JSON lines or Parquet",
}
OLD_NAMES = {  # the names of these tools in tarproc, which are installed too
    "tar2tsv": "tsv",
    "tarcat": "cat",
    "tarcreate": "create",
    "tarfirst": "first",
    "tarmix": "mix",
    "tarpcat": "cat",
    "tarproc": "proc",
    "tarscat": "cat",
    "tarshow": "show",
    "tarsort": "sort",
    "tarsplit": "split",
}
