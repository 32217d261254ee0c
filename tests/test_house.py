"""Rules of the source tree that no linter knows: a true map, deep modules, mirrored tests, a quick start."""

from __future__ import annotations

import ast
import functools
import gc
import json
import re
import statistics
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "penstock"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAP = ROOT / "ARCHITECTURE.md"
TESTS = ROOT / "tests"
FOREIGN_NAMES = PACKAGE / "compat" / "webdataset"  # another library named its modules and functions
MIRROR = tomllib.loads((TESTS / "mirror.toml").read_text())

# `engines/` or `formats/tar.py`, but neither half of `and/or` nor the start of `docs/NNNN-*.md`.
PLACE = re.compile(r"(?<![\w./:-])(?:[\w.-]+/)*(?:[\w.-]+/|[\w-]+\.py)(?![\w*{</-]|\.\w)")

# Brackets, so that this file does not match itself.
FORBIDDEN = re.compile(r"\bTO[D]O\b|\bFIX[M]E\b|\bissue\s?[#]", re.IGNORECASE)
EMPTY_NAMES = {"base", "common", "core", "helper", "helpers", "manager", "misc", "util", "utils"}

START_BUDGET_S = 0.150

SHALLOW_LINES = 60
SHALLOW = {  # modules with few lines and one importer, and why they are modules nevertheless
    "engines/serial.py": "an engine like the others: a row in run.ENGINES, and the meaning of a plan",
}
SAME_EVERYWHERE = {  # top-level names that stand in several modules and mean the same there
    "I64": "an array type",
    "U8": "an array type",
    "U32": "an array type",
    "U64": "an array type",
    "Array": "an array type",
    "add_arguments": "what every module of a command has",
    "log": "the module's logger",
    "run": "what every module of a command and of an engine has",
}

# Starts are timed from within, so that the interpreter's own start does not count.
TIMED_START = """
import contextlib, io, json, runpy, sys, time
sys.argv = {argv!r}
begin = time.process_time()  # not wall time: it may be a busy machine
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    {action}
seconds = time.process_time() - begin
print(json.dumps([seconds, out.getvalue(), sorted(sys.modules)]))
"""
STARTS = {
    "import penstock": ("import penstock", ["-c"]),
    "penstock --help": ("runpy.run_module('penstock', run_name='__main__')", ["penstock", "--help"]),
}
HEAVY = {"numpy", "PIL", "torch", "pyarrow", "ray"}


def test_the_map_names_every_package() -> None:
    missing = sorted(set(_packages()) - set(_places_on_the_map()))
    assert not missing, f"{MAP.name} does not name {missing}"


def test_the_map_names_nothing_that_does_not_exist() -> None:
    gone = sorted(place for place in _places_on_the_map() if not _exists(place))
    assert not gone, f"{MAP.name} names {gone}"


def test_the_map_is_short() -> None:
    assert len(MAP.read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("`engines/` and order.py.", ["engines/", "order.py"]),
        ("one/two, either/or, a.b, docs/decisions/NNNN-*.md", []),
        ("src/penstock/formats/tar.py runs", ["src/penstock/formats/tar.py"]),
        ("s3://bucket/photos/ is a URL", []),
        ("cli/, viewer/.", ["cli/", "viewer/"]),
    ],
)
def test_places_are_told_from_prose(text: str, places: list[str]) -> None:
    assert PLACE.findall(text) == places


def test_every_module_says_what_it_is_for() -> None:
    assert not [str(module.relative_to(PACKAGE)) for module in MODULES if not ast.get_docstring(_tree(module))]


def test_every_folder_of_modules_is_a_package() -> None:
    loose = {str(path.parent) for path in MODULES if not (path.parent / "__init__.py").is_file()}
    assert not loose, f"no __init__.py in {sorted(loose)}"


def test_no_module_has_an_empty_name() -> None:
    named = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if FOREIGN_NAMES not in path.parents
        and EMPTY_NAMES & {part.removesuffix(".py").strip("_") for part in path.relative_to(PACKAGE).parts}
    }
    assert not named


def test_every_module_has_its_test_file() -> None:
    for module in MODULES:
        _check_its_test_file(module)


def _check_its_test_file(module: Path) -> None:
    name = str(module.relative_to(PACKAGE))
    own = TESTS / module.relative_to(PACKAGE).with_name(f"test_{module.name}")
    listed = MIRROR["covered_by"].get(name, [])
    if module.name == "__init__.py" and not listed:
        assert not list(_defines(module)), f"{name} has code of its own and needs a test"
    elif listed:
        assert not own.exists(), f"{own.name} exists: take {name} out of tests/mirror.toml"
        assert not [path for path in listed if not (TESTS / path).is_file()]
    else:
        assert own.is_file(), f"no {own.relative_to(ROOT)}; tests/mirror.toml may name the tests that cover {name}"


