"""What identifies a run: the stamps of its sources, its stages with their arguments, and the code of its functions.

Two runs with one fingerprint write the same samples, as far as that can be seen. Covered are the bytecode, defaults and
closures of functions, the functions, classes and values that they refer to by name, and the source of modules, all as
far as they are the user's own: neither of the standard library nor of an installed package. What an object of an
installed package holds is not seen, and neither is what a function reads at run time; ``version=`` covers the rest.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from penstock.engines import CacheResults, Program
from penstock.errors import PlanError, StorageError
from penstock.plan import ByObject, EngineOptions, Plan, Resources, is_tensor
from penstock.storage import local_path, open_storage, redacted
from penstock.storage.protocol import scheme

_INSIGNIFICANT = (Resources, EngineOptions, CacheResults)  # they do not change what is written
_PLACE_FIELDS = {"storage", "cache", "workers"}  # of sources: how they are reached and read
_RESULT_FORMAT = 1  # of cached results
_TAG_REQUESTS = 32  # at a time
_ATOMS = (type(None), bool, int, float, complex, str, type(...), range, np.generic, np.dtype, PurePath)


@dataclasses.dataclass(frozen=True, slots=True)
class RunFingerprint:
    """What is read, and what is done with it.

    Attributes:
        source: A hash of the sources' names, counts and stamps, and of the order in which they are read.
        stages: A hash of the stages, their arguments and their functions.
        stream: Whether the source can only be read once, so that an interrupted run starts over.
    """

    source: str
    stages: str
    stream: bool


def fingerprint_of(program: Program, epoch: int) -> RunFingerprint:
    """Return what identifies the samples of an epoch.

    Raises:
        StorageError: A source cannot be read.
    """
    plan, stream = program.plan, program.stream is not None
    order = None if stream else program.identity(counts=True)
    leaves = program.arrangement.leaves
    stamps = [] if stream else [_stamps(*pair) for pair in zip(leaves, program.readers, strict=True)]
    source = code_digest([order, stamps, list(_sources(plan)), epoch, plan.seed, plan.cut])
    return RunFingerprint(source, stages_digest(plan), stream)


def stages_digest(plan: Plan) -> str:
    """Return a hash of the stages of a plan, their arguments and the code of their functions."""
    return code_digest([list(_stages(plan)), plan.errors.action])


def result_digest(source: Any, reader: Any, stages: Sequence[Any], version: str | int | None, others: Any) -> str:
    """Return what identifies the results of stages on the samples of a source, in every process.

    Args:
        source: The source.
        reader: Its open reader.
        stages: The stages.
        version: What the user named the version of what cannot be seen.
        others: What else the results depend on.

    Raises:
        StorageError: The tags of remote objects cannot be read.
        PlanError: A server does not tell when an object changes, and there is no version.
    """
    urls = [url for shard in range(len(reader.names)) for url in reader.objects(shard)]
    identity = getattr(source, "identity", None)
    described = identity() if callable(identity) else _described(source)
    stamps = _url_stamps(source, urls, ask=True)
    untold = (url for url, stamp in zip(urls, stamps, strict=True) if stamp is None and scheme(url) != "file")
    if version is None and (url := next(untold, None)) is not None:
        raise PlanError(
            f"cache(): the server does not tell when {redacted(url)} changes, by an ETag or a time; give "
            "cache(version=...), and another version whenever the data changed"
        )
    return code_digest([_RESULT_FORMAT, reader.names, stamps, described, list(stages), version, others])


def code_digest(value: Any) -> str:
    """Return a hash of a value, in hex: the same in every process for equal data and equal code."""
    hasher = _Hasher()
    hasher.add(value)
    return hasher.hexdigest()


def _stages(plan: Plan) -> Iterable[Any]:
    yield plan.stages
    for branch in plan.branches():
        yield from _stages(branch)


def _sources(plan: Plan) -> Iterable[Any]:
    """Return what identifies the sources besides the shards: their arguments, and the items of those in memory."""
    for leaf in plan.leaves():
        identity = getattr(leaf, "identity", None)
        yield identity() if callable(identity) else _described(leaf)


def _described(source: Any) -> list[Any]:
    fields = dataclasses.fields(source) if dataclasses.is_dataclass(source) else ()
    skipped = _PLACE_FIELDS | {"patterns"}  # the shards that patterns match are compared instead
    return [type(source).__qualname__, {f.name: getattr(source, f.name) for f in fields if f.name not in skipped}]


def _stamps(source: Any, reader: Any) -> list[Any]:
    """Return the size and time of each file that a reader names, and the tag of each remote shard that was listed."""
    shards = range(len(reader.names))
    if getattr(source, "cache", None) is None:
        return _url_stamps(source, [reader.url(shard) for shard in shards])
    return _url_stamps(source, [url for shard in shards for url in reader.objects(shard)])


def _url_stamps(source: Any, urls: Sequence[str], ask: bool = False) -> list[Any]:
    """Return what changes with the content of each file or object; ``None`` if that is not known.

    Args:
        source: The source.
        urls: The files and objects.
        ask: Whether to ask for tags that no listing tells.
    """
    given, cache = getattr(source, "storage", None), getattr(source, "cache", None)
    stamps: list[Any] = []
    tags = _listed_tags(source, urls)
    for url in urls:
        try:
            status = os.stat(local_path(url)) if scheme(url) == "file" else None
        except OSError:
            status = None
        stamps.append(tags.get(redacted(url)) if status is None else [status.st_size, status.st_mtime_ns])
    # A cache may hold older content than the server, and then the samples are that content.
    asked = [
        number
        for number, url in enumerate(urls)
        if scheme(url) != "file" and ((ask and stamps[number] is None) or (cache is not None and redacted(url) in tags))
    ]

    def tag(number: int) -> Any:
        storage = open_storage(urls[number], given)
        info = (cache.shared(storage) if cache is not None else storage).info(urls[number])
        return None if info.tag is None else [info.size, info.tag]

    with ThreadPoolExecutor(_TAG_REQUESTS) as pool:
        for number, found in zip(asked, pool.map(tag, asked), strict=True):
            stamps[number] = found
    return stamps


def _listed_tags(source: Any, urls: Sequence[str]) -> dict[str, str | None]:
    """Return the tags of the objects in the remote folders that are listed to find shards."""
    tags: dict[str, str | None] = {}
    for folder in {folder for pattern in getattr(source, "patterns", ()) if (folder := _listed_folder(pattern, urls))}:
        with suppress(StorageError):  # a server that cannot list, or may not
            tags |= {redacted(one.url): one.tag for one in open_storage(folder, source.storage).list(folder)}
    return tags


def _listed_folder(pattern: str, urls: Sequence[str]) -> str | None:
    """Return the remote folder that was listed to find the shards of a pattern; None if their URLs are written out."""
    if scheme(pattern) == "file":
        return None
    if magic := re.search(r"[*?\[]", pattern.partition("://")[2]):
        return pattern[: pattern.rindex("/", 0, pattern.index("://") + 3 + magic.start()) + 1]
    folder = pattern.rstrip("/") + "/"
    return folder if any(url.startswith(folder) for url in urls) else None


class _Hasher:
    """Feeds values into a hash, with their types and lengths, so that different values give different bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._open: dict[int, Any] = {}  # functions and objects on the way here; keeps them alive, too

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:32]

    def add(self, value: Any) -> None:
        if isinstance(value, _INSIGNIFICANT):
            return
        if isinstance(value, _ATOMS):
            self._text(f"{type(value).__name__} {value!r}")
        elif isinstance(value, bytes | bytearray | memoryview):
            self._bytes(f"bytes {memoryview(value).nbytes}", value)
        elif isinstance(value, re.Pattern):
            self._many("pattern", [value.pattern, value.flags])
        elif isinstance(value, list | tuple):
            self._many(type(value).__name__, value)
        elif isinstance(value, set | frozenset):
            self._many("set", sorted(map(code_digest, value)))
        elif isinstance(value, Mapping):
            self._many("dict", (pair for pair in value.items()))
        elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
            self._text(f"array {value.dtype} {value.shape}")
            self._bytes("", np.ascontiguousarray(value).view(np.uint8) if value.size else b"")
        elif is_tensor(value):
            self.add(value.detach().cpu().numpy())
        else:
            self._object(value)

    def _text(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        self._hash.update(b"%d:" % len(data) + data)

    def _bytes(self, kind: str, data: Any) -> None:
        self._text(kind)
        self._hash.update(data)

    def _many(self, kind: str, values: Iterable[Any]) -> None:
        self._text(kind)
        for value in values:
            self.add(value)
        self._text("end")

    def _object(self, value: Any) -> None:
        if id(value) in self._open:  # a function that calls itself, or an object that refers to itself
            self._text(f"again {list(self._open).index(id(value))}")
            return
        self._open[id(value)] = value
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, CodeType):
            self._many("code", [value.co_code, value.co_names, value.co_varnames[: value.co_argcount], value.co_consts])
        elif isinstance(value, partial):
            self._many("partial", [value.func, value.args, value.keywords])
        elif isinstance(value, MethodType):
            self._many("method", [value.__func__, value.__self__])
        elif isinstance(value, ModuleType):
            self._module(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ByObject):
            self.add(value.value)
        elif isinstance(value, enum.Enum):
            self._text(f"{type(value).__qualname__} {value.name}")
        elif dataclasses.is_dataclass(value):
            self.add(type(value))
            self._many("fields", [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare])
        else:
            self._instance(value)

    def _function(self, fn: FunctionType) -> None:
        self._text(f"function {fn.__qualname__}")
        if not _is_own(fn.__module__):
            self._text(fn.__module__ or "")
            return
        cells = [cell.cell_contents for cell in fn.__closure__ or () if _is_filled(cell)]
        self._many("body", [fn.__code__, fn.__defaults__, fn.__kwdefaults__, cells])
        for name in sorted(_names(fn.__code__) & fn.__globals__.keys()):
            self._many(name, [fn.__globals__[name]])

    def _module(self, module: ModuleType) -> None:
        self._text(f"module {module.__name__}")
        path = getattr(module, "__file__", None)
        if path is not None and _is_own(module.__name__) and os.path.isfile(path):
            with open(path, "rb") as file:
                self._bytes("source", file.read())

    def _class(self, kind: type) -> None:
        self._text(f"class {kind.__module__}.{kind.__qualname__}")
        if _is_own(kind.__module__):
            members = {name: _plain(value) for name, value in vars(kind).items() if not name.startswith("__")}
            called = {name: vars(kind)[name] for name in ("__call__", "__init__", "__getitem__") if name in vars(kind)}
            self._many("members", sorted((members | called).items(), key=lambda item: item[0]))
            self._many("bases", kind.__bases__)

    def _instance(self, value: Any) -> None:
        self.add(type(value))
        if callable(wrapped := getattr(value, "__wrapped__", None)):  # such as a function with functools.cache
            self.add(wrapped)
        known = getattr(value, "_fingerprint", None)  # of a Hugging Face dataset
        if isinstance(known, str):
            self._text(known)
        elif type(value).__module__.startswith("pyarrow") and hasattr(value, "to_batches"):  # a table
            self._text(str(value.schema))
            for batch in value.to_batches():
                for column in batch.columns:
                    self._many("column", [column.to_pylist()])
        elif _is_own(type(value).__module__) and not isinstance(value, BuiltinFunctionType):
            slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
            state = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
                value, "__dict__", {}
            )
            self.add(state)


def _plain(member: Any) -> Any:
    """Return a member of a class as what can be hashed: the functions of properties, static and class methods."""
    if isinstance(member, property):
        return [member.fget, member.fset]
    return getattr(member, "__func__", member)


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> set[str]:
    """Return the names that a function and the functions inside it may look up."""
    nested = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*(_names(inner) for inner in nested))


@cache
def _installed() -> tuple[str, ...]:
    folders = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(
        f"{os.path.realpath(folder)}{os.sep}" for folder in {*folders, os.path.dirname(os.path.dirname(__file__))}
    )


def _is_own(module: str | None) -> bool:
    """Return whether a module is the user's: neither built in, nor of the standard library, nor installed."""
    if module is None or module in sys.builtin_module_names:
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:  # a program that was typed in, or a function that was sent here
        return module == "__main__" or module not in sys.modules
    return not os.path.realpath(path).startswith(_installed())
