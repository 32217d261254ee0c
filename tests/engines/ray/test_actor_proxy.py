"""The run's side of actors, without a cluster; ``test_engine.py`` and ``test_nodes.py`` use real actors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.engines.local.transport import pack_object
from penstock.engines.ray import actor_proxy
from penstock.engines.ray.actor_proxy import LazyObjectRef, StoredItems, StoredObject, fetch_items, is_unread
from penstock.engines.ray.actor_worker import IDLE_TIMEOUT_S
from penstock.engines.ray.origin_codec import DeferredSamples
from penstock.engines.read_stage import Finder, PieceRows, Span
from penstock.order import Refs
from penstock.plan import Block, Lineage, join_columns

KIND = ("cluster", "job", None, 0, 0)
OTHER_KIND = ("cluster", "job", None, 1, 0)


class FakeRay:
    """An object store in a dict, and the actors that were killed."""

    def __init__(self) -> None:
        self.store: dict[int, Any] = {}
        self.gets = 0
        self.killed: list[Any] = []

    def put(self, value: Any) -> int:
        self.store[len(self.store)] = value
        return len(self.store) - 1

    def get(self, ref: int) -> Any:
        self.gets += 1
        return self.store[ref]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(actor_proxy, "import_ray", lambda: fake)
    return fake


def span(located: Any) -> Span:
    zero = np.zeros(2, np.int64)
    return Span(zero, (PieceRows(0, 0, 0, 2),), Refs(zero, zero, zero, zero.astype(np.uint64)), [], located)


def test_stored_items_are_fetched_once_and_only_when_they_are_used(ray: FakeRay) -> None:
    items = StoredItems.of(StoredObject(ray.put(pack_object([1, "two"])), 2, 100))
    assert (len(items), items.nbytes, ray.gets) == (2, 100, 0)
    assert (items[0], items[1]) == (1, "two")
    assert list(items) == [1, "two"]
    assert ray.gets == 1


def test_stored_items_that_are_mapped_already_are_not_fetched(ray: FakeRay) -> None:
    items = StoredItems.of(StoredObject(None, 1, 100, pack_object([3])))
    assert list(items.fetch()) == [3]
    assert ray.gets == 0


def test_blocks_of_stored_items_are_given_their_items(ray: FakeRay) -> None:
    keys = np.zeros(2, np.uint64)
    stored: Any = StoredItems.of(StoredObject(ray.put(pack_object([1, 2])), 2, 100))
    blocks = [Block(items, keys, Lineage(span(None), 2)) for items in (stored, [3, 4])]
    assert [block.items for block in fetch_items(iter(blocks))] == [[1, 2], [3, 4]]


def test_an_object_is_put_in_the_store_once_when_it_is_first_needed(ray: FakeRay) -> None:
    lazy = LazyObjectRef(lambda: "value")
    assert not ray.store
    assert lazy.ref() == lazy.ref()
    assert list(ray.store.values()) == ["value"]


def test_only_a_block_of_deferred_samples_without_items_is_unread() -> None:
    zero = np.zeros(2, np.int64)
    deferred = DeferredSamples(Refs(zero, zero, zero, zero.astype(np.uint64)), Finder([], [], 1), zero)
    assert is_unread(span(deferred), [])
    assert not is_unread(span(deferred), [1, 2])
    assert not is_unread(span(None), [])


def test_slicing_and_joining_stored_items_fetches_nothing(ray: FakeRay) -> None:
    one, two = (StoredObject(ray.put(pack_object(list(values))), 3, 30) for values in ("abc", "def"))
    joined = join_columns([StoredItems.of(one)[1:], StoredItems.of(two)])
    assert isinstance(joined, StoredItems)
    part = joined[1:4]
    assert (len(joined), len(part), part.nbytes, ray.gets) == (5, 3, 30, 0)
    assert list(part) == ["c", "d", "e"]
    assert list(joined[::2]) == ["b", "d", "f"]


def test_stored_items_are_computed_again_only_if_all_of_them_can_be(ray: FakeRay) -> None:
    lost = StoredObject("lost", 2, 20)
    items = join_columns([StoredItems.of(lost)[1:], StoredItems.of(StoredObject(ray.put(pack_object([3])), 1, 10))])
    assert isinstance(items, StoredItems)
    assert items.recomputed() is None
    for stored, _, _ in items.parts:
        stored.recompute = lambda: StoredObject(ray.put(pack_object([1, 2])), 2, 20)
    again = items.recomputed()
    assert again is not None
    assert list(again) == [2, 1]


def test_an_idle_actor_is_reused_by_a_payload_of_its_kind_with_as_many_cores() -> None:
    idle = actor_proxy._IdleActors()
    idle.put(KIND, 1.0, "actor")
    assert idle.take(OTHER_KIND, 1.0) is None
    assert idle.take(KIND, 0.5) is None, "it holds more cores than are granted"
    assert idle.take(KIND, 2.0) == "actor"
    assert idle.take(KIND, 2.0) is None, "it was taken"


def test_an_actor_that_may_have_ended_by_itself_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(actor_proxy, "time", SimpleNamespace(monotonic=lambda: now[0]))
    idle = actor_proxy._IdleActors()
    idle.put(KIND, 1.0, "actor")
    now[0] += IDLE_TIMEOUT_S
    assert idle.take(KIND, 1.0) is None


def test_idle_actors_that_cannot_be_used_are_killed(ray: FakeRay) -> None:
    idle = actor_proxy._IdleActors()
    for kind, cpus, actor in ((KIND, 1.0, "usable"), (KIND, 3.0, "too large"), (OTHER_KIND, 1.0, "of another kind")):
        idle.put(kind, cpus, actor)
    idle.release([(KIND, 2.0)])
    assert ray.killed == ["too large", "of another kind"]
    assert idle.take(KIND, 2.0) == "usable"
