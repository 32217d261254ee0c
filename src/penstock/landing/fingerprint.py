"""What identifies a run: the stamps of its sources, its stages with their arguments, and the code of its functions.

Two runs with one fingerprint write the same samples, as far as that can be seen. A fingerprint covers the bytecode,
defaults, attributes and closures of functions, what they refer to by name, and the source of modules with everything
that these import: all code of the user, but neither the standard library nor installed packages. Of an object, it
covers what ``pickle`` would store; one that cannot be pickled is unlike any other. What a function reads at run time is
not seen; ``version=`` covers it.
"""

from __future__ import annotations

import ast
import copyreg
import dataclasses
import dis
import enum
import hashlib
import importlib.util
import inspect
import logging
import os
import random
import re
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cache, cached_property, lru_cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any
from uuid import uuid4

import numpy as np

from penstock.engines import CacheResults, Program
from penstock.errors import PlanError, StorageError
from penstock.plan import (
    ByObject,
    EngineOptions,
    Exclude,
    LateShuffle,
    Mix,
    Plan,
    Repeat,
    Resources,
    Slice,
    SplitSide,
    is_tensor,
)
from penstock.storage import local_path, open_storage, redacted
from penstock.storage.protocol import NotFound, scheme

_INSIGNIFICANT = (Resources, EngineOptions, CacheResults)  # they do not change what is written
_PLACE_FIELDS = {"storage", "cache", "workers"}  # of sources: how they are reached and read
_RESULT_FORMAT = 1  # of cached results
_TAG_REQUESTS = 32  # at a time
_ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, type(...), range, Decimal, date, datetime, time, timedelta),
        *(PosixPath, PurePosixPath, PureWindowsPath),
    }
)
_WITHOUT_VALUE = (  # nothing that samples depend on
    *(type(threading.Lock()), type(threading.RLock()), threading.local),
    *(threading.Event, threading.Condition, threading.Semaphore),
)
_DECLARED = ("__annotations__", "__pydantic_fields__")  # of a class, with what its instances are made
_Import = tuple[str, tuple[str, ...], int]  # the module, the names taken from it, and how far above the package it is
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RunFingerprint:
    """Hashes that identify a run: of what it reads, and of what it does with it.

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
    source = code_digest([order, stamps, list(_sources(plan)), epoch if _varies(plan) else 0, plan.seed, plan.cut])
    return RunFingerprint(source, stages_digest(plan), stream)


def stages_digest(plan: Plan, unseen: str | None = None) -> str:
    """Return a hash of the stages of a plan, their arguments and the code of their functions; see ``code_digest``."""
    return code_digest([list(_stages(plan)), plan.errors.action], unseen)


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
        PlanError: A server does not report when an object changes, and there is no version.
    """
    urls = [url for shard in range(len(reader.names)) for url in reader.objects(shard)]
    identity = getattr(source, "identity", None)
    described = identity() if callable(identity) else _described(source)
    stamps = _content_stamps(source, urls)
    untold = (
        url
        for url, stamp in zip(urls, stamps, strict=True)
        if scheme(url) != "file" and (stamp is None or stamp[1:] == [None])
    )
    if version is None and (url := next(untold, None)) is not None:
        raise PlanError(
            f"cache(): the server does not report when {redacted(url)} changes, by an ETag or a time; give "
            "cache(version=...), and another version whenever the data changed"
        )
    hasher = _Hasher()
    hasher.add_all([_RESULT_FORMAT, reader.names, stamps, described, list(stages), version, others])
    if hasher.unlike:
        advice = "create it in the function or in the class that is called"
        _log.warning("cached results are not found again: %s cannot be pickled; %s", ", ".join(hasher.unlike), advice)
    return hasher.hexdigest()


def code_digest(value: Any, unseen: str | None = None) -> str:
    """Return a hash of a value, in hex: the same in every process for equal data and equal code.

    Args:
        value: Anything.
        unseen: What stands for an object that cannot be pickled; by default it is unlike any other.
    """
    hasher = _Hasher(unseen)
    hasher.add_all(value)
    return hasher.hexdigest()


