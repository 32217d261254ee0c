"""Ray datasets as a source of samples, and samples as blocks of a Ray dataset.

A Ray dataset runs once, when its rows are first asked for. Its blocks stay in Ray's object store, and each is fetched
when it is read.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DataError, EngineError, StorageError, import_extra
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.values import SHAPE, is_list, is_number, plain, shape_of, values_of
from penstock.order import I64
from penstock.plan import Fields, Reader, Resources, Source, is_tensor

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_CACHED_BLOCKS = 32
_MAX_CACHED_BYTES = 512 << 20  # cached blocks are views of the object store, which cannot evict them meanwhile


def require_ray(purpose: str) -> Any:
    """Return the package ray, with ``ray.data`` imported.

    Raises:
        MissingExtra: ray is not installed.
    """
    data = import_extra("ray.data", purpose, "ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        data.DataContext.get_current()  # created on first use, with warnings about Ray's own defaults
    return import_extra("ray", purpose, "ray")


def is_ray_dataset(candidate: Any) -> bool:
    """Return whether an object is a Ray dataset; does not import Ray."""
    return type(candidate).__module__.startswith("ray.data.") and hasattr(candidate, "iter_internal_ref_bundles")


# -- From Ray


@dataclass(frozen=True, slots=True)
class RayBlocks:
    """The blocks of a Ray dataset that has run: their references, numbers of rows and sizes in bytes."""

    refs: tuple[Any, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]


class RaySource(Source):
    """A Ray dataset; two sources are equal if they are the same object. Pickles as references to the blocks."""

    __slots__ = ("_blocks", "_dataset", "_lock", "workers")

    def __init__(self, dataset: Any, workers: Any = None, blocks: RayBlocks | None = None) -> None:
        # Referenced even after it has run, so that Ray can rebuild the blocks of a lost node.
        self._dataset, self._blocks, self.workers = dataset, blocks, workers
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Only Ray's own pickle keeps a reference resolvable in another process.
        pickled = require_ray("from_ray").cloudpickle.dumps(self.blocks())
        return _unpickle, (pickled, self.workers)

    @property
    def resources(self) -> Resources | None:
        """A pool only if ``workers`` asks for one: slicing rows out of blocks costs little."""
        return None if self.workers is None else Resources(self.workers)

    def blocks(self) -> RayBlocks:
        """Return the blocks; the first call runs the dataset."""
        with self._lock:
            if self._blocks is None:
                self._dataset = self._dataset.materialize()
                self._blocks = _blocks_of(self._dataset)
            return self._blocks

    def open(self) -> RayReader:
        """Run the dataset, unless it has run.

        Raises:
            MissingExtra: ray is not installed.
        """
        require_ray("from_ray")
        return RayReader(self.blocks())

    def describe(self) -> str:
        blocks = self._blocks
        rows = "" if blocks is None else f"{sum(blocks.counts)} rows in {len(blocks.counts)} blocks"
        return f"from_ray({rows or type(self._dataset).__name__})"


def _unpickle(pickled: bytes, workers: Any) -> RaySource:
    return RaySource(None, workers, require_ray("from_ray").cloudpickle.loads(pickled))


def _blocks_of(materialized: Any) -> RayBlocks:
    found = []
    for bundle in materialized.iter_internal_ref_bundles():
        for ref, metadata in zip(bundle.block_refs, bundle.metadata, strict=True):
            if metadata.num_rows:
                found.append((ref, int(metadata.num_rows), int(metadata.size_bytes or 0)))
    refs, counts, sizes = zip(*found, strict=True) if found else ((), (), ())
    return RayBlocks(refs, counts, sizes)


class RayReader(Reader):
    """Reads blocks as shards: a row is a sample, a tensor a numpy array. Caches the blocks that were read last."""

    def __init__(self, blocks: RayBlocks) -> None:
        self.names = [f"block-{number:06d}" for number in range(len(blocks.refs))]
        self._blocks = blocks
        self._row_bytes: I64 = np.array(blocks.sizes, np.int64) // np.maximum(1, np.array(blocks.counts, np.int64))
        self._cache: OrderedDict[int, _RayRows] = OrderedDict()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def counts(self, scan: bool) -> I64 | None:
        return np.array(self._blocks.counts, np.int64)

    def sizes(self) -> list[int]:
        return list(self._blocks.sizes)

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedRayRows:
        return LocatedRayRows(self, shard, index, fields, self._row_bytes[shard])

    def key(self, shard: int, index: int) -> str | None:
        return f"row {index}"

    def url(self, shard: int) -> str:
        return f"ray:{self.names[shard]}"

    def rows(self, shard: int) -> _RayRows:
        """Return the rows of a block, from the cache or from the object store.

        Raises:
            EngineError: This process was forked from one that is connected to Ray.
            StorageError: The block is lost.
        """
        with self._lock:
            if shard in self._cache:
                self._cache.move_to_end(shard)
                return self._cache[shard]
        rows = _RayRows(self._fetch(shard), self._blocks.sizes[shard])
        with self._lock:
            self._cache[shard] = rows
            while len(self._cache) > 1 and (
                len(self._cache) > _MAX_CACHED_BLOCKS or self._cached_bytes() > _MAX_CACHED_BYTES
            ):
                self._cache.popitem(last=False)
        return rows

    def _cached_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._cache.values())

    def _fetch(self, shard: int) -> pa.Table:
        if os.getpid() != self._pid:
            raise EngineError(
                "a forked process, such as a DataLoader worker, cannot use the Ray connection of its parent: pass "
                "num_workers=0, or multiprocessing_context='spawn' and call ray.init(address=...) in the worker"
            )
        ray = require_ray("from_ray")
        try:
            block = ray.get(self._blocks.refs[shard])
        except ray.exceptions.RayError as exc:
            text = (str(exc).splitlines() or [type(exc).__name__])[0]
            raise StorageError(f"Ray cannot return a block: {text}", self.url(shard)) from exc
        from ray.data.block import BlockAccessor

        return BlockAccessor.for_block(block).to_arrow()


class _RayRows:
    """The rows of one block: an Arrow batch of most columns, and numpy arrays of those with Ray's own types."""

    def __init__(self, table: pa.Table, nbytes: int) -> None:
        import pyarrow as pa
        from ray.data.block import BlockAccessor

        self.nbytes = nbytes
        self.names = table.schema.names
        self.objects: dict[str, Any] = {}  # columns of tensors of different shapes, and of pickled objects
        fields, arrays = [], []
        for field in table.schema:
            if not isinstance(field.type, pa.BaseExtensionType):
                combined = table.column(field.name).combine_chunks()
                array = plain(combined.combine_chunks() if isinstance(combined, pa.ChunkedArray) else combined)
                fields.append(field.with_type(array.type))
            else:
                values = BlockAccessor.for_block(table.select([field.name])).to_numpy([field.name])[field.name]
                if values.dtype == object:
                    self.objects[field.name] = values
                    continue
                array = _as_lists(values)
                shape = json.dumps(values.shape[1:]).encode()
                fields.append(pa.field(field.name, array.type, metadata={SHAPE: shape}))
            arrays.append(array)
        self.batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)) if arrays else None

    def take(self, index: I64, wanted: Sequence[str]) -> Sequence[Any]:
        """Return some rows: as columns, or as dicts if a wanted column is not in the Arrow batch."""
        in_batch = {name: name for name in self.names if name in wanted and name not in self.objects}
        columns: Sequence[Any] = [{} for _ in index]
        if self.batch is not None:
            columns = ArrowColumns([self.batch], index, None, in_batch, self.nbytes / max(1, self.batch.num_rows))
        objects = {name: values for name, values in self.objects.items() if name in wanted}
        if not objects:
            return columns
        names = [name for name in self.names if name in wanted]
        return [
            {name: _writable(objects[name][number]) if name in objects else row[name] for name in names}
            for number, row in zip(index.tolist(), columns, strict=True)
        ]


