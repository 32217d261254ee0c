"""Samples as Arrow tables, and Arrow tables as pandas and polars data frames."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from penstock.codecs import encode
from penstock.codecs.feature_codecs import stored
from penstock.codecs.features import Feature, arrow_type
from penstock.errors import DataError, MissingExtra, import_extra
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.source import require_arrow
from penstock.formats.tables.values import SHAPE
from penstock.plan import is_tensor

if TYPE_CHECKING:
    import pyarrow as pa


def table_from(items: Sequence[Any], features: Mapping[str, Feature] | None = None) -> pa.Table:
    """Return samples as a table with a column for each field; samples that are columns are not copied.

    A field with a feature is stored as the feature says. Arrays become lists of their numbers; arrays of more than one
    dimension keep their shape in the field's metadata. Tensors are stored as arrays, PIL images as the bytes of a file.

    Raises:
        DataError: A sample is not a dict, or the values of a field do not fit into one column.
    """
    import pyarrow as pa

    if isinstance(items, ArrowColumns):
        return pa.Table.from_batches([items.batch()])
    names: dict[str, None] = {}
    for item in items:
        if not isinstance(item, dict):
            raise DataError(f"a table needs samples with fields, not {type(item).__name__}")
        names.update(dict.fromkeys(map(str, item)))
    declared = features or {}
    columns = [_column(name, [item.get(name) for item in items], declared.get(name)) for name in names]
    return pa.Table.from_arrays([array for _, array in columns], schema=pa.schema([field for field, _ in columns]))


def _column(name: str, given: list[Any], feature: Feature | None) -> tuple[pa.Field, pa.Array]:
    import pyarrow as pa

    try:
        if feature is not None:
            array = pa.array([stored(feature, value) for value in given], arrow_type(feature))
            return pa.field(name, array.type), array
        values: Any = [_storable(name, value) for value in given]
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        if arrays and all(value is None or isinstance(value, np.ndarray) for value in values):
            return _array_column(name, values, arrays)
        times = [value for value in values if isinstance(value, np.datetime64 | np.timedelta64)]
        if times and len(times) == sum(value is not None for value in values):
            missing = type(times[0])("NaT")
            values = np.array([missing if value is None else value for value in values])
        array = array_from(values)
        return pa.field(name, array.type), array
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
        if isinstance(exc, DataError):
            raise
        raise DataError(f"field {name!r} cannot be a column: {str(exc).splitlines()[0]}") from exc


def array_from(values: Any) -> pa.Array:
    """Return values as an Arrow array; integers are unsigned if there are some from 2**63 on."""
    import pyarrow as pa

    try:
        return pa.array(values)
    except OverflowError:
        return pa.array(values, pa.uint64())


def _storable(name: str, value: Any) -> Any:
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value if value.ndim else value[()]
    if type(value).__module__.startswith("PIL."):
        try:
            return encode(name, value)
        except TypeError:  # the field is not named after an image format
            return encode("png", value)
    return value


def _array_column(name: str, values: list[Any], arrays: list[Any]) -> tuple[pa.Field, pa.Array]:
    """Return a column of lists; ``arrays`` are the values that are not ``None``."""
    import pyarrow as pa

    dtypes, shapes = {str(array.dtype) for array in arrays}, {array.shape for array in arrays}
    if len(dtypes) > 1 and dtypes != {"int64", "float64"}:
        raise DataError(f"field {name!r} has arrays of {' and '.join(sorted(dtypes))}; convert them to one type")
    dimensions = {len(shape) for shape in shapes}
    if dimensions != {1} and len({shape[1:] for shape in shapes}) > 1:
        some = " and ".join(map(str, sorted(shapes)[:2]))
        raise DataError(f"field {name!r} has arrays of shapes {some}; pad them, flatten them, or encode them to bytes")
    ends = np.cumsum([0, *(0 if value is None else value.size for value in values)])
    numbers = pa.array(np.concatenate([array.reshape(-1) for array in arrays]))
    nulls = pa.array([value is None for value in values]) if len(arrays) < len(values) else None
    small = int(ends[-1]) < 1 << 31
    list_array = pa.ListArray if small else pa.LargeListArray
    offsets = pa.array(ends.astype(np.int32 if small else np.int64))
    lists = list_array.from_arrays(offsets, numbers, mask=nulls)
    shape = shapes.pop()
    if math.prod(shape[1:]):
        shape = (-1, *shape[1:])  # the first length may differ between rows
    metadata = {SHAPE: json.dumps(shape).encode()} if dimensions != {1} else None
    return pa.field(name, lists.type, metadata=metadata), lists


@dataclass(frozen=True, slots=True)
class ArrowBatch:
    """A collate function that turns a batch into a ``pyarrow.Table`` or a ``pandas.DataFrame``."""

    kind: Literal["arrow", "pandas"] = "arrow"

    columnar: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_arrow(f'format="{self.kind}"')

    def __call__(self, items: Sequence[Any]) -> Any:
        table = table_from(items)
        return table if self.kind == "arrow" else pandas_frame(table)


def pandas_frame(table: pa.Table) -> Any:
    """Return the table as a pandas data frame.

    Raises:
        MissingExtra: pandas is not installed.
    """
    try:
        return table.to_pandas()
    except ImportError as exc:
        raise MissingExtra("pandas frames", "pandas") from exc


def polars_frame(table: pa.Table) -> Any:
    """Return the table as a polars data frame.

    Raises:
        MissingExtra: polars is not installed.
    """
    return import_extra("polars", "polars frames", "polars").from_arrow(table)


def joined_table(runs: Iterable[Sequence[Any]]) -> pa.Table:
    """Return one table of the samples of all runs.

    Raises:
        DataError: A sample is not a dict, or the values of a field do not fit into one column.
        MissingExtra: pyarrow is not installed.
    """
    require_arrow("to_arrow")
    import pyarrow as pa

    tables, empty = [], pa.table({})
    for run in runs:
        if len(run):
            tables.append(table_from(run))
        elif isinstance(run, ArrowColumns):
            empty = table_from(run)
    return concatenated(tables) if tables else empty


def concatenated(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all tables, with columns of types that hold the values of each.

    Raises:
        DataError: The tables do not have the same columns.
    """
    import pyarrow as pa

    large = {column.name for table in tables for column in table.schema if pa.types.is_uint64(column.type)}
    try:
        tables = [_with_unsigned(table, large) for table in tables] if large else tables
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowException, TypeError) as exc:
        raise DataError(f"samples do not have the same columns: {str(exc).splitlines()[0]}") from exc


def _with_unsigned(table: pa.Table, names: set[str]) -> pa.Table:
    """Return the table with those of these columns that are signed integers as unsigned integers of 64 bits."""
    import pyarrow as pa

    kinds = [pa.uint64() if f.name in names and pa.types.is_int64(f.type) else f.type for f in table.schema]
    fields = [field.with_type(kind) for field, kind in zip(table.schema, kinds, strict=True)]
    return table.cast(pa.schema(fields, metadata=table.schema.metadata))
