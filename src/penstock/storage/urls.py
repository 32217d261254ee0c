"""URL patterns: lists, braces, globs and folders, expanded to the names of files."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any
from urllib.parse import unquote

from penstock.errors import PlanError, StorageError
from penstock.plan import Traits
from penstock.storage.protocol import Storage, bare_url, exists, open_storage, redacted, scheme, unsigned

STDIN = "-"
_HOST = re.compile(r"^(?:https?|ftps?|sftp|ssh|smb)://[^/]*/*", re.IGNORECASE)
_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+):", re.IGNORECASE)
_DIGITS = re.compile(r"([0-9]+)")
_RANGE = re.compile(r"^(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?$")
_LETTERS = re.compile(r"^(?:([a-z])\.\.([a-z])|([A-Z])\.\.([A-Z]))(?:\.\.(-?\d+))?$")
_MAX_NAMES = 1_000_000  # a pattern that expands to more is a typing error
_MAX_FOLDERS = 100  # a pattern that expands to as many names or more lists files: none of them is probed as a folder


def traits_of(paths: Iterable[str], **more: Any) -> Traits:
    """Return the traits of a reader of these paths and URLs; ``more`` are traits that the paths do not decide."""
    schemes = {scheme(path) for path in paths}
    return Traits(remote=bool(schemes - {"file"}), sendable="memory" not in schemes, **more)


def folder_times(paths: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return when the local folders that hold these paths were changed last: by a file that was added or renamed."""
    folders = sorted({os.path.dirname(path) or "." for path in paths if scheme(path) == "file"})
    return tuple((folder, os.stat(folder).st_mtime_ns) for folder in folders if os.path.isdir(folder))