def _varies(plan: Plan) -> bool:
    """Return whether epochs may have other samples, or these in another order."""
    orders = any(not isinstance(stage, Slice | Repeat | SplitSide | Exclude) for stage in plan.ordering)
    random = any(stage.wants_rng or isinstance(stage, LateShuffle) for stage in plan.body)
    return orders or random or isinstance(plan.source, Mix) or any(map(_varies, plan.branches()))


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
    """Return what changes with the content of each file that a reader names, and of each remote shard."""
    urls: list[str] = []
    folders: set[str] = set()
    for shard in range(len(reader.names)):
        objects = reader.objects(shard)
        one_by_one = len(objects) == 1 or getattr(source, "cache", None) is not None
        urls += objects if one_by_one else [reader.url(shard)]  # a folder: a request for each object takes too long
        folders |= set() if one_by_one else {reader.url(shard)}
    return _content_stamps(source, urls, folders)


def _content_stamps(source: Any, urls: Sequence[str], folders: Collection[str] = ()) -> list[Any]:
    """Return what changes with the content of each file or object; ``None`` if that is not known.

    Tags that a listing does not have are requested one by one. Servers refuse such requests for ``folders`` in ways of
    their own.
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
        if scheme(url) != "file" and (stamps[number] is None or cache is not None)
    ]

    def tag(number: int) -> Any:
        storage = open_storage(urls[number], given)
        try:
            info = (cache.shared(storage) if cache is not None else storage).info(urls[number])
        except StorageError as exc:
            if isinstance(exc, NotFound) or urls[number] in folders:
                return None
            raise
        return [info.size, info.tag]

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

    def __init__(self, unseen: str | None = None) -> None:
        self.unlike: list[str] = []  # the types of objects that cannot be pickled
        self._unseen = unseen
        self._hash = hashlib.sha256()
        self._met: dict[int, tuple[int, Any]] = {}  # functions and objects by id, with their numbers; kept alive
        self._around: list[int] = []  # the ids of the containers around a value
        self._sources: set[str] = set()  # the modules whose source is in the hash

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:32]

    def add_all(self, value: Any) -> None:
        """Add a value from which all others are reached."""
        try:
            self.add(value)
        except RecursionError:
            self._differ("an object that is nested very deeply")

    def _differ(self, what: str) -> None:
        """Make this hash unlike any other, because of an object that cannot be pickled."""
        self.unlike.append(what)
        self._text(f"unseen {uuid4().hex if self._unseen is None else self._unseen}")

    def add(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, _INSIGNIFICANT):
            return
        if kind in _ATOMS and getattr(value, "tzinfo", None) is None:
            self._text(f"{kind.__name__} {value!r}")
        elif kind in (bytes, bytearray, memoryview):
            data = bytes(value) if kind is memoryview else value
            self._bytes(f"bytes {len(data)}", data)
        elif kind in (list, tuple, dict, set, frozenset, MappingProxyType):
            self._container(value)
        elif kind in (np.ndarray, np.memmap) and not value.dtype.hasobject:
            self._text(f"array {value.dtype} {value.shape}")
            self._bytes("", np.ascontiguousarray(value).reshape(-1).view(np.uint8) if value.size else b"")
        elif isinstance(value, np.dtype) or (isinstance(value, np.generic) and not value.dtype.hasobject):
            self._text(f"{kind.__name__} {value!r}")
        elif is_tensor(value):
            self._tensor(value)
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

    def _container(self, value: Any) -> None:
        if id(value) in self._around:
            self._text(f"around {self._around.index(id(value))}")
            return
        self._around.append(id(value))
        if isinstance(value, list | tuple):
            self._many(type(value).__name__, value)
        elif isinstance(value, set | frozenset):
            self._many("set", sorted(map(self._digest_of, value)))
        else:
            self._many("dict", value.items())
        self._around.pop()

    def _digest_of(self, member: Any) -> str:
        """Return the hash of a member of a set, which has no place in an order."""
        hasher = _Hasher(self._unseen)
        if type(member) not in _ATOMS:
            hasher._met, hasher._around, hasher._sources = {**self._met}, [*self._around], {*self._sources}
        hasher.add(member)
        self.unlike += hasher.unlike
        return hasher.hexdigest()

    def _tensor(self, value: Any) -> None:
        import torch

        plain = type(value) is torch.Tensor or isinstance(value, torch.nn.Parameter)
        if plain and value.layout == torch.strided and value.device.type != "meta" and not value.is_quantized:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            self._text(f"tensor {value.dtype} {tuple(value.shape)}")
            self._bytes("", flat.view(torch.uint8).numpy() if len(flat) else b"")
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        if (met := self._met.get(id(value))) is not None:  # such as a function that calls itself
            self._text(f"again {met[0]}")
            return
        self._met[id(value)] = len(self._met), value
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, CodeType):
            self._code(value)
        elif isinstance(value, partial):
            self._many("partial", [value.func, value.args, value.keywords])
        elif isinstance(value, MethodType):
            self._many("method", [value.__func__, value.__self__])
        elif isinstance(value, ModuleType):
            self._text(f"module {value.__name__}")
            self._source([value.__name__])
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, property | staticmethod | classmethod):
            self._many("member", _parts(value))
        elif isinstance(value, ByObject):
            self.add(value.value)
        elif isinstance(value, enum.Enum):
            self._many("enum", [type(value), value.name, value.value])
        elif isinstance(value, _WITHOUT_VALUE) or _is_global_random(value):
            self.add(type(value))
        elif dataclasses.is_dataclass(value) and _is_ours(type(value)):
            self.add(type(value))
            self._many("fields", [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare])
        else:
            self._instance(value)

    def _code(self, code: CodeType) -> None:
        counts = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        names = [code.co_names, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        self._many("code", [code.co_code, code.co_exceptiontable, *names, *counts, code.co_consts])

    def _function(self, fn: FunctionType) -> None:
        self._text(f"function {fn.__qualname__}")
        own = _is_own(fn.__globals__.get("__name__"))
        if not own and "<locals>" not in fn.__code__.co_qualname:  # found by its name
            self._text(fn.__module__ or "")
            return
        attributes = vars(fn)
        if "dispatch" in attributes and "registry" in attributes:  # functools.singledispatch, whose closure has a cache
            self._many("registry", [attributes["registry"]])
            return
        cells = [cell.cell_contents for cell in fn.__closure__ or () if _is_filled(cell)]
        self._many("body", [fn.__code__, fn.__defaults__, fn.__kwdefaults__, cells, attributes])
        if own:
            names = _names(fn.__code__)
            for name in sorted(names & fn.__globals__.keys()):
                self._many(name, [fn.__globals__[name]])
                if isinstance(fn.__globals__[name], ModuleType):
                    self._attributes(fn.__globals__[name], names, set())
            package = fn.__globals__.get("__package__") or ""
            self._source([name for one in _imports_of_code(fn.__code__) for name in _module_names(one, package)])

    def _attributes(self, module: ModuleType, names: set[str], seen: set[int]) -> None:
        """Add what a function may take from a module of the user, and from the modules in it."""
        if not _is_own(module.__name__) or id(module) in seen:
            return
        seen.add(id(module))
        for name in sorted(names & vars(module).keys()):
            self._many(name, [vars(module)[name]])
            if isinstance(vars(module)[name], ModuleType):
                self._attributes(vars(module)[name], names, seen)

    def _source(self, names: Iterable[str]) -> None:
        """Add the source of the user's modules among ``names``, and of those that they import."""
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in self._sources:
                continue
            self._sources.add(name)
            spec = _own_spec(name)
            if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
                continue
            with open(spec.origin, "rb") as file:
                source = file.read()
            self._bytes(f"source {name} {len(source)}", source)
            package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
            waiting += [other for one in _imports_of_source(source) for other in _module_names(one, package)]

    def _class(self, kind: type) -> None:
        self._text(f"class {kind.__module__}.{kind.__qualname__}")
        if _is_own(kind.__module__):
            members = {name: value for name, value in vars(kind).items() if _is_significant(name, value)}
            self._many("members", sorted(members.items()))
            self._many("bases", [*kind.__bases__, type(kind)])

    def _instance(self, value: Any) -> None:
        kind = type(value)
        self.add(kind)
        if callable(wrapped := getattr(value, "__wrapped__", None)):  # such as a function with functools.cache
            self.add(wrapped)
        if kind.__module__.startswith("datasets.") and isinstance(getattr(value, "_fingerprint", None), str):
            self._text(value._fingerprint)
            return
        if kind.__module__.startswith("pyarrow") and hasattr(value, "to_batches"):  # a table
            self._text(str(value.schema))
            for batch in value.to_batches():
                for column in batch.columns:
                    self._many("column", [column.to_pylist()])
            return
        try:
            known: Any = copyreg.dispatch_table.get(kind)
            reduced = value.__reduce_ex__(4) if known is None else known(value)
        except Exception:  # objects refuse to be pickled in many ways
            self._differ(f"{kind.__module__}.{kind.__qualname__}")
            return
        if isinstance(reduced, str):
            self._many("global", [str(getattr(value, "__module__", None)), reduced])
            return
        made, arguments, state, members, pairs, *setter = [*reduced, None, None, None][:6]
        if isinstance(state, dict):
            kept = {k: v for k, v in state.items() if not isinstance(getattr(kind, str(k), None), cached_property)}
            state = kept or None  # as it is before a property is computed
        self._many("reduced", [made, arguments, state, [*(members or ())], [*(pairs or ())], setter])


