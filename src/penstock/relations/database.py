"""A DuckDB database for one operation: in memory, spilling to a private folder, without access to anything else."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.errors import PlanError, StorageError, import_extra
from penstock.formats.tables.values import plain, plain_type
from penstock.plan import Plan, size_in_bytes
from penstock.plan.values import available_cores

_MEMORY_SHARE = 4  # a quarter of the machine's memory, unless the engine's options set a limit
_LEAST_MEMORY = 64_000_000  # below that, DuckDB cannot hold the blocks that its threads work on
_FOLDER, _LOCK = "penstock-relations-", "lock"


def memory_of(plan: Plan) -> int:
    """Return the memory limit in bytes: ``memory`` of ``on("local", memory=...)``, else a quarter of the machine's."""
    limit = plan.engine.get("memory")
    if limit is not None:
        return size_in_bytes("memory", limit)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MEMORY_SHARE


@contextmanager
def database(plan: Plan, purpose: str, threads: int | None = None) -> Iterator[Any]:
    """Open a database with the memory and the threads of the plan's engine; closing it removes its files.

    Raises:
        MissingExtra: duckdb or pyarrow is not installed.
        StorageError: Data cannot be spilled to the folder for temporary files.
        PlanError: The data does not fit into the memory limit, and cannot be spilled.
    """
    import_extra("pyarrow.compute", purpose, "tables")
    duckdb = import_extra("duckdb", purpose, "tables")
    cores = threads or int(plan.engine.get("cpus") or available_cores())
    with _spill_folder() as folder:
        settings = {
            "memory_limit": f"{max(memory_of(plan), _LEAST_MEMORY) // 1000}KB",
            "threads": max(1, cores),
            "temp_directory": folder,
            "autoload_known_extensions": False,
            "autoinstall_known_extensions": False,
            "python_enable_replacements": False,  # a query does not see the variables of the program
        }
        con = _LazyConnection(settings)
        try:
            yield con
        except duckdb.OutOfMemoryException as exc:
            if "max_temp_directory_size" not in str(exc):  # which is what the disk has left
                problem = f"{purpose} needs more memory: raise on('local', memory=...)"
                raise PlanError(f"{problem} ({_first_line(exc)})") from exc
            raise _cannot_spill(exc) from exc
        except duckdb.OutOfRangeException as exc:
            raise PlanError(f"{purpose}: {_first_line(exc)}; convert the values first, for example to floats") from exc
        except duckdb.IOException as exc:
            raise _cannot_spill(exc) from exc
        finally:
            con.close()


