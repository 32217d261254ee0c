"""The page of stages: a sample before and after each stage, with the order, seed and randomness of training."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from penstock.codecs.markup import Markup, tag
from penstock.codecs.previews import preview
from penstock.dataset import Dataset
from penstock.engines import Program, Run
from penstock.errors import PlanError, message_of
from penstock.order import Order
from penstock.plan import Plan, Stage, unshuffled
from penstock.plan.values import EngineOptions
from penstock.view.layout import field_view, link, note

_MAX_OUTPUTS = 4  # of one sample that are shown after a stage that returns several
_CACHED = 32  # samples whose outputs are kept, for the pictures of a page
_MAX_EPOCH = 1_000_000


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a sample is after a stage.

    Attributes:
        stage: The stage, as it describes itself.
        outputs: The outputs; none if the stage removed the sample.
        problem: Why the stage failed.
    """

    stage: str
    outputs: list[dict[str, Any]]
    problem: str | None = None


class StageViewer:
    """Runs a plan on single samples, stage by stage; safe to use from threads."""

    def __init__(self, ds: Dataset) -> None:
        self._plan = replace(ds.plan, engine=EngineOptions("serial"), cut=None)
        self._orders: dict[tuple[int, bool], tuple[Program, Order]] = {}
        self._outputs: OrderedDict[tuple[int, int, bool], list[StageOutput]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def stages(self) -> list[Stage]:
        """The stages that process one sample at a time, up to the first that joins samples."""
        found: list[Stage] = []
        for stage in self._plan.body:
            if stage.scope.value != "each":
                break
            found.append(stage)
        return found

    @property
    def joins(self) -> Stage | None:
        """The first stage that joins samples, if there is one; it and the stages after it are not shown."""
        return next((stage for stage in self._plan.body if stage.scope.value != "each"), None)

    def size(self, epoch: int, stored: bool) -> int:
        """Return the number of positions of an epoch."""
        return self._order(epoch, stored)[1].size

    def outputs(self, position: int, epoch: int, stored: bool) -> list[StageOutput]:
        """Return the sample at a position of an epoch as it is stored, and after each stage.

        Args:
            position: The position.
            epoch: The epoch, which the randomness of stages depends on too.
            stored: Whether positions are those of the stored order, or those of the epoch's order.

        Raises:
            PlanError: There is no such position.
        """
        key = (position, epoch, stored)
        with self._lock:
            if key in self._outputs:
                return self._outputs[key]
        _, order = self._order(epoch, stored)
        if not 0 <= position < order.size:
            raise PlanError(f"there is no position {position:,}: the epoch has {order.size:,}")
        found = []
        for number in range(len(self.stages) + 1):
            name = "as stored" if not number else self.stages[number - 1].describe()
            found.append(self._after(name, number, position, epoch, stored))
            if found[-1].problem is not None or not found[-1].outputs:
                break
        with self._lock:
            self._outputs[key] = found
            if len(self._outputs) > _CACHED:
                self._outputs.popitem(last=False)
        return found

    def _after(self, name: str, number: int, position: int, epoch: int, stored: bool) -> StageOutput:
        """Run the plan up to a stage: stages keep their numbers, which their randomness depends on."""
        try:
            program, order = self._opened(self._upto(number, stored), epoch)
            run = Run(program, order, epoch, program.start(order, None).only(position))
            items = []
            for item in run.items():
                items.append(_fields(item))
                if len(items) == _MAX_OUTPUTS:
                    break
            run.close()
            return StageOutput(name, items)
        except Exception as exc:  # the user's functions may raise anything
            cause = exc.__cause__ or exc
            return StageOutput(name, [], message_of(cause) if cause is not exc else str(exc))

    def _upto(self, number: int, stored: bool) -> Plan:
        """Return the plan with all stages that change the order, and the first ``number`` of the others."""
        plan = unshuffled(self._plan) if stored else self._plan
        kept, left = [], number
        for stage in plan.stages:
            if isinstance(stage, Stage):
                left -= 1
                if left < 0:
                    continue
            kept.append(stage)
        return replace(plan, stages=tuple(kept))

    def _order(self, epoch: int, stored: bool) -> tuple[Program, Order]:
        key = (epoch, stored)
        if key not in self._orders:
            self._orders = {key: self._opened(self._upto(0, stored), epoch)}
        return self._orders[key]

    def _opened(self, plan: Plan, epoch: int) -> tuple[Program, Order]:
        program = Program(plan)
        order = program.order(epoch)
        if order.size < 0:
            raise PlanError("the counts of the shards are not known; run `penstock index` on them")
        return program, order


def _fields(item: Any) -> dict[str, Any]:
    if isinstance(item, dict):
        return {str(name): value for name, value in item.items() if name not in ("__url__",)}
    if isinstance(item, tuple):
        return {str(number): value for number, value in enumerate(item)}
    return {"item": item}


def stages_page(viewer: StageViewer, position: int, epoch: int, stored: bool) -> list[Any]:
    """Return the content of the page of one sample and the stages."""
    outputs = viewer.outputs(position, epoch, stored)
    order = "stored" if stored else "training"
    columns = [
        _column(output, f"/stage-media/{epoch}/{int(stored)}/{position}/{number}")
        for number, output in enumerate(outputs)
    ]
    joins = viewer.joins
    after = f"{joins.describe()} joins samples: it and the stages after it are not shown." if joins else None
    size = viewer.size(epoch, stored)
    return [
        tag("h1", "Stages", tag("small", f"position {position:,} of {size:,}, epoch {epoch:,}")),
        _controls(position, epoch, order),
        tag("ol", columns, class_="stages", aria_label="The sample after each stage"),
        note(after) if after else None,
        _moves(position, epoch, order, size),
    ]


def _controls(position: int, epoch: int, order: str) -> Markup:
    def field(name: str, label: str, value: Any) -> Markup:
        return tag("label", tag("span", label), tag("input", name=name, value=value, inputmode="numeric"))

    options = [tag("option", name, value=name, selected=name == order) for name in ("training", "stored")]
    chosen = tag("label", tag("span", "Order"), tag("select", options, name="order"))
    form = (field("at", "Position", position), field("epoch", "Epoch", epoch), chosen, tag("button", "Show"))
    return tag("form", *form, action="/stages", class_="controls")


def _moves(position: int, epoch: int, order: str, size: int) -> Markup:
    def move(name: str, at: int, rel: str) -> Markup:
        known = 0 <= at < size
        return (
            tag("a", name, href=link("/stages", at=at, epoch=epoch, order=order), rel=rel)
            if known
            else tag("span", name)
        )

    again = link("/stages", at=position, epoch=min(epoch + 1, _MAX_EPOCH), order=order)
    return tag(
        "nav",
        move("Previous", position - 1, "prev"),
        tag("a", "The same place in the next epoch", href=again),
        move("Next", position + 1, "next"),
        class_="pages",
        aria_label="Positions",
    )


def _column(output: StageOutput, source: str) -> Markup:
    parts: list[Any] = [tag("h2", output.stage)]
    if output.problem is not None:
        parts.append(note(output.problem, kind="error"))
    elif not output.outputs:
        parts.append(note("The stage removed the sample.", kind="warning"))
    for number, fields in enumerate(output.outputs):
        if len(output.outputs) > 1:
            parts.append(tag("h3", f"output {number}"))
        for place, (name, value) in enumerate(fields.items()):
            shown = preview(name, value)
            summary = tag("span", shown.summary, class_="summary") if shown.kind != "audio" else None
            view = field_view(name, shown, f"{source}/{number}/{place}")
            parts.append(tag("div", tag("b", name), " ", summary, view, class_="stage-field"))
    return tag("li", parts, class_="stage")
