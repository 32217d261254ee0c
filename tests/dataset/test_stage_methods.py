"""Stages on items: their results, and what they refuse."""

from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import penstock as ps
from penstock.errors import DataError, EngineError, PlanError, StageError
from penstock.plan import Fields, Plan, Source
from penstock.testing import Numbers, numbers


def _xs(ds: Any) -> list[int]:
    return [int(sample["x"]) for sample in ds]


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


class Flaky:
    """Fails the first ``times`` calls with each sample."""

    def __init__(self, times: int) -> None:
        self.times, self.seen = times, Counter[Any]()

    def __call__(self, sample: Any) -> Any:
        key = str(sample)
        self.seen[key] += 1
        if self.seen[key] <= self.times:
            raise OSError("not yet")
        return sample


def test_map_may_return_any_value() -> None:
    assert list(numbers((3,)).map(lambda s: s["x"])) == [0, 1, 2]


def test_filter_keeps_samples_for_which_the_function_is_true() -> None:
    assert _xs(numbers((6,)).filter(_odd)) == [1, 3, 5]


def test_flat_map_concatenates_the_results() -> None:
    assert list(ps.from_items([[1, 2], [], [3]]).flat_map(lambda item: item)) == [1, 2, 3]
    assert list(ps.from_items([2, 0, 1]).flat_map(lambda n: (n for _ in range(n)))) == [2, 2, 1]


def test_select_keeps_fields_with_double_underscores() -> None:
    ds = ps.from_items([{"__key__": "k", "a": 1, "b": 2, "c": 3}])
    assert ds.select("c", "a").first() == {"__key__": "k", "a": 1, "c": 3}
    assert ds.drop("a").first() == {"__key__": "k", "b": 2, "c": 3}


def test_rename_takes_the_first_field_that_exists() -> None:
    ds = ps.from_items([{"png": 1, "cls": 2}, {"jpg": 3, "png": 4}])
    assert list(ds.rename(image="jpg;png")) == [{"image": 1, "cls": 2}, {"image": 3, "png": 4}]


def test_rename_can_swap_and_replace_fields() -> None:
    assert ps.from_items([{"a": 1, "b": 2}]).rename(a="b", b="a").first() == {"b": 1, "a": 2}
    for sample in ({"jpg": 2, "image": 1}, {"image": 1, "jpg": 2}):
        assert ps.from_items([sample]).rename(image="jpg").first() == {"image": 2}


def test_to_tuple_takes_the_first_field_that_exists() -> None:
    ds = ps.from_items([{"png": 1, "cls": 2}, {"jpg": 3, "cls": 4}])
    assert list(ds.to_tuple("jpg;png", "cls")) == [(1, 2), (3, 4)]
    assert list(ds.to_tuple("jpg;png cls")) == [(1, 2), (3, 4)]


def test_map_tuple_has_a_function_for_each_element() -> None:
    ds = ps.from_items([(1, 2, 3)])
    assert ds.map_tuple(str, None).first() == ("1", 2, 3)
    drawn = [t[1] for t in ps.from_items([(1, 2)] * 5).map_tuple(None, lambda v, rng: rng.random()).epoch(0)]
    assert len(set(drawn)) == 5


FIELDS = [{"__key__": f"{i}", "jpg": b"image", "cls": i} for i in range(3)]


@pytest.fixture(scope="module", params=["tar", "parquet", "json", "csv", "items"])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ps.Dataset:
    """Samples with the fields jpg and cls, in every kind of source."""
    folder = str(tmp_path_factory.mktemp("shards") / "packed")
    ds = ps.from_items(FIELDS)
    if request.param == "items":
        return ds
    if request.param == "tar":
        ds.write_tar(folder)
        return ps.read_tar(folder)
    kind = request.param
    getattr(ds.map(lambda sample: {**sample, "jpg": "image"}), f"write_{kind}")(folder)
    read: ps.Dataset = getattr(ps, f"read_{kind}")(folder)
    return read


