"""How the columns of a Parquet file are stored: compressed, or as they are where that would save nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_SAMPLE = 1 << 20  # bytes of a column that are tried
_EACH = 1 << 18  # of one value
_LARGE = 512  # bytes of a usual value; shorter ones may repeat, which a dictionary makes use of
_WORTH = 0.9  # what compression must leave at most
_PAGE = 1 << 20  # bytes of values that are looked at together: a page is not much larger
_BATCH = 1024  # values, where they are small


@dataclass(frozen=True, slots=True)
class Layout:
    """What Parquet does with each column.

    Attributes:
        compression: How pages are compressed.
        as_is: Paths of the leaves that are not: without compression, dictionary, least and greatest values.
        batch: Rows after which Parquet looks whether a page is full.
    """

    compression: str
    as_is: tuple[str, ...] = ()
    batch: int = _BATCH

    def writer(self, sink: Any, schema: pa.Schema) -> Any:
        """A writer of a file."""
        import pyarrow.parquet as pq

        if not self.as_is:
            return pq.ParquetWriter(sink, schema, compression=self.compression)
        leaves = _paths(schema)
        others = [path for path in leaves if path not in self.as_is]
        ways = {path: self.compression if path in others else "none" for path in leaves}
        return pq.ParquetWriter(
            sink,
            schema,
            compression=ways,
            use_dictionary=others,
            write_statistics=others,
            write_batch_size=self.batch,
        )

    def encoded(self, table: pa.Table) -> tuple[Any, Any]:
        """A file of its own of a table, in memory, and its footer."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        with self.writer(sink, table.schema) as writer:
            if table.num_rows:
                writer.write_table(table, row_group_size=table.num_rows)
        data = sink.getvalue()
        return data, pq.read_metadata(pa.BufferReader(data))


def layout_for(group: pa.Table, compression: str) -> Layout:
    """The layout that the first rows suggest: large binary values that do not shrink stay as they are."""
    leaves = [leaf for column in group.columns for leaf in _leaves(column.combine_chunks())]
    stored = [not _shrinks(leaf) for leaf in leaves]
    paths = _paths(group.schema) if any(stored) else []
    if len(paths) != len(stored):  # a type whose leaves are not what they seem
        return Layout(compression)
    usual = max(
        (leaf.nbytes // max(1, len(leaf)) for leaf, as_is in zip(leaves, stored, strict=True) if as_is), default=0
    )
    batch = min(_BATCH, max(1, _PAGE // max(1, usual)))
    return Layout(compression, tuple(path for path, as_is in zip(paths, stored, strict=True) if as_is), batch)


def _paths(schema: pa.Schema) -> list[str]:
    """What Parquet calls the leaves of a schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, schema).close()
    found = pq.read_metadata(pa.BufferReader(sink.getvalue())).schema
    return [str(found.column(leaf).path) for leaf in range(len(found))]


def _leaves(array: Any) -> Iterator[Any]:
    import pyarrow as pa

    types, kind = pa.types, array.type
    if isinstance(array, pa.ChunkedArray):  # more than one array holds
        array = array.chunk(0)
    if isinstance(kind, pa.BaseExtensionType):
        yield from _leaves(array.storage)
    elif types.is_struct(kind):
        for part in array.flatten():
            yield from _leaves(part)
    elif types.is_map(kind):
        yield from _leaves(array.keys)
        yield from _leaves(array.items)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        yield from _leaves(array.flatten())
    else:
        yield array


def _shrinks(leaf: Any) -> bool:
    """Whether compression makes the first values smaller; of other kinds than large binary values it is believed."""
    import pyarrow as pa

    if not (pa.types.is_binary(leaf.type) or pa.types.is_large_binary(leaf.type)):
        return True
    tried, size = [], 0
    for value in leaf.drop_null():
        tried.append(value.as_buffer()[:_EACH])
        size += len(tried[-1])
        if size >= _SAMPLE:
            break
    if size < _LARGE * max(1, len(tried)):
        return True
    packed = pa.compress(b"".join(tried), codec="zstd", asbytes=True)
    return len(packed) < size * _WORTH
