"""Arrow arrays as values: one a row, or one array of all rows.

Numbers are ``int``, ``float`` and ``bool``, text is ``str``, binary is ``bytes``, a missing value is ``None``. Lists of
numbers are numpy arrays of the stored type, other lists are lists; structs and maps are dicts. Points in time, dates
and durations are ``numpy.datetime64`` and ``timedelta64`` in the stored unit (a time zone is kept by nobody: they are
UTC). Everything else is what pyarrow makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.order import I64
from penstock.plan import column

if TYPE_CHECKING:
    import pyarrow as pa

SHAPE = b"penstock.shape"  # in a field's metadata: the shape of arrays that are stored as flat lists


def shape_of(field: pa.Field) -> tuple[int, ...] | None:
    """The shape of the arrays in a column, where its metadata tells one."""
    told = (field.metadata or {}).get(SHAPE)
    try:
        return None if told is None else tuple(int(side) for side in json.loads(told))
    except (ValueError, TypeError):
        return None


def plain(array: pa.Array) -> pa.Array:
    """The array without what only says how it is stored: dictionaries, views, extensions."""
    import pyarrow as pa

    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain(array.storage)
    if pa.types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if pa.types.is_binary_view(kind) else array


def plain_type(kind: pa.DataType) -> pa.DataType:
    """What ``plain`` makes of a type."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def castable(here: pa.DataType, there: pa.DataType) -> bool:
    """Whether the two hold the same values, only otherwise stored; no values at all are of every type."""
    import pyarrow as pa

    types = pa.types
    text, binary = (types.is_string, types.is_large_string), (types.is_binary, types.is_large_binary)
    for family in (text, binary):
        if all(any(is_one(kind) for is_one in family) for kind in (here, there)):
            return True
    if is_list(here) and is_list(there):
        return bool(here.value_type == there.value_type) or castable(here.value_type, there.value_type)
    return bool(types.is_null(here))


def cast_like(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with its columns stored as those of the same names in a schema."""
    import pyarrow as pa

    fields = [schema.field(name) for name in batch.schema.names]
    kinds = [plain_type(own.type) for own in fields]
    if all(own.type == kind for own, kind in zip(batch.schema, kinds, strict=True)):
        return batch
    arrays = [array.cast(kind) for array, kind in zip(batch.columns, kinds, strict=True)]
    made = [own.with_type(kind) for own, kind in zip(fields, kinds, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(made, metadata=batch.schema.metadata))


def values_of(array: pa.Array, shape: Sequence[int] | None = None) -> list[Any]:
    """The values, one a row; arrays among them are the caller's own."""
    import pyarrow as pa

    array, types = plain(array), pa.types
    kind = array.type
    if types.is_temporal(kind) and not types.is_time(kind) and kind != pa.month_day_nano_interval():
        return _or_none(list(array.to_numpy(zero_copy_only=False)), array)
    if types.is_map(kind):
        return _or_none(_maps(array), array)
    if is_list(kind):
        return _lists(array, shape)
    if types.is_struct(kind):
        columns = [values_of(part) for part in array.flatten()]
        names = [kind.field(i).name for i in range(kind.num_fields)]
        rows = zip(*columns, strict=True) if columns else [()] * len(array)
        return _or_none([dict(zip(names, row, strict=True)) for row in rows], array)
    return array.to_pylist()  # type: ignore[no-any-return]


def column_of(array: pa.Array, shape: Sequence[int] | None = None) -> Any:
    """What collating the values gives; numbers as a view of the table where they are stored as numbers are."""
    import pyarrow as pa

    array = plain(array)
    kind = array.type
    if not array.null_count and len(array):
        if is_number(kind) or (pa.types.is_temporal(kind) and not pa.types.is_time(kind)):
            return array.to_numpy(zero_copy_only=False)
        if is_list(kind) and (stacked := _stacked(array, shape)) is not None:
            return stacked
    return column(values_of(array, shape))


def is_number(kind: pa.DataType) -> bool:
    """Whether the type is one of numpy's numbers."""
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether a value is a list (a map is not)."""
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _or_none(values: list[Any], array: pa.Array) -> list[Any]:
    if not array.null_count:
        return values
    valid = array.is_valid().to_numpy(zero_copy_only=False).tolist()
    return [value if there else None for value, there in zip(values, valid, strict=True)]


def _spread(array: pa.Array) -> tuple[pa.Array, I64]:
    """The elements of all lists in a row, and where each list begins and ends among them."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        inner = array.values.slice(array.offset * size, len(array) * size)
        return inner, np.arange(len(array) + 1, dtype=np.int64) * size
    edges = array.offsets.to_numpy().astype(np.int64)
    return array.values.slice(edges[0], edges[-1] - edges[0]), edges - edges[0]


def _lists(array: pa.Array, shape: Sequence[int] | None) -> list[Any]:
    inner, found = _spread(array)
    edges = found.tolist()
    if not is_number(inner.type):
        elements = values_of(inner)
        return _or_none([elements[low:high] for low, high in pairwise(edges)], array)
    if inner.null_count:  # of a list with a missing number there is no array
        return [_list(array.slice(i, 1), shape) for i in range(len(array))]
    numbers = np.array(inner.to_numpy(zero_copy_only=False))
    rows = [numbers[low:high] for low, high in pairwise(edges)]
    if shape is not None and all(row.size == np.prod(shape) for row in rows):
        rows = [row.reshape(shape) for row in rows]
    return _or_none(rows, array)


def _list(alone: pa.Array, shape: Sequence[int] | None) -> Any:
    if alone.null_count:
        return None
    inner, _ = _spread(alone)
    return inner.to_pylist() if inner.null_count else _lists(alone, shape)[0]


def _stacked(array: pa.Array, shape: Sequence[int] | None) -> Any:
    """Lists of numbers as one array, a list a row, where all are equally long."""
    inner, edges = _spread(array)
    size = int(edges[1])
    if not is_number(inner.type) or inner.null_count or not bool((np.diff(edges) == size).all()):
        return None
    rows = shape if shape is not None and np.prod(shape) == size else (size,)
    return inner.to_numpy(zero_copy_only=False).reshape(len(array), *rows)


def _maps(array: pa.Array) -> list[Any]:
    edges = array.offsets.to_numpy()
    span = slice(edges[0], edges[-1])
    keys, items = values_of(array.keys[span]), values_of(array.items[span])
    bounds = (edges - edges[0]).tolist()
    pairs = pairwise(bounds)
    return [dict(zip(keys[low:high], items[low:high], strict=True)) for low, high in pairs]