def _is_ours(kind: type) -> bool:
    """Return whether a class is one of Penstock's, whose fields say themselves whether they count, or extends one."""
    return any(base.__module__.startswith("penstock.") for base in inspect.getmro(kind))


def _is_global_random(value: Any) -> bool:
    """Return whether this is the generator of ``random.random`` or ``np.random.normal``, which no run depends on."""
    if isinstance(value, random.Random):
        return value is getattr(random.random, "__self__", None)
    return isinstance(value, np.random.RandomState) and value is np.random.mtrand._rand


def _is_significant(name: str, value: Any) -> bool:
    """Return whether a member of a class is more than what Python keeps about every class."""
    if name.startswith("__") and name.endswith("__"):
        return isinstance(value, FunctionType | staticmethod | classmethod | property) or name in _DECLARED
    return name != "_abc_impl"


def _parts(member: Any) -> list[Any]:
    return [member.fget, member.fset, member.fdel] if isinstance(member, property) else [member.__func__]


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> set[str]:
    """Return the names that a function and the functions inside it may look up."""
    return set(code.co_names).union(*(_names(inner) for inner in _nested(code)))


def _nested(code: CodeType) -> Iterator[CodeType]:
    return (const for const in code.co_consts if isinstance(const, CodeType))


def _imports_of_code(code: CodeType) -> Iterator[_Import]:
    """Yield what a function and the functions inside it import."""
    before: list[Any] = [0, None]  # the level and the names are loaded right before
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            yield step.argval, before[1] or (), before[0]
        before = [before[1], step.argval]
    for inner in _nested(code):
        yield from _imports_of_code(inner)