def test_the_list_of_covered_modules_names_only_modules() -> None:
    gone = [name for name in MIRROR["covered_by"] if not (PACKAGE / name).is_file()]
    assert not gone


def test_no_module_is_shallow() -> None:
    importers = _importers()
    shallow = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if path.name != "__init__.py"
        and FOREIGN_NAMES not in path.parents
        and len(path.read_text().splitlines()) < SHALLOW_LINES
        and len(importers[_module(path)]) == 1
    }
    assert shallow == set(SHALLOW), "merge it with its importer, or give the reason why it stands alone"


def test_a_name_means_one_thing() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for name in _defines(path) if FOREIGN_NAMES not in path.parents else ():
            where[name].append(str(path.relative_to(PACKAGE)))
    twice = {name: places for name, places in where.items() if len(places) > 1 and name not in SAME_EVERYWHERE}
    assert not twice


def test_a_class_has_a_name_of_its_own_even_if_it_is_private() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in _tree(path).body if FOREIGN_NAMES not in path.parents else ():
            if isinstance(node, ast.ClassDef):
                where[node.name.strip("_")].append(str(path.relative_to(PACKAGE)))
    twice = {name: places for name, places in where.items() if len(places) > 1}
    assert not twice


def test_no_source_leaves_work_for_later() -> None:
    marks = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _sources()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if FORBIDDEN.search(line)
    ]
    assert not marks, "\n".join(marks)


@pytest.mark.parametrize("start", STARTS)
def test_starting_is_quick_and_imports_nothing_heavy(start: str) -> None:
    action, argv = STARTS[start]
    runs = [_timed_start(action, argv) for _ in range(7)]
    _, _, modules = runs[0]
    assert not HEAVY & set(modules)
    assert statistics.median(seconds for seconds, _, _ in runs) < START_BUDGET_S


def test_help_names_the_command() -> None:
    _, out, _ = _timed_start(*STARTS["penstock --help"])
    assert "usage: penstock" in out


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(autouse=True, scope="module")
def _keep_trees() -> Iterator[None]:
    """Keep the trees of all modules without looking for garbage in them again and again, and forget them at the end."""
    gc.disable()
    yield
    gc.enable()
    _tree.cache_clear()


def _importers() -> dict[str, set[str]]:
    """Return the importers of each module; a public name of its package counts as a second importer."""
    known = {_module(path) for path in MODULES}
    importers: dict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("penstock"):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    target = full if full in known else node.module
                    importers[target].add(_module(path))
                    if path.name == "__init__.py":
                        importers[target].add(f"{_module(path)} as a public name")
    return importers


def _defines(path: Path) -> Iterator[str]:
    """Yield the public top-level names that a module defines."""
    for node in _tree(path).body:
        names = []
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        yield from (name for name in names if not name.startswith("_"))


def _packages() -> Iterator[str]:
    """Yield every package and every module beside them, written as the map writes it."""
    for path in MODULES:
        place = path.relative_to(PACKAGE)
        if path.name == "__init__.py" and path.parent != PACKAGE:
            yield f"{place.parent}/"
        elif len(place.parts) == 1 and not path.name.startswith("__"):
            yield path.name


def _places_on_the_map() -> set[str]:
    return {place.removeprefix("src/penstock/") for place in PLACE.findall(MAP.read_text())}


def _exists(place: str) -> bool:
    """Tell whether a place on the map is a path from the root, or one within the package."""
    is_there = Path.is_dir if place.endswith("/") else Path.is_file
    return any(is_there(start / place) for start in (ROOT, ROOT / "src", PACKAGE))


def _sources() -> Iterator[Path]:
    for folder in ("src", "tests", "examples", "benchmarks"):
        found = sorted((ROOT / folder).rglob("*.py"))
        yield from (path for path in found if not any(part.startswith(".") for part in path.relative_to(ROOT).parts))


def _timed_start(action: str, argv: list[str]) -> tuple[float, str, list[str]]:
    """Run an action in a new interpreter; return its seconds, its output, and the modules then loaded."""
    script = TIMED_START.format(argv=argv, action=action)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, out, modules = json.loads(done.stdout)
    return seconds, out, modules
