from penstock.dataset import Dataset
from penstock.testing import EngineTests


class TestSerial(EngineTests):
    def on(self, ds: Dataset) -> Dataset:
        return ds.on("serial")