@pytest.mark.parametrize(
    "stage",
    [
        lambda ds: ds.select("jgp"),
        lambda ds: ds.rename(image="jgp;jgpeg"),
        lambda ds: ds.to_tuple("cls", "jgp"),
        lambda ds: ds.decode(jgp=bytes, jpg=bytes),
        lambda ds: ds.decode(fields={"jgp": bytes}),
        lambda ds: ds.filter(ps.col("jgp") == 3),
        lambda ds: ds.with_columns(copy=ps.col("jgp")),
        lambda ds: ds.drop("cls").decode(jpg=bytes).rename(label="jpg").select("jgp"),
        lambda ds: ds.map(dict).select("jgp"),
        lambda ds: ds["jgp"],
    ],
)
@pytest.mark.parametrize("engine", ["serial", "local"])
def test_the_error_of_a_field_that_no_sample_has_names_the_fields_and_the_nearest(
    stage: Any, engine: Any, shards: ps.Dataset
) -> None:
    with pytest.raises((DataError, PlanError), match="no field 'jgp'") as caught:
        list(stage(shards).on(engine))
    near = "label" if "label" in str(stage(shards)) else "jpg"
    assert re.search(rf"the fields are (cls, )?{near}", str(caught.value))
    assert near == "label" or str(caught.value).partition(" (shard")[0].endswith("did you mean jpg?")


@pytest.mark.parametrize("verb", ["select", "drop", "unique"])
def test_a_field_that_a_table_does_not_have_is_an_error_before_it_is_read(verb: str) -> None:
    rows = [{"jpg": b"a", "cls": 1}]
    table = ps.from_arrow(ps.from_items(rows).to_arrow())
    found = ps.from_huggingface(datasets.Dataset.from_list(rows))
    for ds in (table, table.distinct("cls"), table.groupby("jpg").sum("cls"), found):
        with pytest.raises(PlanError, match=r"no field 'jgp'; the fields are .*: did you mean jpg"):
            list(getattr(ds, verb)("jgp"))


def test_the_error_of_a_field_that_only_some_samples_have_says_so() -> None:
    ds = ps.from_items([{"cls": 1}, {"cls": 2, "txt": "a"}])
    with pytest.raises(DataError, match="no field 'txt'; the fields are cls, txt: not every sample has all of them"):
        ds.select("txt").take_all()


