from penstock.dataset import Dataset
from penstock.testing import EngineTests, UnorderedEngineTests


class TestLocal(EngineTests):
    def on(self, ds: Dataset) -> Dataset:
        return ds.on("local")


class TestUnordered(UnorderedEngineTests):
    def on(self, ds: Dataset) -> Dataset:
        return ds.on("local", ordered=False)
