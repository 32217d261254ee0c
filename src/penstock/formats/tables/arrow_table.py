"""Samples as Arrow tables: columns as they are, rows by what their values are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from penstock.codecs import encode
from penstock.codecs.feature_codecs import stored
from penstock.codecs.features import Feature, arrow_type
from penstock.errors import DataError, MissingExtra
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.source import require_arrow
from penstock.formats.tables.values import SHAPE
from penstock.plan import is_tensor

if TYPE_CHECKING:
    import pyarrow as pa


def table_from(items: Sequence[Any], features: Mapping[str, Feature] | None = None) -> pa.Table:
    """A table of samples: columns where they are columns already, else a column for each field.

    A field with a feature is stored as that says. Arrays are lists of their numbers; those of more than one dimension
    keep their shape in the field's metadata. Tensors are arrays, images the bytes of a file.

    Raises:
        DataError: samples are no dicts, or a field has values that do not go together.
    """
    import pyarrow as pa

    if isinstance(items, ArrowColumns):
        return pa.Table.from_batches([items.batch()])
    names: dict[str, None] = {}
    for item in items:
        if not isinstance(item, dict):
            raise DataError(f"a table has samples with fields, not {type(item).__name__}")
        names.update(dict.fromkeys(map(str, item)))
    known = features or {}
    columns = [_column(name, [item.get(name) for item in items], known.get(name)) for name in names]
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
            return _arrays(name, values, arrays)
        moments = [value for value in values if isinstance(value, np.datetime64 | np.timedelta64)]
        if moments and len(moments) == sum(value is not None for value in values):
            missing = type(moments[0])("NaT")
            values = np.array([missing if value is None else value for value in values])
        array = pa.array(values)
        return pa.field(name, array.type), array
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
        if isinstance(exc, DataError):
            raise
        raise DataError(f"field {name!r} cannot be a column: {str(exc).splitlines()[0]}") from exc


def _storable(name: str, value: Any) -> Any:
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value if value.ndim else value[()]
    if type(value).__module__.startswith("PIL."):
        try:
            return encode(name, value)
        except TypeError:  # the name tells no format
            return encode("png", value)
    return value


def _arrays(name: str, values: list[Any], arrays: list[Any]) -> tuple[pa.Field, pa.Array]:
    """Arrays of one type as lists."""
    import pyarrow as pa

    kinds, shapes = {str(array.dtype) for array in arrays}, {array.shape for array in arrays}
    if len(kinds) > 1 and kinds != {"int64", "float64"}:
        raise DataError(f"field {name!r} has arrays of {' and '.join(sorted(kinds))}; make them one type")
    sides = {len(shape) for shape in shapes}
    if sides != {1} and len(shapes) > 1:
        some = " and ".join(map(str, sorted(shapes)[:2]))
        raise DataError(f"field {name!r} has arrays of shapes {some}; pad them, flatten them, or encode them to bytes")
    edges = np.cumsum([0, *(0 if value is None else value.size for value in values)])
    numbers = pa.array(np.concatenate([array.reshape(-1) for array in arrays]))
    nulls = pa.array([value is None for value in values]) if len(arrays) < len(values) else None
    small = int(edges[-1]) < 1 << 31
    kind = pa.ListArray if small else pa.LargeListArray
    offsets = pa.array(edges.astype(np.int32 if small else np.int64))
    made = kind.from_arrays(offsets, numbers, mask=nulls)
    shape = {SHAPE: json.dumps(shapes.pop()).encode()} if sides != {1} else None
    return pa.field(name, made.type, metadata=shape), made


@dataclass(frozen=True, slots=True)
class ArrowBatch:
    """A collate function that makes a ``pyarrow.Table``, or a ``pandas.DataFrame``, of neighbours."""

    kind: Literal["arrow", "pandas"] = "arrow"

    columnar: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_arrow(f'format="{self.kind}"')

    def __call__(self, items: Sequence[Any]) -> Any:
        """Join ``items``."""
        table = table_from(items)
        return table if self.kind == "arrow" else frame(table)


def frame(table: pa.Table) -> Any:
    """The table as pandas has it.

    Raises:
        MissingExtra: pandas is not installed.
    """
    try:
        return table.to_pandas()
    except ImportError as exc:
        raise MissingExtra("pandas", "tables") from exc


def polars_frame(table: pa.Table) -> Any:
    """The table as polars has it.

    Raises:
        MissingExtra: polars is not installed.
    """
    try:
        import polars
    except ImportError as exc:
        raise MissingExtra("polars", "tables") from exc
    return polars.from_arrow(table)


def joined_table(runs: Iterable[Sequence[Any]]) -> pa.Table:
    """One table of all samples.

    Raises:
        DataError: they do not have the same fields, or values that do not go together.
        MissingExtra: pyarrow is not installed.
    """
    require_arrow("to_arrow")
    import pyarrow as pa

    tables, bare = [], pa.table({})
    for run in runs:
        if len(run):
            tables.append(table_from(run))
        elif isinstance(run, ArrowColumns):
            bare = table_from(run)
    try:
        return pa.concat_tables(tables, promote_options="permissive") if tables else bare
    except (pa.ArrowException, TypeError) as exc:
        raise DataError(f"samples do not have the same columns: {str(exc).splitlines()[0]}") from exc
