"""The serial engine obeys the laws of all engines."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

from penstock.dataset import Dataset
from penstock.testing import EngineTests

FULL = os.environ.get("PENSTOCK_FULL") == "1"


class TestSerial(EngineTests):
    worlds = EngineTests.worlds if FULL else (3,)

    def on(self, ds: Dataset) -> Dataset:
        return ds.on("serial")

    def points(self, count: int) -> Iterable[int]:
        return (
            super().points(count) if FULL else {0, count, *random.Random(count).sample(range(count + 1), min(count, 5))}
        )