@pytest.mark.parametrize("read", [ps.read_files, ps.read_images])
@pytest.mark.parametrize("stage", [lambda ds: ds.decode(jgp=bytes), lambda ds: ds.drop("jgp")])
def test_a_field_that_files_do_not_have_is_an_error_before_they_are_read(read: Any, stage: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no image")
    for ds in (read(tmp_path), read(tmp_path).union(ps.from_items([{"bytes": 1}]))):
        with pytest.raises(PlanError, match=r"no field 'jgp'; the fields are (bytes|image), "):
            stage(ds).take_all()


FLAGS = [
    (lambda ds: ds.batched(2, drop_last="no"), "drop_last='no'"),
    (lambda ds: ds.iter_batches(2, drop_last=1), "drop_last=1"),
    (lambda ds: ds.shuffle(all="no"), "all='no'"),
    (lambda ds: ds.zip(ds, strict="no"), "strict='no'"),
    (lambda ds: ds.split(2, equal="no"), "equal='no'"),
    (lambda ds: ds.train_test_split(shuffle="no"), "shuffle='no'"),
    (lambda ds: ds.decode(trust_pickle="no"), "trust_pickle='no'"),
    (lambda ds: ds.write_tar("memory://flags", trust_pickle="no"), "trust_pickle='no'"),
    (lambda _: ps.read_lmdb("x", trust_pickle="no"), "trust_pickle='no'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("use", "shown"), FLAGS)
def test_a_flag_is_true_or_false(use: Any, shown: str) -> None:
    with pytest.raises(PlanError, match=f"{shown}: expected True or False"):
        use(ps.from_items([{"x": 1}]))


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda ds: ds.zip(ds, ds), r"write a.zip\(b\).zip\(c\)"),
        (lambda ds: ds.zip(ds, suffix=3), "suffix=3"),
        (lambda ds: ds.sort("x", descending=1), "descending=1"),
        (lambda ds: ds.train_test_split(seed=1.5), "seed=1.5"),
        (lambda ds: ds.train_test_split(by=3), "by=3: give the name of a field"),
        (lambda ds: ds.train_test_split(stratify=""), "stratify=''"),
        (lambda ds: ds.map(len, gpus=float("inf")), "gpus=inf"),
        (lambda ds: ds.decode(x="rgb9"), r"decode\(x='rgb9'\): unknown decode spec"),
        (lambda ds: ds.decode(x=_later), "is async"),
        (lambda ds: ds.batched(2).decode("rgb8"), r"batched\(2\) joins them: call decode\(\) before it"),
        (lambda ds: ds.batched_by(len, 2).decode(x="rgb8"), "joins them"),
    ],
)
def test_an_argument_that_would_be_misunderstood_is_refused(use: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        use(ps.from_items([{"x": 1}]))


async def _later(value: bytes) -> bytes:
    return value


def test_numbers_of_numpy_are_taken_as_those_of_python() -> None:
    ds = ps.from_items([{"x": 1}])
    given: Any = {"cpus": np.float32(1), "gpus": np.int64(0), "timeout_s": np.int64(9), "retries": np.int64(2)}
    two: Any = np.int64(2)
    half: Any = np.float32(0.5)
    workers: Any
    for workers in (two, (np.int64(1), two)):
        assert ds.map(_same, workers=workers, **given) == ds.map(
            _same, workers=(1, 2) if isinstance(workers, tuple) else 2, cpus=1.0, gpus=0, timeout_s=9, retries=2
        )
    assert ds.on_error("skip", limit=two) == ds.on_error("skip", limit=2)
    assert ds.train_test_split(half) == ds.train_test_split(0.5)


def _same(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("size", [float("nan"), -1])
def test_a_size_that_is_no_size_is_an_error_of_its_sample(size: float) -> None:
    ds = ps.from_items([{"x": 1}, {"x": size}, {"x": 3}]).batched_by(lambda sample: sample["x"], 10)
    with pytest.raises(StageError, match=r"return a number of at least 0.*batched_by.*key: 1"):
        ds.take_all()
    assert [batch["x"].tolist() for batch in ds.on_error("skip")] == [[1, 3]]


def test_a_function_of_decode_gets_its_device() -> None:
    ds = ps.from_items([{"x": b"1"}]).decode(x=lambda value, device: (value, device))
    assert ds.first() == {"x": (b"1", "cpu")}


@pytest.mark.parametrize("item", [1, "ab", b"ab"])
def test_only_batches_can_be_unbatched(item: Any) -> None:
    with pytest.raises(
        StageError, match=r"a batch is a dict or tuple of columns, or a list, not (an int|a str|a bytes)"
    ):
        ps.from_items([item]).unbatched().take_all()


def test_dropping_a_field_that_no_item_has_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"drop\('txt'\): no field 'txt'; the fields are jpg"):
        ps.from_items([{"jpg": 1}]).drop("txt").take_all()


def test_a_field_of_any_shard_or_item_is_found(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [{"__key__": str(n), "jpg": b"x"} for n in range(2000)]
    samples[1510]["txt"] = b"words"
    ps.from_items(samples).write_tar(str(tmp_path / "out"), max_samples=20)
    for ds in (ps.read_tar(tmp_path / "out"), ps.from_items(samples)):
        lengths = [sample["txt"] for sample in ds.decode(txt=len, jpg=bytes) if "txt" in sample]
        assert lengths == [5]


def test_a_field_that_some_of_many_remote_shards_may_have_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    samples = [{"__key__": str(n), "jpg": b"x"} for n in range(70)]
    ps.from_items(samples).write_tar("memory://many", max_samples=1)
    assert len(ps.read_tar("memory://many").decode(jgp=len, jpg=bytes).take_all()) == 70
    assert "no field 'jgp'; the fields are jpg: did you mean jpg? (35 remote shards were not searched)" in caplog.text


def test_a_field_that_only_some_samples_have_is_no_mistake(tmp_path: Path) -> None:
    samples = [{"__key__": "a", "jpg": b"x"}, {"__key__": "b", "jpg": b"x", "txt": b"words"}]
    ps.from_items(samples).write_tar(str(tmp_path / "out"), max_samples=1)
    for ds in (ps.read_tar(tmp_path / "out"), ps.from_items(samples)):
        assert [sample.get("txt") for sample in ds.decode(txt=len, jpg=bytes)] == [None, 5]
        with pytest.raises(DataError, match="select: the sample has no field 'txt'; the fields are jpg"):
            list(ds.select("txt"))


def test_a_field_that_no_later_stage_needs_is_no_mistake(tmp_path: Path) -> None:
    ps.from_items(FIELDS).write_tar(str(tmp_path / "out"))
    assert len(ps.read_tar(tmp_path / "out").decode(cls="cls", jpg=bytes).select("cls").take_all()) == 3


@pytest.mark.parametrize(
    "stage",
    [
        lambda ds: ds.select("nope"),
        lambda ds: ds.rename(y="nope;neither"),
        lambda ds: ds.to_tuple("x", "nope"),
    ],
)
def test_the_error_of_a_missing_field_names_shard_and_key(stage: Any) -> None:
    with pytest.raises(DataError, match="no field 'nope'") as caught:
        list(stage(numbers((3,))))
    assert (caught.value.shard, caught.value.key) == ("shard-0000", "0")


@pytest.mark.parametrize("stage", ["select", "drop", "to_tuple"])
def test_field_stages_need_samples_with_fields(stage: str) -> None:
    with pytest.raises(DataError, match=f"{stage} needs a sample with fields, not int"):
        list(getattr(ps.from_items([1]), stage)("x"))


def test_map_tuple_needs_tuples() -> None:
    with pytest.raises(StageError, match="use to_tuple first"):
        list(numbers((3,)).map_tuple(str))
    with pytest.raises(StageError, match="2 functions for 1 values"):
        list(ps.from_items([(1,)]).map_tuple(str, str))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ds: ds.map(3),
        lambda ds: ds.filter(None),
        lambda ds: ds.flat_map("f"),
        lambda ds: ds.map_batches(3),
        lambda ds: ds.map_batches(len, 0),
        lambda ds: ds.map_batches(len, fn_args=(1,)),
        lambda ds: ds.map_batches(len, fn_kwargs={"a": 1}),
        lambda ds: ds.map(len, workers=0),
        lambda ds: ds.map(len, on="gpu"),
        lambda ds: ds.map(len, wrokers=2),
        lambda ds: ds.decode(retries=-1),
        lambda ds: ds.select(),
        lambda ds: ds.select(3),
        lambda ds: ds.drop(""),
        lambda ds: ds.rename(),
        lambda ds: ds.rename(x=";"),
        lambda ds: ds.rename(x=3),
        lambda ds: ds.rename(x="a", y="a"),
        lambda ds: ds.to_tuple(),
        lambda ds: ds.to_tuple(3),
        lambda ds: ds.map_tuple(3),
        lambda ds: ds.batched(0),
        lambda ds: ds.batched(2.0),
        lambda ds: ds.batched(2, collate=3),
        lambda ds: ds.batched_by(3, 3),
        lambda ds: ds.batched_by(len, 0),
        lambda ds: ds.batched_by(len, "many"),
        lambda ds: ds.batched_by(len, 3, collate=3),
        lambda ds: ds.shuffle(0),
        lambda ds: ds.shuffle(shards=0),
        lambda ds: ds.shuffle(seed="x"),
        lambda ds: ds.limit(-1),
        lambda ds: ds.skip(1.5),
        lambda ds: ds.union(3),
        lambda ds: ds.zip([1]),
        lambda ds: ds.train_test_split(1),
        lambda ds: ds.train_test_split(0.0),
        lambda ds: ds.train_test_split(1.5),
        lambda ds: ds.shard(2, 2),
        lambda ds: ds.shard(0, 2, "hash"),
        lambda ds: ds.shard(0, 2, uneven="cut"),
        lambda ds: ds.split(0),
        lambda ds: ds.on_error("ignore"),
        lambda ds: ds.on_error("skip", -1),
        lambda ds: ds.on("spark"),
        lambda ds: ds.on("serial", cpus=2),
        lambda ds: ds.take(-1),
        lambda ds: ds.loader(epoch=-1),
        lambda ds: ds.loader(2, 2),
        lambda ds: ds.loader(rank=1),
        lambda ds: ds.iter_batches(0),
        lambda ds: ds.iter_batches(format="cupy"),
        lambda ds: ps.mix([]),
        lambda ds: ps.mix([ds, 3]),  # type: ignore[list-item]
        lambda ds: ps.mix(3),  # type: ignore[arg-type]
        lambda ds: ps.mix([ds], [1, 2]),
        lambda ds: ps.mix([ds], [0]),
        lambda ds: ps.mix([ds], ["much"]),  # type: ignore[arg-type]
        lambda ds: ps.mix([ds], stop="never"),  # type: ignore[arg-type]
        lambda ds: ps.read_tar([]),
        lambda ds: ps.read_tar("a.tar", workers=0),
    ],
)
def test_a_wrong_argument_is_refused_at_the_call(wrong: Any) -> None:
    with pytest.raises(PlanError):
        wrong(numbers((3,)))


