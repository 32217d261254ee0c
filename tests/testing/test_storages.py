"""A storage in memory passes the tests of storages, and a wrong one does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from penstock.storage import Memory, Storage
from penstock.testing.storages import DATA, StorageTests, write


class TestMemory(StorageTests):
    @pytest.fixture
    def storage(self) -> Storage:
        return Memory()

    @pytest.fixture
    def root(self) -> str:
        return f"memory://{uuid4().hex}"


@dataclass(frozen=True)
class OffByOne(Memory):
    """Memory that returns the wrong range."""

    def read(self, url: str, start: int, stop: int, **kwargs: Any) -> Any:
        return super().read(url, max(start - 1, 0), max(stop - 1, 0), **kwargs)


@dataclass(frozen=True)
class Untagged(Memory):
    """Memory that does not notice when content changes."""

    def read(self, url: str, start: int, stop: int, *, tag: str | None = None, **kwargs: Any) -> Any:
        return super().read(url, start, stop, **kwargs)


def test_a_wrong_range_fails() -> None:
    with pytest.raises(AssertionError):
        StorageTests().test_a_range_is_exactly_those_bytes(OffByOne(), f"memory://{uuid4().hex}", 7, 1009)


def test_an_unnoticed_change_fails() -> None:
    with pytest.raises(pytest.fail.Exception):
        StorageTests().test_changed_content_has_another_tag_and_is_refused(Untagged(), f"memory://{uuid4().hex}")


def test_write_writes_an_object() -> None:
    url = f"memory://{uuid4().hex}/a"
    write(Memory(), url, DATA)
    assert Memory().read(url, 0, len(DATA)) == DATA
