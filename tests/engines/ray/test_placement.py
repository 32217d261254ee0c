"""What a cluster can give is shared out; what it cannot is refused with what it has."""

from __future__ import annotations

import re

import pytest

from penstock.engines.ray.placement import Grant, Need, granted
from penstock.errors import EngineError

BOX = {"CPU": 2.0, "memory": 8e9}
GPU_BOX = {"CPU": 8.0, "GPU": 2.0, "memory": 64e9}


def test_a_segment_that_asks_for_nothing_gets_every_core() -> None:
    assert granted([Need("map(f)")], [BOX, BOX], 4) == [Grant(1, 4, 4, 1.0)]


def test_segments_that_ask_for_nothing_share_the_cores() -> None:
    assert [(one.begin, one.cpus) for one in granted([Need("a"), Need("b")], [BOX, BOX], 4)] == [(2, 1.0), (2, 1.0)]


def test_so_many_workers_are_had_with_fewer_cores() -> None:
    grants = granted([Need("a", 2, 2), Need("b", 3, 3)], [BOX], 2)
    assert [(one.least, one.most, one.begin) for one in grants] == [(2, 2, 2), (3, 3, 3)]
    assert sum(one.most * one.cpus for one in grants) <= 2


def test_workers_fit_where_nodes_are_small() -> None:
    [grant] = granted([Need("a", 5, 5)], [{"CPU": 1.0}] * 3, 3)
    assert grant.begin == 5
    assert 2 * grant.cpus <= 1, "two of them share a node"


def test_a_run_beside_another_counts_as_nothing_rather_than_wait_for_it() -> None:
    assert [one.cpus for one in granted([Need("a", 2, 2)], [BOX], 0)] == [0.0]


def test_a_pool_with_bounds_begins_small_and_may_grow_to_what_there_is() -> None:
    assert granted([Need("a", 1, 3)], [GPU_BOX], 8) == [Grant(1, 3, 1, 1.0)]
    assert granted([Need("a", 1, 9, gpus=1)], [GPU_BOX], 8)[0].most == 2


def test_devices_are_not_given_twice() -> None:
    grants = granted([Need("a", gpus=1), Need("b", gpus=1)], [GPU_BOX], 8)
    assert [one.begin for one in grants] == [1, 1]


@pytest.mark.parametrize(
    ("need", "said"),
    [
        (Need("map(f)", cpus=3), "map(f) asks for cpus=3 for each worker"),
        (Need("map(f)", gpus=1), "map(f) asks for gpus=1 for each worker"),
        (Need("map(f)", memory=9e9), "map(f) asks for memory=9e+09 for each worker"),
    ],
)
def test_what_no_node_has_is_refused_with_what_there_is(need: Need, said: str) -> None:
    with pytest.raises(EngineError, match=re.escape(said)) as caught:
        granted([need], [BOX, BOX], 4)
    assert "the cluster has 2 x (2 cores, 0 GPUs and 8.0 GB)" in str(caught.value)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(EngineError, match="together ask for 1 workers of a with cpus=2 each; 1 workers of b"):
        granted([Need("a", cpus=2), Need("b", cpus=1)], [BOX], 2)
    with pytest.raises(EngineError, match="3 workers of a with gpus=1 each"):
        granted([Need("a", 3, 3, gpus=1)], [GPU_BOX], 8)
