"""The policy of the cache is within 2% of the best possible, whatever its size and whether epochs are reshuffled."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.inspection.cache_bench import belady_hits, planned_hits, recency_hits, simulate_cache

EPOCHS = 8


def _epochs(shards: int, reshuffled: bool) -> list[list[int]]:
    rng = np.random.default_rng(shards)
    return [rng.permutation(shards).tolist() if reshuffled else [*range(shards)] for _ in range(EPOCHS)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("shards") / "out")
    ps.from_items([{"txt": "a" * 400} for _ in range(100)]).write_tar(folder, max_samples=1)
    return folder


def test_the_simulation_is_within_2_percent_of_the_best(shards: str) -> None:
    report = simulate_cache(shards)
    assert report.shards == 100
    assert len(report.results) == 6
    for result in report.results:
        assert result.share * 0.95 <= result.best <= result.share
        assert 0.98 * result.best <= result.planned <= result.best
        assert result.recent < result.planned


def test_several_urls_are_one_dataset(shards: str) -> None:
    assert simulate_cache([f"{shards}/shard-00000*.tar", f"{shards}/shard-00001*.tar"], shares=[0.5]).shards == 20


def test_a_share_that_is_not_above_0_is_refused(shards: str) -> None:
    with pytest.raises(PlanError, match="above 0"):
        simulate_cache(shards, shares=[0.0])


@pytest.mark.parametrize("reshuffled", [True, False])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("shards", [50, 1000])
def test_it_serves_within_2_percent_of_what_the_best_cache_serves(shards: int, share: float, reshuffled: bool) -> None:
    epochs = _epochs(shards, reshuffled)
    sizes = np.random.default_rng(1).integers(500, 1500, shards).tolist()
    capacity = int(sum(sizes) * share)
    best, planned = (sum(policy(epochs, sizes, capacity)[1:-1]) for policy in (belady_hits, planned_hits))
    recent = sum(recency_hits(epochs, sizes, capacity)[1:-1])
    assert planned >= 0.98 * best
    assert best > 0.9 * share * sum(sizes) * (EPOCHS - 2)
    assert recent < planned


def test_the_best_cache_is_the_best_by_trying_all_on_a_small_case() -> None:
    assert belady_hits([[0, 1, 2], [0, 1, 2], [0, 1, 2]], [1, 1, 1], 2) == [0, 2, 2]
    assert belady_hits([[0, 1, 2], [2, 1, 0], [0, 1, 2]], [1, 1, 1], 2) == [0, 2, 2]
    assert recency_hits([[0, 1, 2], [0, 1, 2]], [1, 1, 1], 2) == [0, 0]
    assert planned_hits([[0, 1], [1, 0]], [5, 5], 10) == [0, 10]
    assert planned_hits([[0]], [5], 10) == [0]
