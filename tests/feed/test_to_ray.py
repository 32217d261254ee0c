"""A dataset as a Ray dataset, and in Ray Train."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engines import Program
from penstock.errors import EngineError, PlanError, StageError
from penstock.feed.to_ray import MIN_TASK_SAMPLES, _task_edges, task_starts
from penstock.order import total

FULL = os.environ.get("PENSTOCK_FULL") == "1"

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\..*"),  # of Ray's own names
]


def _noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise": rng.normal(size=sample["n"] % 3 + 1)}


def _kept(sample: dict[str, Any]) -> bool:
    return bool(sample["n"] % 3)


def _numbers(count: int) -> ps.Dataset:
    return ps.from_items([{"n": i, "image": np.full((3, 2), i % 256, np.uint8)} for i in range(count)])


def test_the_samples_are_the_same_in_the_same_order() -> None:
    ds = _numbers(900).shuffle(seed=3).map(_noisy).filter(_kept)
    made = ds.to_ray()
    kinds = dict(zip(made.schema().names, map(str, made.schema().types), strict=True))
    assert "shape=(3, 2), dtype=uint8" in kinds["image"]
    assert "ndim=1" in kinds["noise"]  # ragged
    found, wanted = made.take_all(), ds.take_all()
    assert [row["n"] for row in found] == [sample["n"] for sample in wanted]
    assert all((row["noise"] == sample["noise"]).all() for row, sample in zip(found, wanted, strict=True))
    back = ps.from_ray(made)
    assert [sample["n"] for sample in back] == [sample["n"] for sample in wanted]
    assert back.first()["image"].dtype == np.uint8


def test_a_rank_of_a_table_becomes_columns_without_rows(tmp_path: Path) -> None:
    _numbers(700).write_parquet(tmp_path / "table", max_samples=300)
    part = ps.read_parquet(tmp_path / "table").shard(1, 2, uneven="pad")
    assert part.to_ray(blocks=3).take_all()[-1]["image"].shape == (3, 2)
    made = part.to_ray()
    assert made.count() == 350  # known without running it
    assert [row["n"] for row in made.iter_rows()] == list(range(350, 700))


def test_relative_paths_begin_at_the_working_directory_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Ray was started in another folder
    ps.from_items([{"__key__": f"{i}", "x.json": i} for i in range(9)]).write_tar("part-%02d.tar", max_samples=5)
    ds = ps.read_tar("part-{00..01}.tar").decode().map(lambda s: {"x": s["x.json"], "folder": os.getcwd()})
    assert ds.to_ray().take_all() == [{"x": i, "folder": str(tmp_path)} for i in range(9)]


def test_an_error_in_a_task_names_stage_and_sample() -> None:
    def broken(sample: dict[str, Any]) -> Any:
        return 1 / (sample["n"] - 7)

    with pytest.raises(StageError, match=r"ZeroDivisionError.*stage: map.*key: 7"):
        _numbers(20).map(broken).to_ray().take_all()
    assert _numbers(20).map(broken).on_error("skip").to_ray().take_all()[7] == {"item": 1.0}


class _Doubler:
    """Records each time it is constructed."""

    def __init__(self, log: str) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"double": batch["n"] * 2}


@pytest.mark.parametrize("gpus", [0, 1] if FULL else [0])
def test_a_class_is_constructed_once_per_process(gpus: int, tmp_path: Path) -> None:
    log = tmp_path / "constructed"
    ds = _numbers(600).map_batches(_Doubler, batch_size=50, fn_args=(str(log),), gpus=gpus)
    assert [row["double"] for row in ds.to_ray(blocks=6).take_all()] == [2 * n for n in range(600)]
    pids = log.read_text().split()
    assert len(pids) == len(set(pids)) < 6


def test_resources_that_no_node_has_are_refused_before_anything_runs() -> None:
    with pytest.raises(EngineError, match=r"to_ray\(\) asks for gpus=64"):
        _numbers(3).map(_noisy, gpus=64).to_ray()


def test_parts_feed_actors_without_ranks() -> None:
    import ray

    class Trainer:
        def run(self, part: ps.Dataset) -> list[int]:
            return [int(n) for batch in part.iter_batches(batch_size=8) for n in batch["n"]]

    actor: Any = ray.remote(Trainer)
    parts = _numbers(103).streaming_split(n=2, equal=True)
    found = ray.get([actor.remote().run.remote(part) for part in parts])
    assert [len(numbers) for numbers in found] == [51] * 2
    assert len({number for numbers in found for number in numbers}) == 102


if FULL:  # tasks take long to start

    def test_batches_are_computed_by_one_task() -> None:
        batches = _numbers(10).batched(4)
        assert [len(row["n"]) for row in batches.to_ray().take_all()] == [4, 4, 2]
        assert len(task_starts(Program(batches.plan), 0, None, 8)) == 1


def test_an_endless_dataset_is_refused() -> None:
    with pytest.raises(PlanError, match="the dataset has no end"):
        _numbers(3).repeat().to_ray()


@pytest.mark.parametrize(
    ("shard_edges", "blocks", "cores", "task_edges"),
    [
        ([0, 0], None, 2, []),
        ([0, 10], None, 2, [0, 10]),
        ([0, 100, 200, 300, 400], None, 2, [0, 400]),  # small shards are joined
        (
            [0, 500, 1000, 1500, 1600],
            None,
            1,
            [0, 500, 1000, 1600],
        ),  # the small last shard is joined
        ([0, 4096], None, 1, [0, 1024, 2048, 3072, 4096]),  # a large shard is cut
        ([0, 10], 4, 2, [0, 2, 5, 7, 10]),
        ([0, 3], 8, 2, [0, 1, 2, 3]),
    ],
)
def test_tasks_are_shards_or_ranges_of_shards(
    shard_edges: list[int], blocks: int | None, cores: int, task_edges: list[int]
) -> None:
    assert _task_edges(shard_edges, blocks, cores) == task_edges


@pytest.mark.parametrize("how", ["range", "step"])
def test_tasks_cover_the_share_of_a_rank_once(how: Any) -> None:
    plan = _numbers(3000).shuffle(seed=1).shard(1, 3, cut=how).plan
    program = Program(plan)
    starts = task_starts(program, 0, None, 4)
    assert len(starts) == 1000 // MIN_TASK_SAMPLES
    whole = program.start(program.order(0), plan.cut).left
    assert sum(total(start.left) for start in starts) == total(whole) == 1000


def _train(config: dict[str, Any]) -> None:
    """Run some steps, with a checkpoint of Ray Train after each; without torch."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    loader = config["data"].loader(ledger=config["ledger"])
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            states = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("loader-*"))]
        loader.load_state_dict(states=states)
    shard = config["datasets"] and ray.train.get_dataset_shard("train")
    seen = [int(n) for batch in shard.iter_batches(batch_size=9) for n in batch["n"]] if shard else []
    for step, _ in enumerate(loader, start=1):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"loader-{rank}").write_text(json.dumps(loader.state_dict()))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"ray": sorted(seen), "rank": loader.cut.rank}, checkpoint=checkpoint)
        if step == config["steps"]:
            break
    loader.close()


if FULL:  # starts a dozen processes

    @pytest.mark.timeout(300)
    def test_ray_train_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
        from ray.train import DataConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # TorchTrainer, without torch

        data = _numbers(60).shuffle(seed=5)

        def fit(workers: int, steps: int, **more: Any) -> Any:
            config = {"data": data.batched(5), "ledger": str(tmp_path / "ledger"), "steps": steps}
            return DataParallelTrainer(
                _train,
                train_loop_config={**config, "datasets": bool(more)},
                scaling_config=ScalingConfig(
                    num_workers=workers, resources_per_worker={"CPU": 0.5}
                ),  # leave some to read
                run_config=RunConfig(name="run", storage_path=str(tmp_path / "ray")),
                **more,
            ).fit()

        first = fit(2, 3, datasets={"train": data.to_ray()}, dataset_config=DataConfig(datasets_to_split=[]))
        assert first.metrics["ray"] == list(range(60))  # Ray Train delivers the same samples
        assert not ps.ledger(tmp_path / "ledger").verify().finished
        fit(1, 100)
        proof = ps.ledger(tmp_path / "ledger").verify()
        assert proof.ok, str(proof)
        assert proof.finished
        assert proof.delivered == 60
