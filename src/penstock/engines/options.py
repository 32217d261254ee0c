"""The options of each engine, checked when ``on()`` is called."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from penstock.engines.run import ENGINES
from penstock.errors import PlanError
from penstock.plan import EngineOptions, check_callable, check_choice, check_count, check_flag, size_in_bytes
from penstock.storage import local_path
from penstock.storage.protocol import scheme

EngineName = Literal["local", "ray", "serial"]
OPTIONS: dict[str, frozenset[str]] = {
    "local": frozenset({"cpus", "devices", "memory", "monitor", "observer", "ordered", "report"}),
    "ray": frozenset({"address", "cpus", "memory", "monitor", "observer", "ordered", "report"}),
    "serial": frozenset({"monitor", "observer", "report"}),
}


def engine_options(name: str, options: dict[str, object]) -> EngineOptions:
    """Check the name and the options of an engine, and return them as a value.

    Raises:
        PlanError: The engine does not exist, has no such option, or the value of an option is invalid.
    """
    check_choice("engine", name, ENGINES)
    if unknown := sorted(options.keys() - OPTIONS[name]):
        known = ", ".join(sorted(OPTIONS[name])) or "none"
        raise PlanError(f"the {name} engine has no option {', '.join(unknown)}; it has: {known}")
    if "cpus" in options:
        check_count("cpus", options["cpus"], least=1)
    if "memory" in options:
        size_in_bytes("memory", options["memory"])  # type: ignore[arg-type]
    if not isinstance(options.get("address"), str | None):
        raise PlanError(f"address={options['address']!r}: expected an address such as 'auto' or 'ray://host:10001'")
    for flag in ("ordered", "report"):
        check_flag(flag, options.get(flag, True))
    if options.get("observer") is not None:
        check_callable("observer", options["observer"])
    if options.get("monitor") is not None:
        options = {**options, "monitor": _folder(options["monitor"])}
    if options.get("devices") is not None:
        options = {**options, "devices": _devices(options["devices"])}
    return EngineOptions(name, tuple(sorted(options.items())))


def _folder(monitor: object) -> str:
    folder = os.fspath(monitor) if isinstance(monitor, str | os.PathLike) else ""
    if not folder or scheme(folder) != "file":
        raise PlanError(f"monitor={monitor!r}: expected a local folder, such as 'runs/monitor'")
    return local_path(folder)


def _devices(devices: object) -> tuple[object, ...]:
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise PlanError(f"devices={devices!r}: expected a list such as ['cuda:0', 'cuda:1']")
    return tuple(devices)
