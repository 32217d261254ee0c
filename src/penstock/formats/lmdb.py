"""Samples from LMDB environments: each is a shard, its records are the samples in the order of their keys."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.codecs import Limits, decoder
from penstock.errors import DataError, PlanError, StorageError, import_extra
from penstock.formats.rows.tfrecord import message_fields, parse_example
from penstock.formats.torch import DEFAULT_FIELDS, item_to_sample
from penstock.order import I64
from penstock.plan import Fields, Reader, Resources, Source, Traits
from penstock.plan.values import Workers, check_callable, check_flag, kind_of
from penstock.storage import expand_braces, local_path, relative_names
from penstock.storage.protocol import scheme

MakeFields = Callable[[bytes], Any]  # the value of a record -> a dict of fields

LMDB_SUFFIXES = (".lmdb", ".mdb")
_DATA_FILE, _LOCK_FILE = "data.mdb", "lock.mdb"  # in an environment that is a folder
_NOT_SAMPLES = (b"__keys__", b"__len__")  # written by common conversions of image folders, beside the samples


@dataclass(frozen=True, slots=True)
class LmdbSource(Source):
    """LMDB environments; ``fields`` says how the value of a record becomes the fields of a sample.

    Raises:
        PlanError: ``fields`` is not valid, or records are pickled and not trusted.
    """

    paths: tuple[str, ...]
    fields: str | Callable[[bytes], Any] | None = None
    trust_pickle: bool = False
    workers: Workers = None

    random_access = True

    def __post_init__(self) -> None:
        check_flag("trust_pickle", self.trust_pickle)
        record_parser(self.fields, self.trust_pickle)
        if remote := [path for path in self.paths if scheme(path) != "file"]:
            raise PlanError(f"read_lmdb needs local paths, not {remote[0]!r}: LMDB maps its files into memory")

    @property
    def resources(self) -> Resources | None:
        """Set if the user asked for workers, or if reading runs the user's function."""
        return Resources(self.workers) if self.workers is not None or callable(self.fields) else None

    def open(self) -> LmdbReader:
        return LmdbReader(find_environments(self.paths), record_parser(self.fields, self.trust_pickle))

    def describe(self) -> str:
        return f"read_lmdb({', '.join(map(repr, self.paths))})"


def is_environment(path: str) -> bool:
    """Return whether there is an environment at a local path: a file of LMDB, or a folder with its data file."""
    if os.path.isdir(path):
        return os.path.isfile(os.path.join(path, _DATA_FILE))
    return path.endswith(LMDB_SUFFIXES) and os.path.isfile(path)


def find_environments(patterns: tuple[str, ...]) -> list[str]:
    """List the data files of the environments: files, folders with a data file, or folders of environments.

    Raises:
        StorageError: A path does not exist, or holds no environment.
    """
    found: list[str] = []
    for pattern in (single for given in patterns for single in expand_braces(given)):
        path = local_path(pattern)
        if os.path.isfile(path):
            found.append(path)
        elif os.path.isfile(os.path.join(path, _DATA_FILE)):
            found.append(os.path.join(path, _DATA_FILE))
        elif os.path.isdir(path):
            below = sorted(os.path.join(root, name) for root, _, names in os.walk(path) for name in names)
            environments = [
                file for file in below if file.endswith(LMDB_SUFFIXES) and os.path.basename(file) != _LOCK_FILE
            ]
            if not environments:
                raise StorageError(f"the folder holds no LMDB environment ({_DATA_FILE}, or *.lmdb)", path)
            found += environments
        else:
            raise StorageError("no such file or folder", path)
    return found


def record_parser(fields: str | MakeFields | None, trust_pickle: bool) -> MakeFields:
    """Return the function that turns the value of a record into fields.

    Raises:
        PlanError: ``fields`` is not valid, or records are pickled and not trusted.
        MissingExtra: The format of the records needs a package that is not installed.
    """
    if fields is None:
        return _value_field
    if callable(fields):
        check_callable("read_lmdb(fields=...)", fields)
        return partial(_fields_by, fields)
    if fields == "pickle" and not trust_pickle:
        raise PlanError("fields='pickle': pickle can run code; pass trust_pickle=True if you trust this data")
    if fields == "msgpack":
        decode = decoder("msgpack", limits=Limits())
        assert decode is not None
        return decode
    parsers: dict[str, MakeFields] = {"pickle": pickle.loads, "tf.Example": _parse_tf_example, "caffe": parse_datum}
    if fields not in tuple(parsers):
        names = ", ".join(map(repr, ("tf.Example", "msgpack", "pickle", "caffe")))
        raise PlanError(f"fields={fields!r}: choose one of {names}, or give a function of the value")
    return parsers[fields]


