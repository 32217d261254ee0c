"""Names of a room that are loaded when they are first used: whoever needs one waits for no other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(room: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package: ``where`` says in which of its modules each name is."""
    # A module that is loaded takes its own name in the package, and this is never asked for it.
    assert not where.keys() & set(where.values()), f"{room}: a name is that of a module"

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"{room} has no {name!r}; it has {', '.join(sorted(where))}")
        value = getattr(import_module(f"{room}.{where[name]}"), name)
        setattr(sys.modules[room], name, value)
        return value

    return load
