"""Formats of delivered items: arrays of numpy, torch or JAX, on a device."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, Literal, get_args

import numpy as np

from penstock.engines import closed_at_exit
from penstock.errors import PlanError, import_extra
from penstock.plan import check_choice, check_count, check_flag

FormatName = Literal["numpy", "torch", "jax"]
_NUMERIC = "biufc"  # the kinds of numpy's types that all libraries have


@dataclass(frozen=True, slots=True)
class BatchFormat:
    """A format with its options; calling it converts one item.

    Numbers, arrays and tensors become arrays of the library, also in dicts and tuples. Other values are unchanged.

    Attributes:
        name: The library whose arrays are delivered.
        device: Where they are; None: in the memory of this process.
        dtypes: The type of every array, or a type for each field.
        pin_memory: Whether torch copies from pinned memory; None: if the device is a GPU.
        prefetch: How many converted items are kept ready, if there is a device.

    Raises:
        MissingExtra: The library is not installed.
        PlanError: An option is not valid, or does not fit the format.
    """

    name: FormatName
    device: Any = None
    dtypes: Any = None
    pin_memory: bool | None = None
    prefetch: int = 2

    def __post_init__(self) -> None:
        check_choice("format", self.name, get_args(FormatName))
        check_count("prefetch", self.prefetch)
        if self.name == "numpy" and self.device is not None:
            raise PlanError(f"device={self.device!r}: numpy's arrays are in main memory; use format='torch' or 'jax'")
        if self.name != "torch" and self.pin_memory:
            raise PlanError("pin_memory= is for format='torch'")
        if self.pin_memory is not None:
            check_flag("pin_memory", self.pin_memory)
        _IMPORT[self.name]()
        if self.name == "torch" and self.device is not None:
            self._check_device()
        if self.pin_memory and not getattr(_torch(), "accelerator", _torch().cuda).is_available():
            raise PlanError("pin_memory=True: torch finds no GPU on this machine")
        for dtype in self.dtypes.values() if isinstance(self.dtypes, Mapping) else [self.dtypes]:
            self._check_dtype(dtype)

    def _check_device(self) -> None:
        torch = _torch()
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError) as exc:
            problem = str(exc).splitlines()[0]
            raise PlanError(f"device={self.device!r}: give a device of torch, such as 'cuda': {problem}") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise PlanError(f"device={self.device!r}: torch finds no GPU on this machine")

    def _check_dtype(self, dtype: Any) -> None:
        if self.name == "torch" and not (dtype is None or isinstance(dtype, _torch().dtype)):
            raise PlanError(f"dtypes={dtype!r}: give a torch.dtype, or a dict of torch dtypes by field")
        if self.name != "torch":
            try:
                np.dtype(dtype)
            except TypeError:
                raise PlanError(f"dtypes={dtype!r}: give a numpy dtype, or a dict of numpy dtypes by field") from None

    def __call__(self, item: Any) -> Any:
        """Convert one item.

        Images that ``vision.on_device`` augments are computed once everything is on the device.

        Raises:
            PlanError: ``dtypes`` names a field that the item does not have, or ``on_device`` is used without torch.
        """
        device = sys.modules.get("penstock.vision.device")  # loaded where a sample comes from ``on_device``
        key = None if device is None else device.pending_key(item)
        if device is None or key is None:
            return self._converted(item)
        if self.name != "torch":
            raise PlanError(f"vision.on_device needs loader(format='torch'), not format={self.name!r}")
        on_device = replace(self, dtypes=None)
        batch = device.finish_batch(on_device._converted(item), key, lambda pixels: on_device._tensor(pixels, None))
        return batch if self.dtypes is None else self._converted(batch)

    def _converted(self, item: Any) -> Any:
        dtypes = self.dtypes
        if not isinstance(item, dict):
            return self._convert(item, None if isinstance(dtypes, Mapping) else dtypes)
        if not isinstance(dtypes, Mapping):
            return {name: self._convert(value, dtypes) for name, value in item.items()}
        if unknown := dtypes.keys() - item.keys():
            raise PlanError(f"dtypes names {sorted(unknown)!r}, but a batch has only {sorted(item)!r}")
        return {name: self._convert(value, dtypes.get(name)) for name, value in item.items()}

    def _convert(self, value: Any, dtype: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._convert(inner, dtype) for name, inner in value.items()}
        if type(value) is tuple:
            return tuple(self._convert(inner, dtype) for inner in value)
        if not (isinstance(value, Number | np.bool_) or (hasattr(value, "__array__") and hasattr(value, "dtype"))):
            return value
        return _MAKE[self.name](self, value, dtype)

    def _numpy_array(self, value: Any, dtype: Any) -> Any:
        array = np.asarray(value)
        return array.astype(dtype) if dtype is not None and array.dtype.kind in _NUMERIC else array

    def _tensor(self, value: Any, dtype: Any) -> Any:
        torch = _torch()
        if not isinstance(value, torch.Tensor):
            array = np.asarray(value)
            if array.dtype.kind not in _NUMERIC:
                return array.tolist()
            # A tensor is always writable; an array over the bytes of a shard is not.
            value = torch.from_numpy(array if array.flags.writeable else array.copy())
        if dtype is not None:
            value = value.to(dtype)
        pins = str(self.device).startswith("cuda") if self.pin_memory is None else self.pin_memory
        if pins and not value.is_cuda:
            value = value.pin_memory()
        return value if self.device is None else value.to(self.device, non_blocking=pins)

    def _jax_array(self, value: Any, dtype: Any) -> Any:
        jax = _jax()
        if np.asarray(value).dtype.kind not in _NUMERIC:
            return value
        device = self.device
        if isinstance(device, str):
            platform, _, number = device.partition(":")
            try:
                device = jax.devices(platform)[int(number or 0)]
            except (RuntimeError, ValueError, IndexError) as exc:
                raise PlanError(f"device={device!r}: JAX has no such device here: {exc}") from exc
        return jax.device_put(jax.numpy.asarray(value, dtype=dtype), device)

    def convert_all(self, items: Iterator[tuple[Any, Any]]) -> Generator[tuple[Any, Any], None, None]:
        """Convert the first of each pair; with a device, in a thread that works ahead."""
        return map_ahead(items, lambda pair: (self(pair[0]), pair[1]), self.ahead)

    @property
    def ahead(self) -> int:
        """How many items are converted ahead of their delivery."""
        return self.prefetch if self.device is not None else 0


_MAKE = {"numpy": BatchFormat._numpy_array, "torch": BatchFormat._tensor, "jax": BatchFormat._jax_array}


def _torch() -> Any:
    return import_extra("torch", "format='torch'", "torch")


def _jax() -> Any:
    return import_extra("jax", "format='jax'", "jax")


_IMPORT: dict[str, Callable[[], Any]] = {"numpy": lambda: np, "torch": _torch, "jax": _jax}


@closed_at_exit
def map_ahead(items: Iterator[Any], convert: Callable[[Any], Any], ahead: int) -> Generator[Any, None, None]:
    """Yield the converted items; a thread keeps up to ``ahead`` of them ready (0: without a thread).

    Closing the iterator waits for the item that the thread is working on, and drops those that are ready.
    """
    if not ahead:
        yield from map(convert, items)
        return
    end = object()

    def step() -> Any:
        item = next(items, end)
        return end if item is end else convert(item)

    with ThreadPoolExecutor(1, "penstock prefetch") as thread:
        pending: deque[Future[Any]] = deque(thread.submit(step) for _ in range(ahead))
        try:
            while (item := pending.popleft().result()) is not end:
                pending.append(thread.submit(step))
                yield item
        finally:
            for future in pending:
                future.cancel()
