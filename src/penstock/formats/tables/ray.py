"""Ray datasets as a source of samples, and samples as blocks of a Ray dataset.

A Ray dataset is run once, when somebody first asks for its rows; its blocks then lie in Ray's object store, and are
fetched one by one as they are read.
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

from penstock.errors import DataError, EngineError, MissingExtra, StorageError
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.values import SHAPE, is_list, is_number, plain, shape_of, values_of
from penstock.order import I64
from penstock.plan import Fields, Resources, is_tensor

if TYPE_CHECKING:
    import pyarrow as pa

_KEPT = 32  # blocks held at a time, and
_KEPT_BYTES = 512 << 20  # their bytes: what is held here cannot leave the object store


def require_ray(what: str) -> Any:
    """The package ray, with ``ray.data``.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as exc:
        raise MissingExtra(what, "ray") from exc
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        ray.data.DataContext.get_current()  # made when first asked for, with warnings of Ray's about its own defaults
    return ray


def is_ray_dataset(what: Any) -> bool:
    """Whether it is a dataset of Ray's."""
    return type(what).__module__.startswith("ray.data.") and hasattr(what, "iter_internal_ref_bundles")


# -- From Ray


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a Ray dataset that was run: where each is, its rows and its bytes."""

    refs: tuple[Any, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]


class RaySource:
    """A Ray dataset, compared by object; pickled it is its blocks, by reference."""

    __slots__ = ("_blocks", "_dataset", "_lock", "workers")

    random_access = False

    def __init__(self, dataset: Any, workers: Any = None, blocks: Blocks | None = None) -> None:
        """``dataset`` is kept: while it lives, Ray can make blocks anew that a lost node held."""
        self._dataset, self._blocks, self.workers = dataset, blocks, workers
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Only Ray's own pickle knows what a reference needs to be found again.
        pickled = require_ray("from_ray").cloudpickle.dumps(self.blocks())
        return _revived, (pickled, self.workers)

    @property
    def resources(self) -> Resources | None:
        """A pool of its own only if asked for: rows are cut out of blocks, not made."""
        return None if self.workers is None else Resources(self.workers)

    def blocks(self) -> Blocks:
        """The blocks, of a run of the dataset if there was none yet."""
        with self._lock:
            if self._blocks is None:
                self._dataset = self._dataset.materialize()
                self._blocks = _blocks_of(self._dataset)
            return self._blocks

    def open(self) -> RayReader:
        """Run the dataset.

        Raises:
            MissingExtra: ray is not installed.
        """
        require_ray("from_ray")
        return RayReader(self.blocks())

    def describe(self) -> str:
        """The call that made it."""
        known = self._blocks
        rows = "" if known is None else f"{sum(known.counts)} rows in {len(known.counts)} blocks"
        return f"from_ray({rows or type(self._dataset).__name__})"


def _revived(pickled: bytes, workers: Any) -> RaySource:
    return RaySource(None, workers, require_ray("from_ray").cloudpickle.loads(pickled))


def _blocks_of(materialized: Any) -> Blocks:
    found = []
    for bundle in materialized.iter_internal_ref_bundles():
        for ref, meta in zip(bundle.block_refs, bundle.metadata, strict=True):
            if meta.num_rows:
                found.append((ref, int(meta.num_rows), int(meta.size_bytes or 0)))
    refs, counts, sizes = zip(*found, strict=True) if found else ((), (), ())
    return Blocks(refs, counts, sizes)


class RayReader:
    """Shards that are blocks: a row is a sample; tensors are numpy arrays."""

    def __init__(self, blocks: Blocks) -> None:
        self.names = [f"block-{number:06d}" for number in range(len(blocks.refs))]
        self._blocks = blocks
        self._each: I64 = np.array(blocks.sizes, np.int64) // np.maximum(1, np.array(blocks.counts, np.int64))
        self._kept: OrderedDict[int, _Rows] = OrderedDict()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def counts(self, scan: bool) -> I64 | None:
        """The rows of each block."""
        return np.array(self._blocks.counts, np.int64)

    def count(self, shard: int) -> int:
        """The rows of one block."""
        return self._blocks.counts[shard]

    def sizes(self) -> list[int]:
        """The bytes of each block."""
        return list(self._blocks.sizes)

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedRayRows:
        """Remember which."""
        return LocatedRayRows(self, shard, index, fields, self._each[shard])

    def key(self, shard: int, index: int) -> str | None:
        """The row."""
        return f"row {index}"

    def url(self, shard: int) -> str:
        """The block."""
        return f"ray:{self.names[shard]}"

    def rows(self, shard: int) -> _Rows:
        """A block, from the object store.

        Raises:
            EngineError: this process was forked from one that speaks to Ray.
            StorageError: the block is lost.
        """
        with self._lock:
            if shard in self._kept:
                self._kept.move_to_end(shard)
                return self._kept[shard]
        found = _Rows(self._fetched(shard), self._blocks.sizes[shard])
        with self._lock:
            self._kept[shard] = found
            while len(self._kept) > 1 and (len(self._kept) > _KEPT or self._held() > _KEPT_BYTES):
                self._kept.popitem(last=False)
        return found

    def _held(self) -> int:
        return sum(rows.nbytes for rows in self._kept.values())

    def _fetched(self, shard: int) -> pa.Table:
        if os.getpid() != self._pid:
            raise EngineError(
                "a forked process cannot speak to Ray, as a DataLoader's workers would have to: use num_workers=0, or "
                "multiprocessing_context='spawn' with ray.init(address=...) in the worker"
            )
        ray = require_ray("from_ray")
        try:
            block = ray.get(self._blocks.refs[shard])
        except ray.exceptions.RayError as exc:
            text = (str(exc).splitlines() or [type(exc).__name__])[0]
            raise StorageError(f"Ray does not give back a block: {text}", self.url(shard)) from exc
        from ray.data.block import BlockAccessor

        return BlockAccessor.for_block(block).to_arrow()


class _Rows:
    """The rows of one block: columns that Arrow knows, and those that only Ray does, as arrays."""

    def __init__(self, table: pa.Table, nbytes: int) -> None:
        import pyarrow as pa
        from ray.data.block import BlockAccessor

        self.nbytes = nbytes
        self.names = table.schema.names
        self.special: dict[str, Any] = {}
        fields, arrays = [], []
        for own in table.schema:
            if not isinstance(own.type, pa.BaseExtensionType):
                array = table.column(own.name).combine_chunks()
                made = plain(array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array)
                fields.append(own.with_type(made.type))
            else:
                values = BlockAccessor.for_block(table.select([own.name])).to_numpy([own.name])[own.name]
                if values.dtype == object:
                    self.special[own.name] = values
                    continue
                made = _flat(values)
                fields.append(pa.field(own.name, made.type, metadata={SHAPE: json.dumps(values.shape[1:]).encode()}))
            arrays.append(made)
        self.batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)) if arrays else None

    def at(self, index: I64, wanted: Sequence[str]) -> Sequence[Any]:
        """Some rows: as columns, or as dicts where a value is nothing Arrow knows."""
        known = {name: name for name in self.names if name in wanted and name not in self.special}
        columns: Sequence[Any] = [{} for _ in index]
        if self.batch is not None:
            columns = ArrowColumns([self.batch], index, None, known, self.nbytes / max(1, self.batch.num_rows))
        special = {name: values for name, values in self.special.items() if name in wanted}
        if not special:
            return columns
        names = [name for name in self.names if name in wanted]
        return [
            {name: _own(special[name][number]) if name in special else row[name] for name in names}
            for number, row in zip(index.tolist(), columns, strict=True)
        ]


def _own(value: Any) -> Any:
    """The value, the caller's own: what lies in the object store cannot be written to."""
    return np.array(value) if isinstance(value, np.ndarray) and not value.flags.writeable else value


