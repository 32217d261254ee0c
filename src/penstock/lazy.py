"""Public names of a package: written once, as the imports that type checkers see, and loaded when first used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

_BLOCK = "\nif TYPE_CHECKING:\n"


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a package from the imports in its ``__init__``.

    The imports stand under ``if TYPE_CHECKING:``, one name per line: ``from penstock.plan import col as col``.
    None of them runs until somebody asks for a name; then only the module of that name is imported.
    """
    modules = _imports(package)
    # Importing a submodule binds its name in the package, so the loader would never be asked for that name.
    taken = {name for name in modules if f"{package}.{name}" in modules.values()}
    assert not taken, f"{package}: {taken} are modules of the package too"

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(sorted(modules))}")
        module = modules[name]
        if module == package:  # a submodule
            value: Any = import_module(f"{package}.{name}")
        else:
            value = _attribute(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(modules), sorted(modules)


def _imports(package: str) -> dict[str, str]:
    """Read which module each name of a package comes from."""
    spec = sys.modules[package].__spec__
    source: str = spec.loader.get_source(package)  # type: ignore[union-attr]
    modules = {}
    for line in source.partition(_BLOCK)[2].splitlines():
        if not line.startswith("    "):
            break
        _, module, _, name, *_ = line.split()
        modules[name] = module
    return modules


def _attribute(module: str, name: str) -> Any:
    found = import_module(module)
    try:
        return getattr(found, name)
    except AttributeError:
        return import_module(f"{module}.{name}")