@lru_cache(1024)
def _imports_of_source(source: bytes) -> list[_Import]:
    """Return what the source of a module imports; nothing if it is not Python's."""
    found: list[_Import] = []
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found += [(alias.name, (), 0) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found.append((node.module or "", tuple(alias.name for alias in node.names), node.level))
    return found


def _module_names(one: _Import, package: str) -> list[str]:
    """Return the modules that an import may load: the packages on the way, and the names, which may be modules."""
    module, taken, level = one
    with suppress(ImportError, ValueError):
        module = importlib.util.resolve_name("." * level + module, package) if level else module
        parts = module.split(".")
        return [".".join(parts[: end + 1]) for end in range(len(parts))] + [f"{module}.{name}" for name in taken]
    return []


def _own_spec(name: str) -> ModuleSpec | None:
    """Return where a module of the user is, without importing it; None if it is not the user's."""
    top, *rest = name.split(".")
    if top in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # such as __main__, which has none
        spec = None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return None if spec is None or spec.origin is None or _is_installed(spec.origin) else spec


@cache
def _installed() -> tuple[str, ...]:
    folders = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(
        f"{os.path.realpath(folder)}{os.sep}" for folder in {*folders, os.path.dirname(os.path.dirname(__file__))}
    )


def _is_installed(path: str) -> bool:
    return os.path.realpath(path).startswith(_installed())


def _is_own(module: Any) -> bool:
    """Return whether a module is the user's: neither built in, nor of the standard library, nor installed."""
    if module in sys.builtin_module_names:
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:  # a program that was typed in, or a function that was sent here
        return module == "__main__" or module not in sys.modules
    return not _is_installed(path)