def _flat(values: Any) -> pa.Array:
    """Arrays of one shape, as lists of so many numbers; not copied."""
    import pyarrow as pa

    size = int(np.prod(values.shape[1:]))
    if not size:
        return pa.array([[]] * len(values), pa.list_(pa.from_numpy_dtype(values.dtype)))
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), size)


@dataclass(slots=True)
class LocatedRayRows:
    """Rows that will be cut out of their blocks."""

    reader: RayReader
    shard: I64
    index: I64
    fields: Fields
    nbytes: I64

    def take(self, sel: Any) -> LocatedRayRows:
        """Some of them."""
        return LocatedRayRows(self.reader, self.shard[sel], self.index[sel], self.fields, self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        """The rows: as columns where they lie in one block."""
        parts = []
        for shard in np.unique(self.shard).tolist():
            at = np.flatnonzero(self.shard == shard)
            rows = self.reader.rows(shard)
            parts.append((at, rows.at(self.index[at], [name for name in rows.names if self.fields.wants(name)])))
        if len(parts) == 1:
            return parts[0][1], {}
        out: list[Any] = [None] * len(self.index)
        for at, found in parts:
            for place, row in zip(at.tolist(), found, strict=True):
                out[place] = row
        return out, {}


# -- To Ray


class BlockMaker:
    """Makes blocks of a Ray dataset: a column for each field, arrays and pictures as tensors.

    Arrays of one field may differ in shape, but not in type or number of dimensions: Ray would change them. Samples
    that lack a field have nothing there. A tuple's fields are ``"0"``, ``"1"`` and so on, of anything else there is
    the field ``"item"``. What no column can hold is pickled by Ray.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[Any, int]] = {}  # type and dimensions of the arrays of each field

    def block(self, items: Sequence[Any]) -> Any:
        """A block of these samples.

        Raises:
            DataError: a field has arrays of several types or numbers of dimensions.
        """
        from ray.data.block import BlockAccessor

        made = self._of_columns(items) if isinstance(items, ArrowColumns) else self._of_samples(items)
        return BlockAccessor.batch_to_block(made)

    def _of_columns(self, items: ArrowColumns) -> dict[str, Any]:
        """The columns as they are; lists of numbers as tensors."""
        batch = items.batch()
        out: dict[str, Any] = {}
        for own, array in zip(batch.schema, batch.columns, strict=True):
            lists = is_list(own.type) and is_number(own.type.value_type)
            out[own.name] = self._column(own.name, values_of(array, shape_of(own)), ()) if lists else array
        return out

    def _of_samples(self, items: Sequence[Any]) -> dict[str, Any]:
        samples = [_fields(item) for item in items]
        names = dict.fromkeys(str(name) for sample in samples for name in sample)
        return {name: self._column(name, [_value(one.get(name)) for one in samples], samples) for name in names}

    def _column(self, name: str, values: list[Any], samples: Sequence[dict[str, Any]]) -> Any:
        """Arrays of one shape stacked, others side by side; what is no array as a list."""
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        if not arrays or len(arrays) < len(values):
            return values
        kind = self._kinds.setdefault(name, (arrays[0].dtype, arrays[0].ndim))
        for number, array in enumerate(arrays):
            if (array.dtype, array.ndim) != kind:
                raise _mixed(name, kind, (array.dtype, array.ndim), samples[number] if samples else {})
        if len({array.shape for array in arrays}) == 1:
            return np.stack(arrays)
        column = np.empty(len(arrays), object)
        for place, array in enumerate(arrays):  # one by one: numpy would look into arrays that begin alike
            column[place] = array
        return column


def _mixed(name: str, kind: tuple[Any, int], other: tuple[Any, int], sample: dict[str, Any]) -> DataError:
    words = [f"{dtype} of {ndim} dimensions" for dtype, ndim in (kind, other)]
    problem = f"field {name!r} is an array of {words[0]} in one sample and of {words[1]} in this one; a Ray column "
    advice = 'holds one kind: make them one in map(), as decode("rgb8") does with pictures, or filter() them'
    return DataError(problem + advice, sample.get("__url__"), sample.get("__key__"))


def _fields(item: Any) -> dict[str, Any]:
    if isinstance(item, dict):
        return item
    return {str(place): value for place, value in enumerate(item)} if isinstance(item, tuple) else {"item": item}


def _value(value: Any) -> Any:
    """Tensors and pictures as arrays."""
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    elif type(value).__module__.startswith("PIL."):
        value = np.asarray(value)
    return value[()] if isinstance(value, np.ndarray) and not value.ndim else value
