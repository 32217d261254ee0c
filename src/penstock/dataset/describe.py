"""Datasets as text: ``explain()``, ``schema()`` and ``show()``."""

from __future__ import annotations

from typing import Any

from penstock.engines import Program, Segment, split_problem
from penstock.relations import type_of


def explain_plan(program: Program) -> str:
    """Describe how a plan runs: what is fused, where, and with how many workers."""
    plan = program.plan
    orders = [stage.describe() for stage in plan.ordering] or ["as stored"]
    lines = [f"engine {plan.engine.name}, seed {program.seed}", f"order: {' -> '.join(orders)}"]
    for level in program.levels:
        if level.head is not None:
            lines.append(f"at the consumer: {level.head.stage.describe()}")
        lines += [_segment(segment, plan.engine.name) for segment in level.segments]
    fields = program.fields[0]
    if fields.only is not None:
        lines.append(f"fields read: {', '.join(sorted(fields.only)) or 'none'}")
    elif fields.excluded:
        lines.append(f"fields not read: {', '.join(sorted(fields.excluded))}")
    if plan.cut is not None and plan.cut.kind == "step":
        same = "" if not plan.changes_count else " not"
        lines.append(f"global batches are{same} the same for every world with equal world x batch")
    if (problem := split_problem(plan)) is not None:
        lines.append(f"if it is served, one server at a time sends all batches of a consumer: {problem}")
    lines.append(program.recut_problem or "can be restored under any number of ranks")
    return "\n".join(lines)


def _segment(segment: Segment, engine: str) -> str:
    resources = segment.resources
    if resources is None:
        return f"inline: {segment.describe()}"
    facts: list[str] = ["actors" if engine == "ray" else resources.on]
    facts.append("as many workers as cores" if resources.workers is None else f"workers {resources.workers}")
    facts += [f"cpus {resources.cpus:g}"] if resources.cpus is not None else []
    facts += [f"gpus {resources.gpus:g}"] if resources.gpus else []
    facts += [f"memory {resources.memory:,} bytes"] if resources.memory is not None else []
    facts += [f"{segment.rows} rows in a call"] if segment.rows > 1 else []
    return f"{', '.join(facts)}: {segment.describe()}"


def short_repr(value: Any) -> str:
    """Return a value as text of about sixty characters; the values in a dict or tuple are shortened one by one."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {short_repr(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(short_repr, value)) + ("," if len(value) == 1 else "") + ")"
    if getattr(value, "shape", None):
        return type_of(value)
    text = repr(value)
    long = f"... ({len(value)} {type(value).__name__})" if hasattr(value, "__len__") else "..."
    return text if len(text) <= 60 else text[:57] + long
