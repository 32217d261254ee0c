"""Devices for stages that request them: find them, assign them to workers, and copy tensors to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engines.segments import Segment
from penstock.errors import EngineError
from penstock.plan import Block, Context, PlacedStage, Stage


def available_devices() -> tuple[str, ...]:
    """Return the GPUs that torch sees; none if torch is not installed."""
    try:
        import torch
    except ImportError:
        return ()
    return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))


def assign_devices(segments: Sequence[Segment], declared: Sequence[Any] | None) -> dict[int, list[Any]]:
    """Assign devices to workers: segment number -> the device of each worker, for segments that request devices.

    Args:
        segments: All segments of a plan.
        declared: The devices to use; None: the GPUs that torch sees.

    Raises:
        EngineError: There are fewer devices than the plan requests.
    """
    requesting = [
        (number, segment) for number, segment in enumerate(segments) if segment.resources and segment.resources.gpus
    ]
    if not requesting:
        return {}
    devices = tuple(available_devices() if declared is None else declared)
    out: dict[int, list[Any]] = {}
    assigned = 0.0
    for number, segment in requesting:
        assert segment.resources is not None
        gpus, workers = segment.resources.gpus, segment.resources.workers
        min_workers = workers[0] if isinstance(workers, tuple) else workers or 1
        free = int((len(devices) - assigned) / gpus + 1e-9)
        if min_workers > free:
            raise EngineError(
                f"{segment.describe()} asks for gpus={gpus:g} for each of {min_workers} workers, "
                f"but {_devices_text(devices, declared)}"
                + (f", of which {assigned:g} are assigned to other stages" if assigned else "")
            )
        max_workers = workers[1] if isinstance(workers, tuple) else workers or free
        count = min(max_workers, free)
        out[number] = [devices[int(assigned + gpus * worker + 1e-9)] for worker in range(count)]
        assigned += gpus * count
    return out


def _devices_text(devices: tuple[Any, ...], declared: Sequence[Any] | None) -> str:
    if declared is None:
        seen = f"torch sees {', '.join(map(str, devices))}" if devices else "torch sees no GPU"
        return f"{seen}; declare devices with on('local', devices=[...])"
    return f"devices={list(devices)} are declared"


@dataclass(frozen=True)
class ToDevice(Stage):
    """Copies the tensors in a block's items to the worker's device; all other values stay as they are."""

    def run(self, block: Block, ctx: Context) -> Block:
        if str(ctx.device) == "cpu" or not block.items:
            return block
        if "copier" not in ctx.local:
            ctx.local["copier"] = _DeviceCopier(ctx.device)
        return block.with_items(ctx.local["copier"].copy(block.items))


def with_device_copies(segment: Segment) -> Segment:
    """Return the segment with a copy to the device after reading, if the segment requests devices."""
    if segment.resources is None or not segment.resources.gpus:
        return segment
    reading = segment.reading
    stages = [*segment.stages[:reading], PlacedStage(ToDevice(), -1), *segment.stages[reading:]]
    return Segment(stages, segment.resources)


class _DeviceCopier:
    """Copies tensors to a device; to CUDA from pinned memory, on a separate stream."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch: Any = torch
        self._device = torch.device(device)
        self._stream = self._torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def copy(self, items: list[Any]) -> list[Any]:
        """Return the items with all tensors copied; work that the caller queues on the device runs after the copies."""
        if self._stream is None:
            return [self._copy_tensors(item, lambda tensor: tensor.to(self._device)) for item in items]
        caller = self._torch.cuda.current_stream(self._device)

        def copy(tensor: Any) -> Any:
            copied = (tensor if tensor.is_pinned() else tensor.pin_memory()).to(self._device, non_blocking=True)
            copied.record_stream(caller)
            return copied

        with self._torch.cuda.stream(self._stream):
            out = [self._copy_tensors(item, copy) for item in items]
        caller.wait_stream(self._stream)
        return out

    def _copy_tensors(self, value: Any, copy: Callable[[Any], Any]) -> Any:
        """Return a value with every tensor in it copied, also inside dicts, lists and tuples."""
        if isinstance(value, self._torch.Tensor):
            return copy(value)
        if isinstance(value, dict):
            return {name: self._copy_tensors(inner, copy) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            copied = [self._copy_tensors(inner, copy) for inner in value]
            return type(value)(*copied) if hasattr(value, "_fields") else type(value)(copied)
        return value
