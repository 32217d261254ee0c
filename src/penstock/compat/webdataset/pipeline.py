"""A pipeline: a list of stages, the first of which is a source."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from penstock.compat.webdataset import exact, tariterators
from penstock.compat.webdataset.pytorch import DataLoader, IterableDataset
from penstock.compat.webdataset.utils import PipelineStage
from penstock.errors import StateError

if TYPE_CHECKING:
    from penstock.dataset import Dataset

_STATE_VERSION = 1


class DataPipeline(IterableDataset[Any], PipelineStage):
    """Iterates over stages: the first is a dataset, a list or a function, each other a function of an iterator.

    Programs change the list ``pipeline`` as they like. The stages run ``repetitions`` times in one iteration, which
    yields ``nsamples`` samples at most; 0 or less: all.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self.pipeline: list[Any] = []
        self.length, self.repetitions, self.nsamples = -1, 1, -1
        for arg in args:
            self.pipeline.extend([] if arg is None else arg if isinstance(arg, list) else [arg])

    def close(self) -> None:
        """Close the stages, and forget them."""
        for step in self.pipeline:
            getattr(step, "close", lambda: None)()
        self.pipeline = []

    def invoke(self, f: Any, *args: Any, **options: Any) -> Any:
        """Return the iterator of a stage; ``ValueError`` if it is none."""
        is_source = isinstance(f, IterableDataset | DataLoader | list) or not callable(f)
        if not args and is_source and hasattr(f, "__iter__"):
            return iter(f)
        if isinstance(f, PipelineStage) and hasattr(f, "run"):
            return f.run(*args, **options)
        if callable(f):
            return f(*args, **options)
        raise ValueError(f"{f}: not a valid pipeline stage")

    def iterator1(self) -> Iterator[Any]:
        """Run the stages once."""
        source, steps = self.invoke(self.pipeline[0]), self.pipeline[1:]
        while steps:
            both = tariterators.fused(*steps[:2]) if len(steps) > 1 else None
            source = self.invoke(steps[0] if both is None else both, source)
            steps = steps[1 if both is None else 2 :]
        result: Iterator[Any] = source
        return result

    def iterator(self) -> Iterator[Any]:
        """Run the stages as often as ``repetitions`` says, or until they yield nothing."""
        for _ in range(self.repetitions):
            sample = done = object()
            for sample in self.iterator1():
                yield sample
            if sample is done:
                return

    def __iter__(self) -> Iterator[Any]:
        if self.repetitions != 1 and self.nsamples > 0:
            return islice(self.iterator(), self.nsamples)
        return self.iterator()

    def stage(self, i: int) -> Any:
        return self.pipeline[i]

    def append(self, f: Any) -> None:
        """Add a stage, in place."""
        self.pipeline.append(f)

    def compose(self, *args: Any) -> Self:
        """Return a pipeline with more stages."""
        result = copy.copy(self)
        result.pipeline = [*self.pipeline, *args]
        return result

    def with_length(self, n: int, silent: bool = False) -> Self:
        """Let ``len()`` say ``n``, in place; the samples stay the same."""
        if not silent:
            warnings.warn("with_length sets what len() returns, not the number of samples", stacklevel=2)
        self.size = n
        self.__class__ = _sized(getattr(self.__class__, "_unsized", self.__class__))
        return self

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """Yield this many samples per iteration (in each worker), repeating the stages as needed; in place."""
        self.repetitions, self.nsamples = sys.maxsize, max(nsamples, nbatches)
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Self:
        """Run the stages ``nepochs`` times per iteration, without end if it is not positive; in place."""
        self.repetitions, self.nsamples = nepochs if nepochs > 0 else sys.maxsize, nbatches
        return self

    def exact(self) -> Dataset:
        """Return the ``ps.Dataset`` with the same samples: in an exact order, with exact resume and ``ps.ledger``.

        Raises:
            PlanError: A stage has no counterpart; the message names it.
        """
        return exact.dataset_of(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the epochs of the stages that count them: what there is to save between two epochs.

        Raises:
            StateError: No stage counts epochs in this process, so the state would restore nothing.
        """
        counts = {str(i): getattr(step, "epoch", None) for i, step in enumerate(self.pipeline)}
        epochs = {i: epoch for i, epoch in counts.items() if isinstance(epoch, int)}
        if not epochs:
            raise StateError(
                "a WebDataset pipeline keeps no position, and no stage of this one counts epochs: use detshuffle or "
                "ResampledShards to save epochs, or .exact().loader(), which resumes after any batch"
            )
        return {"v": _STATE_VERSION, "stages": [exact.stage_name(step) for step in self.pipeline], "epochs": epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the epoch after those in a state; a position within an epoch is not part of it.

        Raises:
            StateError: The state is of another version, or of other stages.
        """
        stages = [exact.stage_name(step) for step in self.pipeline]
        if state.get("v") != _STATE_VERSION or state.get("stages") != stages:
            raise StateError("the state was saved by a pipeline with other stages, or by another version")
        for i, epoch in state["epochs"].items():
            self.pipeline[int(i)].epoch = epoch


@functools.cache
def _sized(cls: Any) -> type[Any]:
    """Return the class with a length; its instances can be pickled."""
    methods = {
        "_unsized": cls,
        "__len__": lambda self: self.size,
        "__reduce__": lambda self: (_restored, (cls, self.__dict__)),
    }
    return type(f"{cls.__name__}_Length", (cls,), methods)


def _restored(cls: Any, attributes: dict[str, Any]) -> Any:
    restored = object.__new__(_sized(cls))
    restored.__dict__.update(attributes)
    return restored


add_length_method = _sized