class _LazyConnection:
    """A connection that is opened by its first query: groups and sorts by integers and texts may need none."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._tables: dict[str, Any] = {}  # registered before it is open
        self._opened: Any = None

    def register(self, name: str, table: Any) -> None:
        if self._opened is None:
            self._tables[name] = table
        else:
            self._opened.register(name, table)

    def __getattr__(self, name: str) -> Any:
        if self._opened is None:
            import duckdb

            self._opened = duckdb.connect(":memory:", config=self._settings)
            self._opened.execute("set enable_external_access = false").fetchall()
            self._opened.execute("set timezone = 'UTC'").fetchall()
            self._opened.execute("set lock_configuration = true").fetchall()
            for table in self._tables.items():
                self._opened.register(*table)
        return getattr(self._opened, name)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


def _cannot_spill(exc: Exception) -> StorageError:
    problem = f"cannot spill samples to a temporary file: {_first_line(exc)}; set TMPDIR to another folder"
    return StorageError(problem, tempfile.gettempdir())


def _first_line(exc: Exception) -> str:
    return str(exc).splitlines()[0]


@contextmanager
def _spill_folder() -> Iterator[str]:
    """Create a private folder, which is removed at the end; the folders of processes that were killed are removed too.

    Its owner holds a lock on a file in it, which ends with the process.
    """
    root = Path(tempfile.gettempdir())
    try:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        problem = f"cannot create a folder for temporary files: {exc.strerror}; set TMPDIR to another folder"
        raise StorageError(problem, str(root)) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_abandoned(root)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{_FOLDER}*"):
        with suppress(OSError):  # it belongs to another user, or is being created or removed
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


class StagedTable:
    """A table of the database to which columns are appended; a column of integers may become one of floats.

    Rows are held as Arrow's, which DuckDB reads in place; beyond ``memory // 4`` bytes, they are copied into a table of
    its own, which it can spill. Times are stored as integers, so that no type of DuckDB changes them, unless queries
    of the user see them; -0.0 is stored as 0.0, which equals it.
    """

    def __init__(
        self, con: Any, name: str, verb: str, fields: Sequence[str] = (), memory: int = 0, *, times: bool = False
    ) -> None:
        """Name the table.

        Args:
            con: The database.
            name: The name of the table in queries.
            verb: The operation, for messages.
            fields: The names of the columns in messages; by default their own.
            memory: The memory limit of the operation.
            times: Whether times stay times.
        """
        self._times = times
        self._con, self.name, self._verb, self._fields = con, name, verb, tuple(fields)
        self.schema: Any = None
        self.rows: Any = None  # all rows as Arrow's, once the table is finished, if they are in memory
        self._held: list[Any] = []
        self._room = memory // 4
        self._copied = False

    def add(self, table: Any) -> None:
        """Append rows.

        Raises:
            PlanError: A column has another type than before.
        """
        import pyarrow as pa

        kinds = [plain_type(kind) for kind in table.schema.types]
        for number, kind in enumerate(kinds):
            if pa.types.is_decimal256(kind):
                field = self._fields[number] if number < len(self._fields) else table.schema.names[number]
                raise PlanError(
                    f"{self._verb}: field {field!r} has {kind}; cast it to decimals of at most 38 digits first"
                )
        schema = pa.schema(list(zip(table.schema.names, kinds, strict=True)))
        if self.schema is None:
            self.schema = schema
        elif schema != self.schema:
            self._adopt(self._unified(schema))
        self._held.append(self._encoded(table))
        self._room -= table.nbytes
        if self._room < 0:
            self._copy()

    def _adopt(self, schema: Any) -> None:
        """Give the rows so far the types of another schema."""
        if schema != self.schema:
            self._copy()
            self._con.execute(f"alter table {self.name} rename to outgrown").fetchall()
            self.schema, self._copied = schema, False
            self._copy()
            self._con.execute(f"insert into {self.name} select * from outgrown").fetchall()
            self._con.execute("drop table outgrown").fetchall()

    def _copy(self) -> None:
        """Move the rows that are held into the table of the database."""
        import pyarrow as pa

        if not self._copied:
            self._insert("create table {} as select * from chunk", self._encoded(self.schema.empty_table()))
            self._copied = True
        if self._held:
            self._insert("insert into {} select * from chunk", pa.concat_tables(self._held))
            self._held = []

    def _insert(self, statement: str, table: Any) -> None:
        self._con.register("chunk", table)
        self._con.execute(statement.format(self.name)).fetchall()
        self._con.unregister("chunk")

    def finish(self) -> None:
        """Make the rows visible to queries; called once, after the last of them."""
        import pyarrow as pa

        if self._copied:
            self._copy()
        elif self.schema is not None:
            self.rows = pa.concat_tables(self._held)
            self._con.register(self.name, self.rows)

    def _unified(self, schema: Any) -> Any:
        import pyarrow as pa

        fields = []
        for number, (known, new) in enumerate(zip(self.schema, schema, strict=True)):
            try:
                either = pa.unify_schemas([pa.schema([known]), pa.schema([new])], promote_options="permissive").field(0)
            except pa.ArrowException as exc:
                raise self._mixed(number, known.type, new.type) from exc
            if known.type != either.type and pa.types.is_temporal(known.type):
                raise self._mixed(number, known.type, new.type)
            fields.append(either)
        return pa.schema(fields)

    def _mixed(self, number: int, one: Any, other: Any) -> PlanError:
        return one_type_needed(self._verb, self.field_name(self.schema.names[number]), f"{one} and {other}")

    def field_name(self, column: str) -> str:
        """Return the name of the field that a column holds."""
        number = self.schema.get_field_index(column)
        return self._fields[number] if number < len(self._fields) else column

    def _encoded(self, table: Any) -> Any:
        import pyarrow as pa

        arrays = []
        for number, (column, field) in enumerate(zip(table.columns, self.schema, strict=True)):
            chunks = [plain(chunk) for chunk in getattr(column, "chunks", [column])]
            array = pa.chunked_array(chunks, chunks[0].type if chunks else field.type)
            try:
                array = array if array.type == field.type else array.cast(field.type)
                arrays.append(array if self._times and pa.types.is_temporal(field.type) else _encode(array))
            except pa.ArrowException as exc:
                raise self._mixed(number, array.type, field.type) from exc
        return pa.table(arrays, names=self.schema.names)

    def decoded(self, column: Any, name: str) -> Any:
        """Return a column of a result with the type of a column of this table."""
        kind = self.schema.field(name).type
        width = _integers_of(kind)
        if width is None:
            return column.cast(kind)
        return column.cast(width).combine_chunks().view(kind) if len(column) else column.cast(width).cast(kind)


def one_type_needed(verb: str, field: str, found: str) -> PlanError:
    """Return the error for the values of a field that have no one type."""
    return PlanError(
        f"{verb}: the values of field {field!r} must have one type, but are {found}; "
        "convert them first, for example to text"
    )


def _encode(array: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_float16(kind):
        array, kind = array.cast(pa.float32()), pa.float32()
    if pa.types.is_floating(kind):
        return pc.add(array, pa.scalar(0.0, kind))
    width = _integers_of(kind)
    return array if width is None else pa.chunked_array([chunk.view(width) for chunk in array.chunks], width)


def _integers_of(kind: Any) -> Any:
    """Return the type of the integers that a time is stored as; ``None`` for other types."""
    import pyarrow as pa

    if not pa.types.is_temporal(kind) or kind == pa.month_day_nano_interval():
        return None
    return pa.int32() if kind.bit_width == 32 else pa.int64()