def test_the_error_of_an_unknown_argument_lists_the_arguments() -> None:
    with pytest.raises(PlanError, match=r"map has no argument wrokers; it takes workers, .*; did you mean workers\?"):
        numbers((3,)).map(len, wrokers=2, workers=1)  # type: ignore[call-arg]


def test_the_error_of_a_failing_function_names_stage_shard_and_key() -> None:
    with pytest.raises(StageError, match="KeyError") as caught:
        list(numbers((2, 2)).map(lambda s: s["gone"] if s["x"] == 3 else s))
    error = caught.value
    assert (error.stage, error.shard, error.key) == ("map(<lambda>)", "shard-0001", "3")
    assert isinstance(error.__cause__, KeyError)


def test_a_function_that_stops_iteration_is_an_error_like_any_other() -> None:
    with pytest.raises(StageError, match="StopIteration"):
        list(numbers((3,)).map(lambda s: next(iter([]))))


def test_a_parameter_named_device_gets_the_device() -> None:
    assert list(numbers((2,)).map(lambda s, device: device)) == ["cpu", "cpu"]

    class Model:
        def __init__(self, device: str) -> None:
            self.device = device

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"device": [self.device] * len(batch["x"])}

    assert list(numbers((2,)).map_batches(Model)) == [{"device": "cpu"}] * 2
    assert list(numbers((1,)).map_batches(Model, fn_kwargs={"device": "mine"})) == [{"device": "mine"}]