def _fields_by(function: MakeFields, value: bytes) -> Any:
    found = function(value)
    if not isinstance(found, Mapping | tuple | list):
        raise TypeError(f"the function in fields= returned {kind_of(found)}: return a dict of fields")
    return found


def _value_field(value: bytes) -> dict[str, Any]:
    return {"value": value}


def _parse_tf_example(value: bytes) -> dict[str, Any]:
    return parse_example(value, Fields())


def parse_datum(value: bytes) -> dict[str, Any]:
    """Decode a record of Caffe: ``image``, an array (height, width, channels) or an encoded image, and ``label``.

    Channels keep the order in which they are stored, which is usually blue, green, red.

    Raises:
        ValueError: The record is not a Datum of Caffe.
    """
    numbers: dict[int, int] = {}
    data, floats = b"", bytearray()
    for number, _, low, high in message_fields(value, 0, len(value)):
        if number == 4:
            data = value[low:high]
        elif number == 6:
            floats += value[low:high]
        else:
            unsigned = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(value[low:high]))
            numbers[number] = unsigned - (1 << 64) if unsigned >> 63 else unsigned
    channels, height, width, label, encoded = (numbers.get(number, 0) for number in (1, 2, 3, 5, 7))
    if encoded:
        return {"image": data, "label": label}
    pixels = np.frombuffer(data, np.uint8) if data else np.frombuffer(bytes(floats), "<f4")
    if not pixels.size or pixels.size != channels * height * width:
        raise ValueError(f"the record is not a Datum of Caffe: {pixels.size} values for {channels}x{height}x{width}")
    return {"image": pixels.reshape(channels, height, width).transpose(1, 2, 0).copy(), "label": label}


class _Environment:
    """An environment, opened read-only when it is first used, once per process; pickling pickles its path."""

    def __init__(self, path: str, identity: tuple[int, int] | None = None) -> None:
        self.path = path
        self._identity = identity  # of the file that was read first

    def __reduce__(self) -> tuple[Any, ...]:
        return _Environment, (self.path, self._identity)

    def begin(self) -> Any:
        """Return a transaction.

        Raises:
            MissingExtra: lmdb is not installed.
            StorageError: The environment cannot be opened, is truncated, or was replaced since it was first read.
        """
        try:
            status = os.stat(self.path)
        except OSError as exc:
            raise StorageError(f"the LMDB environment cannot be read: {exc.strerror or exc}", self.path) from exc
        identity = status.st_dev, status.st_ino
        self._identity = self._identity or identity
        if identity != self._identity:
            raise StorageError("the LMDB environment was replaced while it was being read", self.path)
        with _lock:
            if identity not in _open:
                for stale in [known for known, one in _open.items() if not one.is_current(known)]:
                    del _open[stale]  # closed when its last transaction ends
                _open[identity] = _OpenEnvironment.of(self.path)
            opened = _open[identity]
            if status.st_size < opened.used_bytes:  # reading a page behind the end would kill the process
                problem = f"the file has {status.st_size:,} bytes of {opened.used_bytes:,}"
                raise StorageError(f"the LMDB environment is truncated: {problem}; copy it again", self.path)
            return opened.environment.begin()


@dataclass(frozen=True, slots=True)
class _OpenEnvironment:
    """An open environment, its path, and how many bytes of its file were in use when it was opened."""

    environment: Any
    path: str
    used_bytes: int

    @staticmethod
    def of(path: str) -> _OpenEnvironment:
        """Open an environment.

        Raises:
            MissingExtra: lmdb is not installed.
            StorageError: The environment cannot be opened.
        """
        lmdb = import_extra("lmdb", "LMDB environments", "lmdb")
        try:
            # Without a lock file, which a read-only folder does not have; no readahead, since records are read in any
            # order and the kernel would fetch pages that are not needed.
            environment = lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False, max_dbs=0)
        except lmdb.Error as exc:
            raise StorageError(f"the LMDB environment cannot be opened: {exc}", path) from exc
        used_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        return _OpenEnvironment(environment, path, used_bytes)

    def is_current(self, identity: tuple[int, int]) -> bool:
        """Return whether the path still names the open file."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == identity


_open: dict[tuple[int, int], _OpenEnvironment] = {}  # by device and inode: each may be open once in a process
_lock = threading.Lock()


def _close_inherited() -> None:
    """Close what the parent opened: an environment must not be used in a process that was forked since."""
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it
    while _open:
        _open.popitem()[1].environment.close()


os.register_at_fork(after_in_child=_close_inherited)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of an environment, in order, joined."""

    joined: bytes
    ends: I64

    @staticmethod
    def read(environment: _Environment) -> _Keys:
        """Walk over the keys; the values are not read."""
        keys: list[bytes] = []
        with environment.begin() as transaction, transaction.cursor() as cursor:
            keys += (key for key in cursor.iternext(keys=True, values=False) if key not in _NOT_SAMPLES)
        return _Keys(b"".join(keys), np.cumsum([0, *map(len, keys)], dtype=np.int64))

    def at(self, index: I64) -> list[bytes]:
        starts, stops = self.ends[index].tolist(), self.ends[index + 1].tolist()
        return [self.joined[start:stop] for start, stop in zip(starts, stops, strict=True)]


