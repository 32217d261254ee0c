"""What is made on first use: the public names of a package, written once as imports, and properties."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

_IMPORTS_HEADER = "\nif TYPE_CHECKING:\n"

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """A property that is computed once per object, without a lock on every Python.

        Python 3.11 holds one lock for all objects of a class: a value that runs a plan, whose threads compute the same
        property of other objects, would never be found.
        """

        def __init__(self, compute):
            super().__init__(compute)
            self.lock = nullcontext()


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package, derived from the imports in its ``__init__``.

    The imports are under ``if TYPE_CHECKING:``, one name per line: ``from penstock.plan import col as col``. No import
    runs until a name is used; then only the module that defines this name is imported. A package may define
    ``_instead_of(name)``, which returns what to write for a name that it does not have, or None.

    Raises:
        AssertionError: A public name is also the name of a submodule.
    """
    modules = _imports(package)
    # Importing a submodule binds its name in the package, so ``__getattr__`` would never be called for that name.
    clashes = {name for name in modules if f"{package}.{name}" in modules.values()}
    assert not clashes, f"{package}: {clashes} are also modules of the package"

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(_unknown(package, name, sorted(modules)), name=name, obj=sys.modules[package])
        module = modules[name]
        if module == package:  # a submodule
            value: Any = import_module(f"{package}.{name}")
        else:
            value = _attribute(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(modules), sorted(modules)


def _unknown(package: str, name: str, known: list[str]) -> str:
    """Return the text about a name that a package does not have."""
    problem = f"module {package!r} has no attribute {name!r}"
    instead = vars(sys.modules[package]).get("_instead_of")
    if instead is not None and (advice := instead(name)) is not None:
        return f"{problem}; write {advice}"
    near = get_close_matches(name, known, 1)
    return f"{problem}; did you mean {near[0]}?" if near else f"{problem}; it has {', '.join(known)}"


def _imports(package: str) -> dict[str, str]:
    """Return the module from which each public name of a package is imported."""
    spec = sys.modules[package].__spec__
    source: str = spec.loader.get_source(package)  # type: ignore[union-attr]
    modules = {}
    for line in source.partition(_IMPORTS_HEADER)[2].splitlines():
        if not line.startswith("    "):
            break
        _, module, _, name, *_ = line.split()
        modules[name] = module
    return modules


def _attribute(module: str, name: str) -> Any:
    imported = import_module(module)
    try:
        return getattr(imported, name)
    except AttributeError:
        return import_module(f"{module}.{name}")