@pytest.mark.parametrize("engine", ["serial", "local"])
@pytest.mark.parametrize("stage", ["map", "filter", "map_batches", "flat_map"])
def test_a_failing_sample_is_retried(stage: str, engine: str) -> None:
    def of(times: int, retries: int) -> ps.Dataset:
        flaky = Flaky(times)
        fn = (lambda s: [flaky(s)]) if stage == "flat_map" else flaky
        return ps.Dataset(getattr(numbers((6,)), stage)(fn, retries=retries).on(engine).plan)

    assert _xs(of(times=2, retries=2)) == list(range(6))
    with pytest.raises(StageError, match="not yet"):
        list(of(times=9, retries=2))


def test_a_generator_function_is_retried_from_its_beginning() -> None:
    flaky = Flaky(1)

    def twice(sample: Any) -> Any:
        yield sample
        yield flaky(sample)

    assert _xs(numbers((3,)).flat_map(twice, retries=1)) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("batches", [False, True])
def test_a_retry_draws_the_same_random_numbers(batches: bool) -> None:
    flaky = Flaky(1)

    def draw(sample: Any, rng: np.random.Generator) -> Any:
        number = int(rng.integers(1 << 40))
        return {"x": number} if flaky(sample) else None

    def draw_all(batch: Any, rng: list[np.random.Generator]) -> Any:
        numbers_ = [int(r.integers(1 << 40)) for r in rng]
        return {"x": numbers_} if flaky(batch["x"].tolist()) else None

    ds = numbers((5,))
    ds = ds.map_batches(draw_all, 2, retries=1) if batches else ds.map(draw, retries=1)
    assert _xs(ds.epoch(0)) == _xs(ds.epoch(0))