def url_patterns(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Split what the user wrote into patterns: ``"a.tar::b.tar"``, a path, or a list of them.

    Raises:
        PlanError: ``urls`` is none of these, or is empty.
    """
    if isinstance(urls, str | os.PathLike):
        patterns = tuple(pattern for pattern in os.fspath(urls).split("::") if pattern)
    elif isinstance(urls, Iterable) and not isinstance(urls, bytes):
        urls = sorted(urls, key=os.fspath) if isinstance(urls, Set) else urls  # the order of a set is not fixed
        patterns = tuple(pattern for url in urls for pattern in url_patterns(url))
    else:
        raise PlanError(f"{urls!r} is not a path, a URL, or a list of them")
    if not patterns:
        raise PlanError("the list of paths and URLs is empty")
    return patterns


def expand_braces(pattern: str) -> Iterator[str]:
    """Expand ``{0000..0147}``, ``{0..10..5}``, ``{a..f}`` and ``{a,b}``, also nested, like bash.

    Raises:
        PlanError: The pattern expands to more than a million names.

    >>> list(expand_braces("train-{08..10}.tar"))
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    """
    for number, name in enumerate(_braces(pattern)):
        if number >= _MAX_NAMES:
            raise PlanError(f"{redacted(pattern)!r} expands to more than {_MAX_NAMES:,} names")
        yield name


def _braces(pattern: str) -> Iterator[str]:
    start = pattern.find("{")
    if start < 0:
        yield pattern
        return
    end = _closing(pattern, start)
    before, inside, after = pattern[:start], pattern[start + 1 : end], pattern[end + 1 :]
    choices = _choices(inside) if end >= 0 else None
    if choices is None:  # an unmatched brace, or one around a single word, is an ordinary character
        yield from (f"{pattern[: start + 1]}{rest}" for rest in _braces(pattern[start + 1 :]))
        return
    for choice in choices:
        yield from (f"{before}{choice}{rest}" for rest in _braces(after))


def _closing(pattern: str, start: int) -> int:
    """Return where the brace that opens at ``start`` closes, or -1."""
    depth = 0
    for at in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[at], 0)
        if depth == 0:
            return at
    return -1


def _choices(inside: str) -> Iterable[str] | None:
    if match := _RANGE.match(inside):
        first, last = match[1], match[2]
        width = max(len(first), len(last)) if _is_padded(first) or _is_padded(last) else 0
        return (f"{number:0{width}d}" for number in _inclusive_range(int(first), int(last), match[3]))
    if match := _LETTERS.match(inside):
        first, last = (match[1], match[2]) if match[1] else (match[3], match[4])
        return map(chr, _inclusive_range(ord(first), ord(last), match[5]))
    choices = _split_commas(inside)
    return [name for choice in choices for name in _braces(choice)] if len(choices) > 1 else None


def _inclusive_range(first: int, last: int, step: str | None) -> range:
    """Return the numbers from ``first`` to ``last``, up or down, including ``last``."""
    stride = abs(int(step or 1)) or 1
    return range(first, last + 1, stride) if first <= last else range(first, last - 1, -stride)


def _is_padded(number: str) -> bool:
    digits = number.lstrip("-")
    return len(digits) > 1 and digits.startswith("0")


def _split_commas(inside: str) -> list[str]:
    """Split at the commas that are not inside braces."""
    choices, depth = [""], 0
    for letter in inside:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and not depth:
            choices.append("")
        else:
            choices[-1] += letter
    return choices


def local_path(url: str) -> str:
    """Return a path, or the path in a ``file:`` URL.

    Raises:
        StorageError: The URL has another scheme.
    """
    if url.startswith("file:"):
        path = re.sub("^//localhost/", "/", url.removeprefix("file:"))
        return "/" + path.lstrip("/") if path.startswith("/") else path
    scheme = _SCHEME.match(url)
    if scheme:
        raise StorageError(f"{scheme[1]}: URLs are not supported here; pass a local path", url)
    return url


def expand(patterns: Sequence[str], suffixes: Sequence[str], storage: Storage | None = None) -> list[str]:
    """Return the files that patterns match, in the order of the patterns.

    Those of a folder or glob are sorted by name, in natural order, which is the order in which numbered files are
    written: ``a-2`` comes before ``a-10``.

    A name without a glob is returned even if there is no such file: opening it reports the error.

    Args:
        patterns: The patterns that ``url_patterns`` returned.
        suffixes: What the files of a folder end with; empty: anything.
        storage: The storage of URLs other than ``file:``; ``None``: the one of their scheme.

    Raises:
        StorageError: A folder or glob has no matching files, or cannot be listed.
    """
    files: list[str] = []
    for pattern in patterns:
        names = list(expand_braces(pattern))
        may_be_folder = len(names) < _MAX_FOLDERS
        for name in names:
            if scheme(name) != "file":
                alone = len(patterns) == len(names) == 1
                files += _expand_remote(name, suffixes, open_storage(name, storage), may_be_folder, alone)
                continue
            path = local_path(name)
            if glob.has_magic(path) and not os.path.exists(path):
                found = sorted(glob.glob(path, recursive=True), key=natural_key)
                files += [path for path in found if os.path.isfile(path)] or _raise_no_files(name)
            elif may_be_folder and os.path.isdir(path):
                files += _folder_files(path, suffixes) or _raise_no_files(name)
            else:
                files.append(name)
    return files


def _folder_files(folder: str, suffixes: Sequence[str]) -> list[str]:
    endings = tuple(suffixes or ("",))
    with os.scandir(folder) as entries:  # knows which entries are files without a stat call for each
        visible = [entry for entry in entries if not entry.name.startswith(".")]
        names = [entry.name for entry in visible if entry.name.endswith(endings) and entry.is_file()]
    return [os.path.join(folder, name) for name in sorted(names, key=natural_key)]


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Return the key of a name for sorting: its numbers are compared as numbers.

    >>> sorted(["a-10.tar", "a-2.tar", "a-1.tar"], key=natural_key)
    ['a-1.tar', 'a-2.tar', 'a-10.tar']
    """
    return [int(part) if number % 2 else part for number, part in enumerate(_DIGITS.split(name))], name


def is_folder(url: str, storage: Storage) -> bool:
    """Return whether objects lie below a URL that is not one itself: some programs write folders named ``a.parquet``.

    URLs of servers are those of objects, and so are those on storages that cannot be listed.
    """
    if scheme(url) in ("http", "https") or glob.has_magic(url):
        return False
    try:
        return next(iter(storage.list(url + "/")), None) is not None and not exists(storage, url)
    except (OSError, NotImplementedError):
        return False


def _expand_remote(name: str, suffixes: Sequence[str], storage: Storage, may_be_folder: bool, alone: bool) -> list[str]:
    """Return the files that a remote URL matches; an HTTP URL with a query stands for one object.

    Only a URL that is given alone is looked up if its name is that of a file: each lookup takes a request.
    """
    http = scheme(name) in ("http", "https")
    if http and "?" in name:
        return [name]
    if http and re.search(r"[*[]", _path(name)):
        return _expand_http(name, storage)
    if not http and glob.has_magic(name):
        folder = name[: re.search(r"[*?[]", name).start()].rpartition("/")[0]  # type: ignore[union-attr]
        matcher = _glob_regex(name)
        urls = (entry.url for entry in storage.list(folder))
        return sorted((url for url in urls if matcher.fullmatch(url)), key=natural_key) or _as_written(name, storage)
    endings, last = tuple(suffixes), name.rsplit("/", 1)[-1]
    is_file = last.endswith(endings) if endings else "." in last
    if last and (is_file or http or not may_be_folder) and not (alone and is_folder(name, storage)):
        return [name]
    below = name.rstrip("/") + "/"
    inside = ((entry.url, entry.url.removeprefix(below)) for entry in storage.list(below))
    found = [url for url, rest in inside if "/" not in rest and rest[:1] != "." and rest.endswith(endings or ("",))]
    return sorted(found, key=natural_key) or ([name] if last else _raise_no_files(redacted(name)))


def _expand_http(name: str, storage: Storage) -> list[str]:
    """Return the objects that a glob matches on a server of WebDAV; any other has at most an object of that name.

    Raises:
        StorageError: The server cannot be listed, and there is no such object.
    """
    path = _path(name)
    folder = path[: re.search(r"[*[]", path).start()].rpartition("/")[0]  # type: ignore[union-attr]
    try:
        urls = [entry.url for entry in storage.list(name.removesuffix(path) + folder + "/")]
    except StorageError:
        if exists(storage, name):
            return [name]
        raise
    matcher = _glob_regex(unquote(path))
    found = sorted((url for url in urls if matcher.fullmatch(unquote(_path(url)))), key=natural_key)
    return found or _as_written(name, storage)


def _as_written(name: str, storage: Storage) -> list[str]:
    """Return the object whose name looks like a glob that matches nothing, such as ``a[1].tar``."""
    return [name] if "*" not in name and exists(storage, name) else _raise_no_files(redacted(name))


def _path(url: str) -> str:
    """Return the path of a URL of a server, from the slash after the host on."""
    return "/" + url.partition("://")[2].partition("/")[2] if url.count("/") > 2 else ""


def _glob_regex(pattern: str) -> re.Pattern[str]:
    """Compile a glob: ``*`` matches within a folder, ``**`` any folders; neither matches hidden names."""
    *folders, last = pattern.split("/")
    regexes = [r"(?:[^/.][^/]*/)*" if folder == "**" else f"{_name_regex(folder)}/" for folder in folders]
    return re.compile("".join([*regexes, r"(?:[^/.][^/]*/)*[^/.][^/]*" if last == "**" else _name_regex(last)]))


def _name_regex(pattern: str) -> str:
    """Return the regular expression of a glob without slashes."""
    not_hidden = "" if pattern.startswith(".") else r"(?!\.)"
    rest = re.sub(r"\*+", "*", pattern)
    regex = ""
    while rest:
        match = re.match(r"\[(!?)(\]?[^\]]*)\]|.", rest, re.DOTALL)
        assert match is not None
        token, rest = match[0], rest[match.end() :]
        if match[2]:
            regex += f"[{'^/' if match[1] else ''}{match[2].replace(chr(92), chr(92) * 2).replace('[', chr(92) + '[')}]"
        else:
            regex += {"*": "[^/]*", "?": "[^/]"}.get(token) or re.escape(token)
    return not_hidden + regex


def _raise_no_files(name: str) -> list[str]:
    raise StorageError("the folder or pattern matches no files", name)


def relative_names(paths: Sequence[str]) -> list[str]:
    """Return the names of files in the identity of their dataset: relative to their common root; repeats get a number.

    Users, queries and the hosts of servers are left out. Names that would then be the same keep the host, and a hash of
    the part of the query that a new signature does not change.

    >>> relative_names(["/data/a/x.tar", "/data/b/x.tar"])
    ['a/x.tar', 'b/x.tar']
    >>> relative_names(["https://me:word@host/x.tar?signature=1", "https://host/y.tar?signature=2"])
    ['x.tar', 'y.tar']
    """
    distinct = len(set(map(unsigned, paths)))
    names = _below_root([_without_host(path) for path in paths])
    if len(set(names)) < distinct:
        names = _below_root([bare_url(path) for path in paths])
    if len(set(names)) < distinct:
        names = [name + _query_hash(path) for name, path in zip(names, paths, strict=True)]
    counts: dict[str, int] = {}
    for number, name in enumerate(names):
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > 1:
            names[number] = f"{name}#{counts[name]}"
    return names


def _without_host(path: str) -> str:
    bare = bare_url(path)
    if scheme(path) in ("http", "https"):
        bare = unquote(bare)
    return _HOST.sub("/", bare, count=1)


def _below_root(paths: Sequence[str]) -> list[str]:
    """Return paths relative to the folder that holds all of them."""
    if len({os.path.dirname(path) for path in paths}) == 1:
        return [os.path.basename(path) for path in paths]
    absolute = [os.path.abspath(path) for path in paths]
    root = os.path.commonpath([os.path.dirname(path) for path in absolute])
    return [os.path.relpath(path, root).replace(os.sep, "/") for path in absolute]


def _query_hash(url: str) -> str:
    if unsigned(url) == bare_url(url):
        return ""
    return f"?{hashlib.blake2b(unsigned(url).partition('?... ')[2].encode(), digest_size=4).hexdigest()}"
