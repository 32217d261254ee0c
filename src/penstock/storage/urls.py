"""What the user writes for places: braces, lists, globs, folders; told apart without opening anything."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from penstock.errors import PlanError, StorageError
from penstock.storage.protocol import Storage, open_storage, redacted, scheme

STDIN = "-"
_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+):", re.IGNORECASE)
_RANGE = re.compile(r"^(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?$")
_LETTERS = re.compile(r"^(?:([a-z])\.\.([a-z])|([A-Z])\.\.([A-Z]))(?:\.\.(-?\d+))?$")
_MOST = 1_000_000  # names one pattern may mean: more is a slip of the keyboard


def spell(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Read what the user wrote as a tuple of patterns: ``"a.tar::b.tar"``, a path, or a list of them.

    Raises:
        PlanError: it is none of these, or names nothing.
    """
    if isinstance(urls, str | os.PathLike):
        out = tuple(part for part in os.fspath(urls).split("::") if part)
    elif isinstance(urls, Iterable) and not isinstance(urls, bytes):
        out = tuple(part for url in urls for part in spell(url))
    else:
        raise PlanError(f"{urls!r}: give a path or URL, or a list of them")
    if not out:
        raise PlanError("no path or URL is given")
    return out


def braces(pattern: str) -> Iterator[str]:
    """Expand ``{0000..0147}``, ``{0..10..5}``, ``{a..f}`` and ``{a,b}``, also nested, as a shell does.

    Raises:
        PlanError: more than a million names.

    >>> list(braces("train-{08..10}.tar"))
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    """
    for number, name in enumerate(_braces(pattern)):
        if number >= _MOST:
            raise PlanError(f"{pattern!r} means more than {_MOST:,} names")
        yield name


def _braces(pattern: str) -> Iterator[str]:
    start = pattern.find("{")
    if start < 0:
        yield pattern
        return
    end = _closing(pattern, start)
    before, inside, after = pattern[:start], pattern[start + 1 : end], pattern[end + 1 :]
    choices = _choices(inside) if end >= 0 else None
    if choices is None:  # a brace without a partner, or around a lone word, is a letter like any other
        yield from (f"{pattern[: start + 1]}{rest}" for rest in _braces(pattern[start + 1 :]))
        return
    for choice in choices:
        yield from (f"{before}{choice}{rest}" for rest in _braces(after))


def _closing(pattern: str, start: int) -> int:
    depth = 0
    for place in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[place], 0)
        if depth == 0:
            return place
    return -1


def _choices(inside: str) -> Iterable[str] | None:
    if match := _RANGE.match(inside):
        first, last = match[1], match[2]
        wide = max(len(first), len(last)) if _padded(first) or _padded(last) else 0
        return (f"{number:0{wide}d}" for number in _way(int(first), int(last), match[3]))
    if match := _LETTERS.match(inside):
        first, last = (match[1], match[2]) if match[1] else (match[3], match[4])
        return map(chr, _way(ord(first), ord(last), match[5]))
    parts = _split(inside)
    return [name for part in parts for name in _braces(part)] if len(parts) > 1 else None


def _way(first: int, last: int, step: str | None) -> range:
    """From first to last, up or down, both included."""
    stride = abs(int(step or 1)) or 1
    return range(first, last + 1, stride) if first <= last else range(first, last - 1, -stride)


def _padded(number: str) -> bool:
    digits = number.lstrip("-")
    return len(digits) > 1 and digits.startswith("0")


def _split(inside: str) -> list[str]:
    """Split at the commas of the outermost level."""
    parts, depth = [""], 0
    for letter in inside:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def local_path(url: str) -> str:
    """The path a URL means on this machine.

    Raises:
        StorageError: it lies somewhere this version cannot read.
    """
    if url.startswith("file:"):
        path = url.removeprefix("file:")
        return "/" + path.lstrip("/") if path.startswith("/") else path
    scheme = _SCHEME.match(url)
    if scheme:
        raise StorageError(f"there is no storage for {scheme[1]}: URLs here; give a local path", url)
    return url


