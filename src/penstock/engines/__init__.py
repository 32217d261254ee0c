"""HOW a plan runs: serial (the meaning) and local (threads). An engine reads scopes and resources, never stages."""

from __future__ import annotations

from penstock.engines.cursor import AnyCursor, Part, Start
from penstock.engines.program import Level, Program, Segment
from penstock.engines.run import ENGINES, Run
from penstock.errors import PlanError
from penstock.plan import EngineOptions, check_choice, check_count, size_in_bytes

OPTIONS: dict[str, frozenset[str]] = {
    "local": frozenset({"cpus", "memory", "ordered"}),
    "serial": frozenset(),
}


def engine_options(name: str, options: dict[str, object]) -> EngineOptions:
    """Check the choice of an engine.

    Raises:
        PlanError: there is no such engine, or it has no such option.
    """
    check_choice("engine", name, ENGINES)
    if unknown := sorted(options.keys() - OPTIONS[name]):
        known = ", ".join(sorted(OPTIONS[name])) or "none"
        raise PlanError(f"the {name} engine has no option {', '.join(unknown)}; it has: {known}")
    if "cpus" in options:
        check_count("cpus", options["cpus"], least=1)
    if "memory" in options:
        size_in_bytes("memory", options["memory"])  # type: ignore[arg-type]
    if not isinstance(options.get("ordered", True), bool):
        raise PlanError(f"ordered={options['ordered']!r}: give True or False")
    return EngineOptions(name, tuple(sorted(options.items())))


__all__ = [
    "ENGINES",
    "AnyCursor",
    "Level",
    "Part",
    "Program",
    "Run",
    "Segment",
    "Start",
    "engine_options",
]
