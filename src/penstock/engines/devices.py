"""Devices for stages that ask for one: which there are, who gets which, and how a block's tensors get there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engines.program import Segment
from penstock.engines.read_stage import Read
from penstock.errors import EngineError
from penstock.plan import Block, Context, PlacedStage, Stage


def devices_at_hand() -> tuple[str, ...]:
    """The GPUs that torch sees."""
    try:
        import torch
    except ImportError:
        return ()
    return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))


def shared_out(segments: Sequence[Segment], declared: Sequence[Any] | None) -> dict[int, list[Any]]:
    """The device of each worker, by the number of its segment; segments that ask for none are not there.

    Raises:
        EngineError: there are fewer devices than the plan asks for.
    """
    asking = [(number, one) for number, one in enumerate(segments) if one.resources and one.resources.gpus]
    if not asking:
        return {}
    devices = tuple(devices_at_hand() if declared is None else declared)
    out: dict[int, list[Any]] = {}
    at = 0.0
    for number, segment in asking:
        assert segment.resources is not None
        gpus, workers = segment.resources.gpus, segment.resources.workers
        least = workers[0] if isinstance(workers, tuple) else workers or 1
        free = int((len(devices) - at) / gpus + 1e-9)
        if least > free:
            raise EngineError(
                f"{segment.describe()} asks for gpus={gpus:g} for each of {least} workers, "
                f"but {_shown(devices, declared)}" + (f", of which {at:g} are taken" if at else "")
            )
        most = workers[1] if isinstance(workers, tuple) else workers or free
        many = min(most, free)
        out[number] = [devices[int(at + gpus * worker + 1e-9)] for worker in range(many)]
        at += gpus * many
    return out


def _shown(devices: tuple[Any, ...], declared: Sequence[Any] | None) -> str:
    if declared is None:
        told = f"torch sees {', '.join(map(str, devices))}" if devices else "torch sees no GPU"
        return f"{told}; on('local', devices=[...]) declares devices"
    return f"devices={list(devices)} are declared"


@dataclass(frozen=True)
class ToDevice(Stage):
    """Puts the tensors of a block's items on the worker's device; all else stays as it is."""

    def run(self, block: Block, ctx: Context) -> Block:
        """Move them."""
        if str(ctx.device) == "cpu" or not block.items:
            return block
        if "mover" not in ctx.local:
            ctx.local["mover"] = _Mover(ctx.device)
        return block.become(ctx.local["mover"].all(block.items))


def with_moves(segment: Segment) -> Segment:
    """The segment, moving what it has read where it asks for devices."""
    if segment.resources is None or not segment.resources.gpus:
        return segment
    reading = sum(isinstance(placed.stage, Read) for placed in segment.stages)
    stages = [*segment.stages[:reading], PlacedStage(ToDevice(), -1), *segment.stages[reading:]]
    return Segment(stages, segment.resources)


class _Mover:
    """Copies tensors to a device; to CUDA through pinned memory on a stream of its own."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch: Any = torch
        self._device = torch.device(device)
        self._stream = self._torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def all(self, items: list[Any]) -> list[Any]:
        """Move everything; work that the caller starts on the device comes after the copies."""
        if self._stream is None:
            return [self._each(item, lambda tensor: tensor.to(self._device)) for item in items]
        users = self._torch.cuda.current_stream(self._device)

        def copied(tensor: Any) -> Any:
            there = (tensor if tensor.is_pinned() else tensor.pin_memory()).to(self._device, non_blocking=True)
            there.record_stream(users)
            return there

        with self._torch.cuda.stream(self._stream):
            out = [self._each(item, copied) for item in items]
        users.wait_stream(self._stream)
        return out

    def _each(self, value: Any, move: Callable[[Any], Any]) -> Any:
        """The value with every tensor in it moved."""
        if isinstance(value, self._torch.Tensor):
            return move(value)
        if isinstance(value, dict):
            return {name: self._each(inner, move) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            moved = [self._each(inner, move) for inner in value]
            return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
        return value
