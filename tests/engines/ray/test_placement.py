"""Workers are allocated to nodes; the error of a request that the cluster cannot meet states what the cluster has."""

from __future__ import annotations

import re

import pytest

from penstock.engines.ray.placement import Grant, Need, grant_workers
from penstock.errors import EngineError

NODE = {"CPU": 2.0, "memory": 8e9}
GPU_NODE = {"CPU": 8.0, "GPU": 2.0, "memory": 64e9}


def test_a_segment_without_requests_gets_every_core() -> None:
    assert grant_workers([Need("map(f)")], [NODE, NODE], 4) == [Grant(1, 4, 4, 1.0)]


def test_segments_without_requests_share_the_cores() -> None:
    assert [
        (grant.initial_workers, grant.cpus) for grant in grant_workers([Need("a"), Need("b")], [NODE, NODE], 4)
    ] == [
        (2, 1.0),
        (2, 1.0),
    ]


def test_workers_share_cores_if_there_are_too_few() -> None:
    grants = grant_workers([Need("a", 2, 2), Need("b", 3, 3)], [NODE], 2)
    assert [(grant.min_workers, grant.max_workers, grant.initial_workers) for grant in grants] == [(2, 2, 2), (3, 3, 3)]
    assert sum(grant.max_workers * grant.cpus for grant in grants) <= 2


def test_workers_share_small_nodes() -> None:
    [grant] = grant_workers([Need("a", 5, 5)], [{"CPU": 1.0}] * 3, 3)
    assert grant.initial_workers == 5
    assert 2 * grant.cpus <= 1, "two of them share a node"


def test_workers_count_as_no_core_if_another_run_has_all_cores() -> None:
    assert [grant.cpus for grant in grant_workers([Need("a", 2, 2)], [NODE], 0)] == [0.0]


def test_a_pool_with_bounds_begins_small_and_may_grow_to_what_fits() -> None:
    assert grant_workers([Need("a", 1, 3)], [GPU_NODE], 8) == [Grant(1, 3, 1, 1.0)]
    assert grant_workers([Need("a", 1, 9, gpus=1)], [GPU_NODE], 8)[0].max_workers == 2


def test_a_device_is_allocated_once() -> None:
    grants = grant_workers([Need("a", gpus=1), Need("b", gpus=1)], [GPU_NODE], 8)
    assert [grant.initial_workers for grant in grants] == [1, 1]


@pytest.mark.parametrize(
    ("need", "message"),
    [
        (Need("map(f)", cpus=3), "map(f) asks for cpus=3 for each worker"),
        (Need("map(f)", gpus=1), "map(f) asks for gpus=1 for each worker"),
        (Need("map(f)", memory=9e9), "map(f) asks for memory=9e+09 for each worker"),
    ],
)
def test_a_request_that_no_node_can_meet_is_refused_with_what_the_cluster_has(need: Need, message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)) as caught:
        grant_workers([need], [NODE, NODE], 4)
    assert "the cluster has 2 x (2 cores, 0 GPUs and 8.0 GB)" in str(caught.value)


def test_requests_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(EngineError, match="together ask for 1 workers of a with cpus=2 each; 1 workers of b"):
        grant_workers([Need("a", cpus=2), Need("b", cpus=1)], [NODE], 2)
    with pytest.raises(EngineError, match="3 workers of a with gpus=1 each"):
        grant_workers([Need("a", 3, 3, gpus=1)], [GPU_NODE], 8)
