"""How datasets are shown: as text by ``explain()``, ``schema()`` and ``show()``, in notebooks as boxes and tables."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from penstock.codecs.markup import Markup, tag
from penstock.codecs.previews import picture, preview
from penstock.engines import Program, Segment, split_problem
from penstock.errors import message_of
from penstock.plan import Plan
from penstock.relations import type_of

SHOWN_SAMPLES = 3
_SIDE = 120  # pixels of a thumbnail
_BOX = (
    "display:inline-block;border:1px solid #8888;border-radius:6px;padding:2px 8px;margin:2px 0;font-family:monospace"
)
_CELL = "text-align:left;vertical-align:top;padding:3px 12px 3px 0"
_SOFT = "opacity:0.7"


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


class Schema(dict[str, str]):
    """The fields of a sample and their types; a table in a notebook."""

    def _repr_html_(self) -> str:
        rows = [tag("tr", _cell(name), _cell(kind)) for name, kind in self.items()]
        return tag("table", tag("tr", _head("field"), _head("type")), rows)


class Explanation(str):
    """How a plan runs, as text; a notebook shows it line by line."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return tag("pre", str(self))


def dataset_html(plan: Plan, length: int | None, take: Callable[[], Sequence[Any]] | None) -> str:
    """Return a dataset as HTML.

    Args:
        plan: The plan.
        length: The number of samples or batches, if it is known.
        take: Returns a few samples; None if that would be expensive.
    """
    count = "length not known without running" if length is None else f"{length:,} items"
    parts: list[Any] = [tag("div", tag("b", "Dataset"), " ", tag("span", count, style=_SOFT)), plan_boxes(plan)]
    if take is not None:
        parts.append(_samples(take))
    return tag("div", parts)


def plan_boxes(plan: Plan) -> Markup:
    """Return the source and the stages of a plan as boxes, in order."""
    names = [line.strip().removeprefix(".") for line in plan.describe().splitlines()]
    boxes: list[Any] = []
    for number, name in enumerate(names):
        boxes += ([" → "] if number else []) + [tag("span", name, style=_BOX)]
    return tag("div", boxes, style="margin:4px 0")


def _samples(take: Callable[[], Sequence[Any]]) -> Markup:
    try:
        samples = [_fields(item) for item in take()]
    except Exception as exc:  # the user's functions may raise anything, and a display must not
        return tag("div", f"No sample can be shown: {message_of(exc)}", style=_SOFT)
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    types = {name: next(type_of(sample[name]) for sample in samples if name in sample) for name in names}
    rows = [
        tag("tr", _cell(tag("b", name)), _cell(types[name]), [_cell(_shown(name, sample)) for sample in samples])
        for name in names
    ]
    return tag("table", rows)


def _fields(item: Any) -> dict[str, Any]:
    if isinstance(item, dict):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple):
        return {str(number): value for number, value in enumerate(item)}
    return {"item": item}


def _shown(name: str, sample: dict[str, Any]) -> Any:
    if name not in sample:
        return ""
    shown = preview(name, sample[name])
    if shown.kind == "image" and shown.problem is None:
        try:
            kind, data = picture(name, sample[name], _SIDE)
        except ValueError as exc:
            return str(exc)
        source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return [tag("img", src=source, alt=shown.summary), tag("div", shown.summary, style=_SOFT)]
    text = shown.text if shown.kind in ("text", "number", "json") else shown.summary
    return text if len(text) <= 80 else f"{text[:77]}..."


def _cell(content: Any) -> Markup:
    return tag("td", content, style=_CELL)


def _head(content: str) -> Markup:
    return tag("th", content, style=_CELL)
