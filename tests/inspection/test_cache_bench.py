from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.inspection.cache_bench import simulate_cache


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