class LmdbReader(Reader):
    """Reads records by index. Counting opens an environment; the first sample of a shard walks over its keys."""

    def __init__(self, paths: list[str], parse: MakeFields) -> None:
        self._environments = [_Environment(path) for path in paths]
        self._parse = parse
        shards = [os.path.dirname(path) if os.path.basename(path) == _DATA_FILE else path for path in paths]
        self.names = relative_names(shards)
        self._keys: dict[int, _Keys] = {}
        self._counts: dict[int, int] = {}
        self._walking = threading.Lock()

    traits = Traits()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_walking": None, "_keys": {}}  # a worker that needs keys reads them itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _walking=threading.Lock())

    def stamp(self) -> object:
        stats = [os.stat(environment.path) for environment in self._environments]
        return tuple((found.st_ino, found.st_size, found.st_mtime_ns) for found in stats)

    def counts(self, scan: bool) -> I64 | None:
        return np.array([self.count(shard) for shard in range(len(self.names))], np.int64)

    def count(self, shard: int) -> int:
        if shard not in self._counts:
            with self._environments[shard].begin() as transaction:
                others = sum(transaction.get(key) is not None for key in _NOT_SAMPLES)
                self._counts[shard] = transaction.stat()["entries"] - others
        return self._counts[shard]

    def sizes(self) -> list[int]:
        return [os.path.getsize(environment.path) for environment in self._environments]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedRecords:
        runs = np.flatnonzero(np.diff(shard, prepend=-1))
        keys: list[bytes] = []
        environments: list[_Environment] = []
        nbytes = np.zeros(len(shard), np.int64)
        for start, stop in zip(runs.tolist(), [*runs[1:].tolist(), len(shard)], strict=True):
            number = int(shard[start])
            keys += self._shard_keys(number).at(index[start:stop])
            environments += [self._environments[number]] * (stop - start)
            nbytes[start:stop] = os.path.getsize(environments[-1].path) // max(self.count(number), 1)
        return LocatedRecords(environments, keys, fields, self._parse, nbytes)

    def _shard_keys(self, shard: int) -> _Keys:
        with self._walking:
            if shard not in self._keys:
                self._keys[shard] = _Keys.read(self._environments[shard])
            return self._keys[shard]

    def key(self, shard: int, index: int) -> str | None:
        return _text(self._shard_keys(shard).at(np.array([index]))[0])

    def fields(self, shard: int) -> tuple[str, ...]:
        known: dict[Any, tuple[str, ...]] = {_value_field: ("value",), parse_datum: ("image", "label")}
        return next((names for parse, names in known.items() if parse is self._parse), ())

    def url(self, shard: int) -> str:
        return self._environments[shard].path


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


@dataclass(slots=True)
class LocatedRecords:
    """Records by key; ``nbytes`` are estimated by the size of their environment."""

    environments: list[_Environment]
    keys: list[bytes]
    fields: Fields
    parse: MakeFields
    nbytes: I64

    def take(self, sel: slice) -> LocatedRecords:
        return LocatedRecords(self.environments[sel], self.keys[sel], self.fields, self.parse, self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        samples: list[Any] = []
        errors: dict[int, DataError] = {}
        transactions: dict[str, Any] = {}
        try:
            for position, (environment, key) in enumerate(zip(self.environments, self.keys, strict=True)):
                path = environment.path
                try:
                    transaction = transactions.get(path) or transactions.setdefault(path, environment.begin())
                    samples.append(self._sample(key, transaction.get(key)))
                except Exception as exc:  # a value may be anything, and so may what a user's function raises
                    errors[position] = DataError(f"{type(exc).__name__}: {exc}", path, _text(key))
                    errors[position].__cause__ = exc
                    samples.append(None)
        finally:
            for transaction in transactions.values():
                transaction.abort()
        return samples, errors

    def _sample(self, key: bytes, value: bytes | None) -> dict[str, Any]:
        if value is None:
            raise ValueError("the record is gone: the environment was changed while it was read")
        parsed = self.parse(value)
        found = parsed if isinstance(parsed, Mapping) else item_to_sample(parsed, DEFAULT_FIELDS)
        sample = {"__key__": _text(key), **found}
        if not all(isinstance(name, str) for name in sample) or not isinstance(sample["__key__"], str):
            raise ValueError(f"the names of fields and the key must be text, but are {[*found]}")
        return {name: content for name, content in sample.items() if self.fields.wants(name)}
