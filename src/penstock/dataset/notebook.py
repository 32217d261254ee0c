"""Datasets in a notebook: the plan as boxes, the length, the fields, and a few samples with thumbnails."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from penstock.codecs.markup import Markup, tag
from penstock.codecs.previews import picture, preview
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
