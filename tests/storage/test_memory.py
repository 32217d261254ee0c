from __future__ import annotations

import secrets

import pytest

from penstock.storage import Memory, Storage
from penstock.testing.storages import DATA, StorageTests, write


class TestMemory(StorageTests):
    @pytest.fixture
    def storage(self) -> Storage:
        return Memory()

    @pytest.fixture
    def root(self) -> str:
        return f"memory://{secrets.token_hex(4)}"


def test_all_instances_share_the_objects_of_the_process() -> None:
    write(Memory(), "memory://shared/a", DATA)
    assert Memory().read("memory://shared/a", 0, 3) == DATA[:3]
    Memory().delete("memory://shared/a")