def _writable(value: Any) -> Any:
    """Copy an array that is a view of the object store, so that the caller may change it."""
    return np.array(value) if isinstance(value, np.ndarray) and not value.flags.writeable else value


def _as_lists(values: Any) -> pa.Array:
    """Return arrays of one shape as lists of one size, without copying contiguous ones."""
    import pyarrow as pa

    size = int(np.prod(values.shape[1:]))
    if not size:
        return pa.array([[]] * len(values), pa.list_(pa.from_numpy_dtype(values.dtype)))
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), size)


@dataclass(slots=True)
class LocatedRayRows:
    """Rows of blocks, not fetched yet."""

    reader: RayReader
    shard: I64
    index: I64
    fields: Fields
    nbytes: I64

    def take(self, sel: Any) -> LocatedRayRows:
        return LocatedRayRows(self.reader, self.shard[sel], self.index[sel], self.fields, self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        """Return the rows: as columns if all are in one block, else as dicts."""
        parts = []
        for shard in np.unique(self.shard).tolist():
            positions = np.flatnonzero(self.shard == shard)
            rows = self.reader.rows(shard)
            wanted = [name for name in rows.names if self.fields.wants(name)]
            parts.append((positions, rows.take(self.index[positions], wanted)))
        if len(parts) == 1:
            return parts[0][1], {}
        out: list[Any] = [None] * len(self.index)
        for positions, found in parts:
            for position, row in zip(positions.tolist(), found, strict=True):
                out[position] = row
        return out, {}


# -- To Ray


class RayBlockBuilder:
    """Builds blocks of a Ray dataset: a column for each field, arrays and images as tensors.

    Arrays of one field may differ in shape, but not in type or number of dimensions: Ray would convert them. A sample
    without a field has a null in its column. The fields of a tuple are named ``"0"``, ``"1"`` and so on; an item that
    is neither dict nor tuple becomes the field ``"item"``. Ray pickles values that fit no column type.
    """

    def __init__(self) -> None:
        self._array_types: dict[str, tuple[Any, int]] = {}  # for each field, dtype and dimensions of its arrays

    def block(self, items: Sequence[Any]) -> Any:
        """Return a block of these samples.

        Raises:
            DataError: A field has arrays of several types or numbers of dimensions.
        """
        from ray.data.block import BlockAccessor

        columns = self._from_columns(items) if isinstance(items, ArrowColumns) else self._from_samples(items)
        return BlockAccessor.batch_to_block(columns)

    def _from_columns(self, items: ArrowColumns) -> dict[str, Any]:
        """Return the Arrow columns unchanged, except for lists of numbers, which become tensors."""
        batch = items.batch()
        out: dict[str, Any] = {}
        for field, array in zip(batch.schema, batch.columns, strict=True):
            numeric = is_list(field.type) and is_number(field.type.value_type)
            out[field.name] = self._column(field.name, values_of(array, shape_of(field)), ()) if numeric else array
        return out

    def _from_samples(self, items: Sequence[Any]) -> dict[str, Any]:
        samples = [_fields(item) for item in items]
        names = dict.fromkeys(str(name) for sample in samples for name in sample)
        return {
            name: self._column(name, [_as_array(sample.get(name)) for sample in samples], samples) for name in names
        }

    def _column(self, name: str, values: list[Any], samples: Sequence[dict[str, Any]]) -> Any:
        """Return arrays of one shape stacked, arrays of different shapes as an array of objects, else the list."""
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        if not arrays or len(arrays) < len(values):
            return values
        expected = self._array_types.setdefault(name, (arrays[0].dtype, arrays[0].ndim))
        for number, array in enumerate(arrays):
            if (array.dtype, array.ndim) != expected:
                raise _mixed_arrays(name, expected, (array.dtype, array.ndim), samples[number] if samples else {})
        if len({array.shape for array in arrays}) == 1:
            return np.stack(arrays)
        column = np.empty(len(arrays), object)
        for number, array in enumerate(arrays):  # numpy would try to stack a list of arrays with equal first sides
            column[number] = array
        return column


def _mixed_arrays(name: str, expected: tuple[Any, int], found: tuple[Any, int], sample: dict[str, Any]) -> DataError:
    kinds = [f"{dtype} of {ndim} dimensions" for dtype, ndim in (expected, found)]
    problem = f"field {name!r} is an array of {kinds[0]} in one sample and of {kinds[1]} in this one; a Ray column "
    advice = 'holds one of these: convert the arrays in map(), as decode("rgb8") does for images, or filter() them'
    return DataError(problem + advice, sample.get("__url__"), sample.get("__key__"))


def _fields(item: Any) -> dict[str, Any]:
    if isinstance(item, dict):
        return item
    return {str(number): value for number, value in enumerate(item)} if isinstance(item, tuple) else {"item": item}


def _as_array(value: Any) -> Any:
    """Convert tensors and PIL images to arrays, and arrays without dimensions to scalars."""
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    elif type(value).__module__.startswith("PIL."):
        value = np.asarray(value)
    return value[()] if isinstance(value, np.ndarray) and not value.ndim else value