def expand(patterns: Sequence[str], suffixes: Sequence[str], storage: Storage | None = None) -> list[str]:
    """List the files that patterns mean, in the order they were given; folders and globs by name.

    Names spelled out are not looked for: whoever opens them finds out.

    Args:
        patterns: What ``spell`` gave.
        suffixes: What a file in a folder must end with; none: any.
        storage: Where URLs other than ``file:`` lie; ``None``: as their scheme says.

    Raises:
        StorageError: a folder or a glob holds nothing.
    """
    out: list[str] = []
    for pattern in patterns:
        names = list(braces(pattern))
        for name in names:
            if scheme(name) != "file":
                out += _remote(name, suffixes, open_storage(name, storage), may_be_folder=len(names) < 100)
                continue
            path = local_path(name)
            if glob.has_magic(path) and not os.path.exists(path):
                found = sorted(glob.glob(path, recursive=True))
                out += [p for p in found if os.path.isfile(p)] or _nothing(name)
            elif len(names) < 100 and os.path.isdir(path):
                out += _listed(path, suffixes) or _nothing(name)
            else:
                out.append(name)
    return out


def _listed(folder: str, suffixes: Sequence[str]) -> list[str]:
    ends = tuple(suffixes or ("",))
    with os.scandir(folder) as entries:  # which knows what is a file without asking for each
        names = [e.name for e in entries if not e.name.startswith(".") and e.name.endswith(ends) and e.is_file()]
    return [os.path.join(folder, name) for name in sorted(names)]


def _remote(name: str, suffixes: Sequence[str], storage: Storage, may_be_folder: bool) -> list[str]:
    """What a URL means elsewhere; over HTTP, where nothing can be listed, itself."""
    if scheme(name) in ("http", "https"):
        return [name]
    if glob.has_magic(name):
        folder = name[: re.search(r"[*?[]", name).start()].rpartition("/")[0]  # type: ignore[union-attr]
        shape = _shape(name)
        return [one.url for one in storage.list(folder) if shape.fullmatch(one.url)] or _nothing(redacted(name))
    ends, last = tuple(suffixes), name.rsplit("/", 1)[-1]
    is_file = last.endswith(ends) if ends else "." in last
    if last and (is_file or not may_be_folder):
        return [name]
    below = name.rstrip("/") + "/"
    inside = ((one.url, one.url.removeprefix(below)) for one in storage.list(below))
    found = [url for url, rest in inside if "/" not in rest and rest[:1] != "." and rest.endswith(ends or ("",))]
    return found or ([name] if last else _nothing(redacted(name)))


def _shape(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression: a star stays within a folder, two alone mean any folders; hidden is hidden."""
    *folders, last = pattern.split("/")
    out = [r"(?:[^/.][^/]*/)*" if part == "**" else f"{_segment(part)}/" for part in folders]
    return re.compile("".join([*out, r"(?:[^/.][^/]*/)*[^/.][^/]*" if last == "**" else _segment(last)]))


def _segment(part: str) -> str:
    hidden = "" if part.startswith(".") else r"(?!\.)"
    letters = re.sub(r"\*+", "*", part)
    out = ""
    while letters:
        match = re.match(r"\[(!?)(\]?[^\]]*)\]|.", letters, re.DOTALL)
        assert match is not None
        whole, letters = match[0], letters[match.end() :]
        if match[2]:
            out += f"[{'^/' if match[1] else ''}{match[2].replace(chr(92), chr(92) * 2).replace('[', chr(92) + '[')}]"
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(whole) or re.escape(whole)
    return hidden + out


def _nothing(name: str) -> list[str]:
    raise StorageError("nothing is there", name)


def relative(paths: Sequence[str]) -> list[str]:
    """The names of files below their common root; one that comes twice gets a number.

    >>> relative(["/data/a/x.tar", "/data/b/x.tar"])
    ['a/x.tar', 'b/x.tar']
    """
    if len({os.path.dirname(path) for path in paths}) == 1:
        names = [os.path.basename(path) for path in paths]
    else:
        whole = [os.path.abspath(path) for path in paths]
        root = os.path.commonpath([os.path.dirname(path) for path in whole])
        names = [os.path.relpath(path, root).replace(os.sep, "/") for path in whole]
    seen: dict[str, int] = {}
    for number, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[number] = f"{name}#{seen[name]}"
    return names