def test_a_missing_gpu_is_an_error_before_the_first_sample() -> None:
    with pytest.raises(EngineError, match=r"map\(len\) asks for gpus=1 .* no GPU"):
        list(numbers((3,)).map(len, gpus=1))


class Recording(Source):
    """A source that records which fields are located."""

    def __init__(self) -> None:
        self.located: list[Fields] = []

    def open(self) -> Any:
        reader = Numbers((3,)).open()
        locate = reader.locate

        def recorded(shard: Any, index: Any, fields: Fields) -> Any:
            self.located.append(fields)
            return locate(shard, index, fields)

        reader.locate = recorded  # type: ignore[method-assign]
        return reader

    def describe(self) -> str:
        return "recording()"


@pytest.mark.parametrize(
    ("chain", "wanted", "unwanted"),
    [
        (lambda ds: ds, {"a", "__key__"}, set()),
        (lambda ds: ds.select("x"), {"x", "__key__"}, {"a"}),
        (lambda ds: ds.decode().select("x"), {"x", "__key__"}, {"a"}),
        (lambda ds: ds.select("x").map(dict), {"x", "__key__"}, {"a"}),
        (lambda ds: ds.map(dict).select("x"), {"x", "a"}, set()),
        (lambda ds: ds.drop("a"), {"x", "b"}, {"a"}),
        (lambda ds: ds.to_tuple("x"), {"x"}, {"a", "__key__"}),
        (lambda ds: ds.to_tuple("x;__key__"), {"x", "__key__"}, {"a", "__url__"}),
        (lambda ds: ds.rename(y="x;z").select("y"), {"x", "z"}, {"y", "a"}),
        (lambda ds: ds.batched(2).unbatched().to_tuple("x"), {"x"}, {"a"}),
        (lambda ds: ds.shuffle().limit(2).select("x"), {"x"}, {"a"}),
        (lambda ds: ds.flat_map(lambda s: [s]).limit(2).select("x"), {"x", "a"}, set()),
        (lambda ds: ds.union(numbers((3,), name="b")).to_tuple("x"), {"x"}, {"a"}),
        (lambda ds: ds.zip(numbers((3,), name="b"), suffix="_b").to_tuple("x"), {"x", "a"}, set()),
    ],
)
def test_only_the_fields_that_stages_need_are_read(chain: Any, wanted: set[str], unwanted: set[str]) -> None:
    source = Recording()
    list(chain(ps.Dataset(Plan(source))))
    assert source.located
    for fields in source.located:
        assert all(map(fields.wants, wanted))
        assert not any(map(fields.wants, unwanted))


def test_a_tar_sample_holds_only_the_fields_that_are_read(tiny_shards: list[Path]) -> None:
    ds = ps.read_tar(str(tiny_shards[0]))
    assert set(ds.select("cls").first()) == {"__key__", "__url__", "cls"}
    assert set(ds.drop("jpg", "__url__").first()) == {"__key__", "png", "cls", "json"}
    assert ds.to_tuple("cls", "__key__").first() == (b"0", "000000")


def test_stages_run_in_the_threads_of_a_pool() -> None:
    here = threading.get_ident()
    assert here not in set(numbers((50,)).map(lambda s: threading.get_ident(), workers=2))
    assert set(numbers((50,)).map(lambda s: threading.get_ident()).on("serial")) == {here}


def test_alternative_names_select_the_first_field_that_is_not_none(tmp_path: Path) -> None:
    rows = [{"jpg": "a", "png": None, "cls": 1}, {"jpg": None, "png": "b", "cls": 2}]
    ps.from_items(rows).write_parquet(tmp_path / "table")
    for ds in (ps.from_items(rows), ps.read_parquet(tmp_path / "table")):
        assert [row["image"] for row in ds.rename(image="jpg;png")] == ["a", "b"]
        assert ds.rename(image="jpg;png").take_batch(2)["image"] == ["a", "b"]
        assert ds.to_tuple("jpg;png", "cls").take_all() == [("a", 1), ("b", 2)]
