"""The run's side of actors, without a cluster; ``test_engine.py`` and ``test_nodes.py`` use real actors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.engines.local.transport import dumps, pack_object
from penstock.engines.local.worker_proxy import WorkerDied, WorkerLost
from penstock.engines.ray import actor_proxy, consumer, session
from penstock.engines.ray.actor_proxy import LazyObjectRef, StoredItems, StoredObject, fetch_items, is_unread
from penstock.engines.ray.actor_worker import IDLE_TIMEOUT_S
from penstock.engines.ray.origin_codec import DeferredSamples
from penstock.engines.ray.placement import Need
from penstock.engines.read_stage import Finder, PieceRows, Span
from penstock.errors import EngineError
from penstock.order import Refs
from penstock.plan import Block, Lineage, join_columns

KIND = ("cluster", "job", None, 0, 0)
OTHER_KIND = ("cluster", "job", None, 1, 0)


class FakeRay:
    """An object store in a dict, the actors that were killed, and a clock for those that wait to be placed."""

    exceptions = SimpleNamespace(RayError=ConnectionError)

    def __init__(self) -> None:
        self.store: dict[int, Any] = {}
        self.gets = 0
        self.killed: list[Any] = []
        self.now, self.placed_at = 0.0, 0.0
        self.dead: set[str] = set()
        self.runs = True

    def is_initialized(self) -> bool:
        return self.runs

    def put(self, value: Any) -> int:
        self.store[len(self.store)] = value
        return len(self.store) - 1

    def get(self, ref: int) -> Any:
        self.gets += 1
        return self.store[ref]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def wait(self, refs: list[int], timeout: float) -> tuple[list[int], list[int]]:
        self.now = min(self.now + timeout, max(self.now, self.placed_at))
        return (refs, []) if self.now >= self.placed_at else ([], refs)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": node, "Alive": node not in self.dead} for node in ("a", "b")]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.5, "GPU": 0.0, "memory": 2e9}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    for module in (actor_proxy, session):
        monkeypatch.setattr(module, "import_ray", lambda: fake)
    return fake


@pytest.fixture
def said(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    """What is logged, and when by the clock of ``ray``."""
    lines: list[tuple[float, str]] = []
    log = SimpleNamespace(warning=lambda text, *facts: lines.append((ray.now, text % facts)))
    for module in (actor_proxy, consumer):
        monkeypatch.setattr(module, "log", log)
    return lines


def waiting_actor(ray: FakeRay, nodes: list[dict[str, float]], placed_at: float) -> actor_proxy.Actor:
    """Return an actor that asks for a device and is placed after a while."""
    ray.placed_at = placed_at
    need, ready = Need("map(f)", gpus=1), ray.put(("ready", "a"))
    facts = {"take_idle": lambda: "actor", "shared": None, "need": need, "nodes": lambda: nodes, "timeout_s": None}
    payload: Any = SimpleNamespace(load_into=lambda actor, user: ready, **facts)
    return actor_proxy.Actor(payload, 0)


def test_a_worker_that_waits_for_its_place_says_so_after_30_s_and_then_once_a_minute(
    ray: FakeRay, said: list[tuple[float, str]]
) -> None:
    waiting_actor(ray, [{"CPU": 2.0, "GPU": 1.0}], placed_at=29.0).wait_ready()
    assert said == []
    ray.now = 0.0
    waiting_actor(ray, [{"CPU": 2.0, "GPU": 1.0}], placed_at=200.0).wait_ready()
    assert [when for when, _ in said] == [30, 90, 150]
    assert said[0][1] == (
        "map(f): a worker has been waiting for 30 s to start with gpus=1 on the cluster, "
        "where 1.5 cores, 0 GPUs and 2.0 GB are free"
    )


def test_a_place_that_no_node_has_any_more_is_an_error_within_10_s(ray: FakeRay) -> None:
    with pytest.raises(EngineError, match=r"map\(f\) asks for gpus=1 for each worker; the cluster has 2 cores"):
        waiting_actor(ray, [{"CPU": 2.0}], placed_at=1000.0).wait_ready()
    assert ray.now <= 10


@pytest.mark.parametrize(("dead", "kind"), [({"a"}, WorkerLost), (set(), WorkerDied)])
def test_an_actor_that_ended_at_its_start_is_lost_if_a_node_is(
    dead: set[str], kind: type[WorkerDied], ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ref: int) -> Any:
        ray.dead = dead
        raise ConnectionError("the actor died")

    actor = waiting_actor(ray, [{"CPU": 2.0, "GPU": 1.0}], placed_at=0.0)
    actor._reused = False
    monkeypatch.setattr(ray, "get", fail)
    with pytest.raises(WorkerDied) as caught:
        actor.wait_ready()
    assert isinstance(caught.value, WorkerLost) == (kind is WorkerLost)
    assert ray.killed == ["actor"]


def test_a_writer_that_waits_for_a_process_says_so_after_30_s_and_then_once_a_minute(
    ray: FakeRay, said: list[tuple[float, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "import_ray", lambda: ray)
    made = ray.put(dumps(("done", None)))
    actor = SimpleNamespace(make=SimpleNamespace(remote=lambda *_: made))
    ray.placed_at = 200.0
    consumer.RemoteConsumer(actor, lambda: None).begin(list)
    assert [when for when, _ in said] == [30, 90, 150]
    assert said[-1][1] == "a writer is still waiting for a process on the cluster, after 150 s"


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


def test_idle_actors_end_with_ray(ray: FakeRay) -> None:
    idle = actor_proxy._IdleActors()
    idle.put(OTHER_KIND, 1.0, "of another kind")
    ray.runs = False  # a call would start it again
    idle.release([(KIND, 2.0)])
    assert ray.killed == []
