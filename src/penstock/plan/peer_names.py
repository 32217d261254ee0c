"""Names of other libraries, and what to write instead, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from penstock.errors import PlanError

_MAP = "map(fn)"
_LOADER = "loader(format='torch', device=...)"
_COLUMNS = "with_columns(name=ps.col(...)), or map(fn)"
_SHUFFLE = "shuffle()"
_MIX = "ps.mix([a, b], weights=[0.7, 0.3])"
_PANDAS = "ps.from_arrow(pyarrow.Table.from_pandas(frame))"
_COMPAT = "penstock.compat.webdataset"
_RAY_TRAIN = "ds.to_ray() for the datasets= of Ray Train, or ds.loader() in its function"
_NOT_NEEDED = "leave it out: stages run ahead of the consumer by themselves"

# Methods of Hugging Face datasets, Ray Data, WebDataset, tf.data, torchdata, Grain, pandas and polars.
METHODS: dict[str, str] = {
    "add_column": _COLUMNS,
    "apply": _MAP,
    "as_numpy_iterator": "for sample in ds, or iter_batches()",
    "assign": _COLUMNS,
    "astype": _COLUMNS,
    "batch": "batched(n)",
    "bucket_by_sequence_length": "batched_by(size_fn, max_size)",
    "cast": _COLUMNS,
    "cast_column": _COLUMNS,
    "choose_from_datasets": _MIX,
    "class_encode_column": "ps.features.ClassLabel",
    "collect": "take_all()",
    "column_names": "schema()",
    "columns": "schema()",
    "compose": _MAP,
    "concat": "union(other)",
    "concatenate": "union(other)",
    "concatenate_datasets": "union(other)",
    "context": _RAY_TRAIN,
    "copy": _RAY_TRAIN,
    "drop_columns": "drop('name')",
    "drop_duplicates": "distinct('name')",
    "element_spec": "schema()",
    "enumerate": "zip(other)",
    "features": "schema()",
    "filter_by": "filter(ps.col('name') == value)",
    "from_generator": "ps.from_items([...])",
    "group_by": "groupby('name')",
    "group_by_window": "batched_by(size_fn, max_size)",
    "head": "take(n)",
    "input_files": "explain()",
    "interleave": _MIX,
    "interleave_datasets": _MIX,
    "iter": "iter_batches(batch_size)",
    "iter_rows": "for sample in ds",
    "iterator": "for sample in ds, or loader()",
    "listed": "batched(n)",
    "load_state_dict": "loader(), which has load_state_dict(state)",
    "make_initializable_iterator": "for sample in ds",
    "map_dict": "map(fn), or decode(name=fn)",
    "merge": "join(other, on='name')",
    "merge_columns": "map(fn)",
    "mix": _MIX,
    "name": _RAY_TRAIN,
    "num_blocks": "explain()",
    "num_columns": "schema()",
    "num_rows": "len(ds), or count()",
    "options": "on('local', cpus=...)",
    "padded_batch": "batched(n, collate=ps.pad())",
    "parallel_interleave": _MIX,
    "pipe": _MAP,
    "prefetch": _NOT_NEEDED,
    "push_to_hub": "to_huggingface().push_to_hub(name)",
    "query": "filter(ps.col('name') == value), or sql(...)",
    "ragged_batch": "batched(n)",
    "random_sample": "shuffle().limit(n)",
    "random_shuffle": _SHUFFLE,
    "random_split": "train_test_split(test_size=0.2)",
    "randomize_block_order": _SHUFFLE,
    "rebatch": "batched(n)",
    "rebatched": "batched(n)",
    "reduce": "groupby('name').sum('x'), or a for loop",
    "remove_columns": "drop('name')",
    "rename_column": "rename(new='old')",
    "rename_columns": "rename(new='old')",
    "repartition": _NOT_NEEDED,
    "repeated": "repeat(n)",
    "rsample": "filter(fn)",
    "sample": "shuffle().limit(n)",
    "sample_from_datasets": _MIX,
    "save_to_disk": "write_parquet(folder), or materialize(folder)",
    "scan": "map(fn)",
    "select_columns": "select('name')",
    "set_epoch": "epoch(k), or loader(epoch=k)",
    "set_format": _LOADER,
    "set_name": _RAY_TRAIN,
    "set_transform": _MAP,
    "shuffle_batch": _SHUFFLE,
    "shuffled": _SHUFFLE,
    "slice": "skip(a).limit(b - a)",
    "snapshot": "materialize(folder)",
    "sort_values": "sort('name')",
    "split_at_indices": "limit(n) and skip(n)",
    "split_proportionately": "train_test_split(test_size=0.2)",
    "state_dict": "loader(), whose state_dict() says what has been delivered",
    "tail": "skip(len(ds) - n)",
    "take_while": "filter(fn), or limit(n)",
    "to_csv": "write_csv(url)",
    "to_dict": "to_arrow().to_pydict()",
    "to_iter_dataset": "loader()",
    "to_json": "write_json(url)",
    "to_list": "take_all()",
    "to_numpy": "iter_batches()",
    "to_parquet": "write_parquet(url)",
    "to_tf": "iter_batches()",
    "to_webdataset": "write_tar(url)",
    "train_test": "train_test_split(test_size=0.2)",
    "unbatch": "unbatched()",
    "window": "batched(n)",
    "with_column": _COLUMNS,
    "with_epoch": "limit(n)",
    "with_format": _LOADER,
    "with_length": "len(ds), which is known with an index",
    "with_options": "on('local', cpus=...)",
    "with_split": "shard(rank, world), or loader()",
    "with_transform": _MAP,
    "write_images": "write_tar(url)",
    "write_webdataset": "write_tar(url)",
    "xdecode": "decode(name=...)",
}

# Functions and classes of the same libraries, as names of the package.
FUNCTIONS: dict[str, str] = {
    "DataLoader": "ds.loader(), or torch.utils.data.DataLoader(ds, batch_size=None)",
    "DataPipeline": _COMPAT,
    "IterDataset": "ps.read_tar(urls)",
    "LocalDataset": "ps.read_tar(urls)",
    "MDSWriter": "ps.pack(source, folder), or ps.TarWriter",
    "MapDataset": "ps.from_torch(dataset)",
    "MixtureDataset": _MIX,
    "ShardWriter": "ps.TarWriter, or ds.write_tar(url)",
    "StreamingDataLoader": "ds.loader()",
    "StreamingDataset": "ps.read_tar(urls), with cache=ps.Cache(folder)",
    "TFRecordDataset": "ps.read_tfrecords(urls)",
    "WebDataset": f"{_COMPAT}, or ps.read_tar(urls)",
    "WebLoader": f"{_COMPAT}, or ds.loader()",
    "concat": "a.union(b)",
    "concatenate": "a.union(b)",
    "concatenate_datasets": "a.union(b)",
    "from_dataframe": _PANDAS,
    "from_dict": "ps.from_arrow(pyarrow.table(columns))",
    "from_generator": "ps.from_items(list(generator))",
    "from_list": "ps.from_items([...])",
    "from_numpy": "ps.from_arrow(pyarrow.table(columns))",
    "from_pandas": _PANDAS,
    "from_polars": "ps.from_arrow(frame.to_arrow())",
    "from_tensor_slices": "ps.from_items([...])",
    "from_tf": "ps.read_tfrecords(urls), or ps.from_items([...])",
    "imagefolder": "ps.read_images(folder, labels='folder')",
    "interleave_datasets": _MIX,
    "list_files": "ps.read_files(pattern)",
    "load_dataset": "ps.from_huggingface(datasets.load_dataset(...))",
    "load_from_disk": "ps.from_huggingface(datasets.load_from_disk(...))",
    "optimize": "ps.pack(source, folder)",
    "range": "ps.from_items(range(n))",
    "read_binary_files": "ps.read_files(urls)",
    "read_feather": "ps.read_arrow(urls)",
    "read_numpy": "ps.read_files(urls), then decode or map",
    "read_table": "ps.read_parquet(urls)",
    "read_webdataset": "ps.read_tar(urls)",
    "sample_from_datasets": _MIX,
    "scan_parquet": "ps.read_parquet(urls)",
    "text_dataset_from_directory": "ps.read_text(urls)",
    "image_dataset_from_directory": "ps.read_images(folder, labels='folder')",
}

# Keyword arguments of the same libraries, by our method.
_ARGUMENTS: dict[str, dict[str, str]] = {
    "map": {
        "batched": "map_batches(fn)",
        "batch_size": "map_batches(fn, batch_size)",
        "num_proc": "workers=n, on='processes'",
        "num_parallel_calls": "workers=n",
        "remove_columns": "drop('name') after it, or return a sample without them",
        "input_columns": "leave it out: fn gets the whole sample",
        "with_indices": "leave it out: the sample has its name in __key__",
        "deterministic": "on('local', ordered=False)",
    },
    "map_batches": {
        "batch_format": "leave it out: fn gets arrays and lists",
        "zero_copy_batch": "leave it out: arrays are views where they can be",
    },
    "shuffle": {
        "buffer_size": "window=n, or all=True for a permutation of everything",
        "bufsize": "window=n, or all=True for a permutation of everything",
        "initial": "leave it out: the order is a permutation of integers and needs no buffer",
        "size": "window=n, or all=True for a permutation of everything",
        "generator": "seed=n",
        "rng": "seed=n",
        "reshuffle_each_iteration": "leave it out: every epoch has a different order; epoch(k) fixes it",
    },
    "batched": {
        "drop_remainder": "drop_last=True",
        "collation_fn": "collate=fn",
        "collate_fn": "collate=fn",
        "partial": "drop_last=True for partial=False",
    },
    "split": {"locality_hints": "leave it out: Ray places the workers, and every part is read where it is consumed"},
    "loader": {
        "batch_size": "batched(n).loader()",
        "collate_fn": "batched(n, collate=fn).loader()",
        "drop_last": "batched(n, drop_last=True).loader()",
        "num_workers": "workers=n in the stages that take long, such as map(fn, workers=n)",
        "prefetch_factor": _NOT_NEEDED,
        "sampler": "shuffle(), or filter(fn)",
        "shuffle": "shuffle().loader()",
    },
}


def unknown_method(name: str, known: Iterable[str]) -> str:
    """Return the message about a method that a dataset does not have.

    >>> unknown_method("remove_columns", [])
    "a Dataset has no 'remove_columns'; write drop('name')"
    >>> unknown_method("shufle", ["shuffle"])
    "a Dataset has no 'shufle'; did you mean shuffle?"
    """
    return f"a Dataset has no {name!r}{_advice(name, METHODS, known)}"


def unknown_argument(method: str, name: str, known: Iterable[str], more: Iterable[str] = ()) -> PlanError:
    """Return the error of a keyword argument that a method does not have; ``more`` are names that it also takes."""
    known = list(known)
    advice = _advice(name, _ARGUMENTS.get(method, {}), [*known, *more])
    return PlanError(f"{method} has no argument {name}; it takes {', '.join(known)}{advice}")


def check_arguments(method: str, unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """Check that a method got no keyword argument that it does not have.

    Raises:
        PlanError: There is one; the message says what to write.
    """
    for name in unknown:
        raise unknown_argument(method, name, known)


def _advice(name: str, instead: Mapping[str, str], known: Iterable[str]) -> str:
    if name in instead:
        return f"; {'' if instead[name].startswith('leave it out') else 'write '}{instead[name]}"
    near = get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
