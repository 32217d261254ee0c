"""The arguments of stages that call a function: our names and Ray Data's."""

from __future__ import annotations

from typing import Any

import pytest
from ray.data import ActorPoolStrategy

import penstock as ps
from penstock.errors import PlanError
from penstock.plan import Resources

ITEMS = ps.from_items([{"x": 1}])


class Add:
    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": sample["x"] + self.number}


@pytest.mark.parametrize("stage", ["map", "filter", "flat_map", "map_batches"])
def test_ray_datas_names_mean_ours(stage: str) -> None:
    method = getattr(ITEMS, stage)
    theirs = method(
        Add, fn_constructor_args=[1], fn_constructor_kwargs={}, concurrency=(2, 4), num_cpus=0.5, num_gpus=1
    ).plan.stages[0]
    assert (theirs.args.value, theirs.resources) == ((1,), Resources((2, 4), cpus=0.5, gpus=1))


@pytest.mark.parametrize(
    ("compute", "workers"),
    [
        (ActorPoolStrategy(size=3), (3, 3)),
        (ActorPoolStrategy(min_size=2, max_size=5), (2, 5)),
        (ActorPoolStrategy(), None),
    ],
)
def test_an_actor_pool_is_a_number_of_workers(compute: Any, workers: Any) -> None:
    assert ITEMS.map(Add, compute=compute).plan.stages[0].resources == Resources(workers)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 2, "concurrency": 2}, "concurrency is Ray Data's name for workers, which is given too"),
        ({"compute": ActorPoolStrategy(size=1), "concurrency": 2}, "concurrency is Ray Data's name for workers"),
        ({"fn_args": (1,), "fn_constructor_args": (1,)}, "fn_constructor_args is Ray Data's name for fn_args"),
        ({"compute": "actors"}, "compute='actors': give ray.data.ActorPoolStrategy"),
        ({"compute": ActorPoolStrategy(min_size=2)}, "has no largest size: give max_size too"),
        ({"concurency": 2}, "map has no argument concurency; .* did you mean concurrency?"),
        ({"wokers": 2}, "map has no argument wokers; .* did you mean workers?"),
    ],
)
def test_an_argument_that_cannot_be_understood_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ITEMS.map(Add, **options)


def test_a_condition_takes_no_constructor_arguments() -> None:
    with pytest.raises(PlanError, match="does not call a function; leave out workers, fn_args"):
        ITEMS.filter(ps.col("x") == 1, workers=2, fn_args=(1,))
