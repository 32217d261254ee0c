"""What a user's program defines, by names such as ``train:ds``, ``train.py:ds`` and ``jobs.py:Splitter.run``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

from penstock.errors import PenstockError, PlanError, loading_error

NOT_A_FUNCTION = "{!r} does not name a function: write MODULE:FUNCTION, such as jobs:split or jobs.py:split"
_MAX_FUNCTIONS = 8  # that an error message suggests


def load_function(name: str) -> Callable[..., Any]:
    """Load the function that ``module:function`` or ``file.py:function`` names.

    Raises:
        PlanError: There is no such function, or its module cannot be loaded.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise PlanError(NOT_A_FUNCTION.format(name))
    module = _load_module(module_name, os.getcwd())
    function = _attribute(module, attribute)
    if not callable(function):
        functions = [public for public, value in vars(module).items() if callable(value) and public[:1] != "_"]
        shown = ", ".join(functions[:_MAX_FUNCTIONS]) + (", ..." if len(functions) > _MAX_FUNCTIONS else "")
        raise PlanError(f"{module_name} has no function {attribute!r}; it has {shown or 'none'}")
    return function  # type: ignore[no-any-return]


def load_attribute(name: str) -> Any:
    """Load what ``module:name`` or ``file.py:name`` names, in the same way.

    Raises:
        PlanError: There is no such name, or its module cannot be loaded.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise PlanError(f"{name!r}: write MODULE:NAME, such as train:ds or train.py:ds")
    found = _attribute(_load_module(module_name, os.getcwd()), attribute)
    if found is None:
        raise PlanError(f"{module_name} has no {attribute!r}")
    return found


def _attribute(found: Any, name: str) -> Any:
    """Return what ``name``, with dots for what is in classes, is in a module; None if there is no such name."""
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


@cache
def _load_module(name: str, folder: str) -> ModuleType:
    """Load a module once in each process; ``folder``, the current one, and that of a file are added to ``sys.path``."""
    sys.path.insert(0, folder)
    try:
        return _load_file(name) if name.endswith(".py") else _import(name)
    except PenstockError:
        raise
    except Exception as exc:
        raise loading_error(name, exc) from exc


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and not (name + ".").startswith(exc.name + "."):
            raise  # the module exists, but imports one that does not
        raise PlanError(f"there is no module {name!r} in the current folder or among the installed ones") from exc


def _load_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise PlanError(f"there is no file {path!r}")
    name = os.path.splitext(os.path.basename(path))[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    import_module("cloudpickle").register_pickle_by_value(module)  # remote workers cannot import it
    return module
