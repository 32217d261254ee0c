"""Arrow arrays as Python values: one value per row, or one numpy array for all rows.

Numbers become ``int``, ``float`` and ``bool``, text ``str``, binary ``bytes`` and nulls ``None``. Lists of numbers
become numpy arrays of the stored type, other lists stay lists; structs and maps become dicts. Timestamps, dates and
durations become ``numpy.datetime64`` and ``timedelta64`` in the stored unit and in UTC: the time zone is dropped.
Everything else is what pyarrow converts it to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.order import I64
from penstock.plan import column

if TYPE_CHECKING:
    import pyarrow as pa

SHAPE = b"penstock.shape"  # key in a field's metadata: the shape of arrays that are stored as flat lists


def shape_of(field: pa.Field) -> tuple[int, ...] | None:
    """Return the shape of the arrays in a column, or ``None`` if its metadata has no valid shape."""
    encoded = (field.metadata or {}).get(SHAPE)
    try:
        shape = None if encoded is None else tuple(int(side) for side in json.loads(encoded))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return None if shape is None or any(side < 0 for side in shape[1:]) else shape


def plain(array: pa.Array) -> pa.Array:
    """Return the same values without storage details: dictionaries, views and extension types are resolved."""
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
    """Return the type that ``plain`` gives an array of this type."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def castable(source: pa.DataType, target: pa.DataType) -> bool:
    """Return whether the two types hold the same values in different storage; a null type casts to every type."""
    import pyarrow as pa

    types = pa.types
    text, binary = (types.is_string, types.is_large_string), (types.is_binary, types.is_large_binary)
    for family in (text, binary):
        if all(any(is_member(kind) for is_member in family) for kind in (source, target)):
            return True
    if is_list(source) and is_list(target):
        return bool(source.value_type == target.value_type) or castable(source.value_type, target.value_type)
    return bool(types.is_null(source))


def cast_like(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with each column cast to the plain type of the column of the same name in ``schema``."""
    import pyarrow as pa

    fields = [schema.field(name) for name in batch.schema.names]
    kinds = [plain_type(field.type) for field in fields]
    if all(field.type == kind for field, kind in zip(batch.schema, kinds, strict=True)):
        return batch
    arrays = [array.cast(kind) for array, kind in zip(batch.columns, kinds, strict=True)]
    cast_fields = [field.with_type(kind) for field, kind in zip(fields, kinds, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(cast_fields, metadata=batch.schema.metadata))


def values_of(array: pa.Array, shape: Sequence[int] | None = None) -> list[Any]:
    """Return one Python value per row; numpy arrays are copies that the caller may change."""
    import pyarrow as pa

    array, types = plain(array), pa.types
    kind = array.type
    if types.is_temporal(kind) and not types.is_time(kind) and kind != pa.month_day_nano_interval():
        return _with_nulls(list(array.to_numpy(zero_copy_only=False)), array)
    if types.is_map(kind):
        return _with_nulls(_maps(array), array)
    if is_list(kind):
        return _lists(array, shape)
    if types.is_struct(kind):
        columns = [values_of(child) for child in array.flatten()]
        names = [kind.field(i).name for i in range(kind.num_fields)]
        rows = zip(*columns, strict=True) if columns else [()] * len(array)
        return _with_nulls([dict(zip(names, row, strict=True)) for row in rows], array)
    return array.to_pylist()  # type: ignore[no-any-return]


def column_of(array: pa.Array, shape: Sequence[int] | None = None) -> Any:
    """Return what collating the values gives; numbers are a read-only view of the table where possible."""
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
    """Return whether the type is an integer, floating-point or boolean type, which numpy has too."""
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether the type is a list type; a map is not."""
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _with_nulls(values: list[Any], array: pa.Array) -> list[Any]:
    if not array.null_count:
        return values
    validity = array.is_valid().to_numpy(zero_copy_only=False).tolist()
    return [value if valid else None for value, valid in zip(values, validity, strict=True)]


def _flatten(array: pa.Array) -> tuple[pa.Array, I64]:
    """Return the elements of all lists in one array, and the offset of each list in it, with the end as the last."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        elements = array.values.slice(array.offset * size, len(array) * size)
        return elements, np.arange(len(array) + 1, dtype=np.int64) * size
    offsets = array.offsets.to_numpy().astype(np.int64)
    return array.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets - offsets[0]


def _lists(array: pa.Array, shape: Sequence[int] | None) -> list[Any]:
    elements, found = _flatten(array)
    offsets = found.tolist()
    if not is_number(elements.type):
        values = values_of(elements)
        return _with_nulls([values[low:high] for low, high in pairwise(offsets)], array)
    if elements.null_count:  # a list with a null in it cannot be a numpy array of its type
        return [_single_list(array.slice(i, 1), shape) for i in range(len(array))]
    numbers = np.array(elements.to_numpy(zero_copy_only=False))
    rows = [numbers[low:high] for low, high in pairwise(offsets)]
    if shape is not None and all(_fits(row.size, shape) for row in rows):
        rows = [row.reshape(shape) for row in rows]
    return _with_nulls(rows, array)


def _fits(size: int, shape: Sequence[int]) -> bool:
    """Return whether an array of ``size`` elements has the shape; -1 stands for any first length."""
    row = math.prod(shape[1:])
    return (row > 0 and size % row == 0) if shape[:1] == (-1,) else size == math.prod(shape)


def _single_list(array: pa.Array, shape: Sequence[int] | None) -> Any:
    """Convert an array of one row."""
    if array.null_count:
        return None
    elements, _ = _flatten(array)
    return elements.to_pylist() if elements.null_count else _lists(array, shape)[0]


def _stacked(array: pa.Array, shape: Sequence[int] | None) -> Any:
    """Return lists of numbers stacked into one array, or ``None`` if their lengths differ or numbers are missing."""
    elements, offsets = _flatten(array)
    size = int(offsets[1])
    if not is_number(elements.type) or elements.null_count or not bool((np.diff(offsets) == size).all()):
        return None
    row_shape = shape if shape is not None and _fits(size, shape) else (size,)
    if -1 in row_shape:
        row_shape = np.empty(size, np.bool_).reshape(row_shape).shape
    return elements.to_numpy(zero_copy_only=False).reshape(len(array), *row_shape)


def _maps(array: pa.Array) -> list[Any]:
    offsets = array.offsets.to_numpy()
    span = slice(offsets[0], offsets[-1])
    keys, items = values_of(array.keys[span]), values_of(array.items[span])
    bounds = pairwise((offsets - offsets[0]).tolist())
    return [dict(zip(keys[low:high], items[low:high], strict=True)) for low, high in bounds]
