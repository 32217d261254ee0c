"""Whole runs on worker processes: what can be sent, what is returned, concurrent runs, and runs inside runs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import penstock
from penstock.dataset import Dataset, from_items
from penstock.engines.meter import Event
from penstock.errors import EngineError, StageError
from penstock.plan.values import WorkerKind
from penstock.testing import numbers

SOURCE = str(Path(penstock.__file__).parents[1])
ONE_PROCESS: dict[str, Any] = {"on": "processes", "workers": 1}
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test


def plus(x: int, y: int) -> int:
    return x + y


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def script(python: str, text: str, folder: Path, **env: str) -> str:
    """Run a script as a user would, and return what it prints."""
    path = folder / "script.py"
    path.write_text("import penstock as ps\nfrom penstock.dataset import from_items\n" + textwrap.dedent(text))
    done = subprocess.run(
        [python, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": SOURCE, **env},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# What can be sent to a worker.


def test_a_script_needs_no_main_guard_and_is_not_run_again(tmp_path: Path, warm_python: str) -> None:
    out = script(
        warm_python,
        """
        import functools, os
        print("main runs")
        FACTOR = 3

        class Pair:
            def __init__(self, x): self.x = x
            def __eq__(self, other): return type(other) is Pair and other.x == self.x

        class Adds:
            def __init__(self, y): self.y = y
            def __call__(self, batch): return {"x": batch["x"] + self.y}

        def times(x, factor): return x * factor
        def helped(x): return times(x, FACTOR) if os.getpid() != parent else None
        def deep(x): return helped(x)
        parent = os.getpid()

        one_process = dict(on="processes", workers=1)
        pair = from_items(range(4)).map(deep, **one_process).map(functools.partial(times, factor=2), **one_process)
        got = list(pair.map(lambda x: Pair(x + FACTOR), **one_process))
        assert got == [Pair(6 * x + 3) for x in range(4)], [vars(p) for p in got]
        assert all(type(p) is Pair for p in got)
        rows = from_items([{"x": x} for x in range(4)]).map_batches(Adds, fn_args=(5,), **one_process)
        assert [int(row["x"]) for row in rows] == [5, 6, 7, 8]
        """,
        tmp_path,
    )
    assert out == "main runs\n"


def test_functions_of_modules_on_the_path_of_the_run_can_be_sent(tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "beside_script.py").write_text("import os\ndef pid(x): return os.getpid()\n")
    (tmp_path / "on_path").mkdir()
    (tmp_path / "on_path" / "appended.py").write_text("def double(x): return 2 * x\n")
    out = script(
        warm_python,
        f"""
        import os, sys
        import beside_script
        sys.path.append({str(tmp_path / "on_path")!r})
        import appended
        one_process = dict(on="processes", workers=1)
        pids = set(from_items([1, 2]).map(beside_script.pid, **one_process))
        assert os.getpid() not in pids and len(pids) == 1
        print(list(from_items([1, 2]).map(appended.double, **one_process)))
        """,
        tmp_path,
    )
    assert out == "[2, 4]\n"


def test_closures_partials_methods_and_classes_can_be_sent() -> None:
    offset = [10]
    point = Point(4)
    functions: list[Callable[[Any], Any]] = [
        lambda x: x + offset[0],
        partial(plus, y=3),
        partial(plus, 5),
        lambda x: point.x + x,
        np.sqrt,
        str,
        "size {}".format,
    ]
    ds, want = from_items(list(range(4))), list(range(4))
    for fn in functions:
        ds, want = ds.map(fn, **ONE_PROCESS), [fn(x) for x in want]
    assert list(ds) == want


def test_instances_are_returned_with_their_class() -> None:
    got = list(from_items([1, 2]).map(Point, **ONE_PROCESS).map(lambda point: (point, Point(point.x)), workers=1))
    assert [(type(a), type(b), a.x) for a, b in got] == [(Point, Point, 1), (Point, Point, 2)]


@pytest.mark.parametrize("thing", [threading.Lock(), (x for x in [1])], ids=["lock", "generator"])
def test_a_function_that_cannot_be_sent_is_refused_before_the_first_sample(thing: Any) -> None:
    ds = from_items([1, 2]).map(plus_one).map(lambda x: (x, thing), **ONE_PROCESS)
    with pytest.raises(EngineError, match=r"map\(<lambda>\) cannot be sent to a worker process.*on='threads'"):
        next(iter(ds))


def plus_one(x: int) -> int:
    return x + 1


def test_a_function_that_a_worker_cannot_load_is_an_error() -> None:
    class Unloadable:
        def __reduce__(self) -> Any:
            return int, ("not a number",)

    thing = Unloadable()
    with pytest.raises(EngineError, match="cannot load its stages: ValueError: invalid literal") as caught:
        list(from_items([1, 2]).map(lambda x: (x, thing), **ONE_PROCESS).on_error("skip"))
    assert isinstance(caught.value.__cause__, ValueError)


class Unpicklable:
    """Cannot be pickled (``"dump"``), or cannot be unpickled (``"load"``)."""

    def __init__(self, fails_in: str) -> None:
        self.fails_in = fails_in

    def __reduce__(self) -> Any:
        if self.fails_in == "dump":
            raise TypeError("cannot be pickled")
        return int, ("not a number",)


@pytest.mark.parametrize(("fails_in", "text"), [("dump", "cannot be pickled"), ("load", "not a number")])
def test_a_result_that_cannot_be_returned_fails_alone(fails_in: str, text: str) -> None:
    def unpicklable(sample: dict[str, Any]) -> Any:
        return Unpicklable(fails_in) if sample["x"] == 13 else sample["x"]

    ds = numbers((10, 20)).map(unpicklable, **ONE_PROCESS)
    got: list[int] = []
    with pytest.raises(StageError, match=rf"{text}.*map\(unpicklable\).*shard-0001.*key: 13"):
        got.extend(ds)
    assert got == list(range(13))
    skipping = ds.on_error("skip").loader()
    assert list(skipping) == [x for x in range(30) if x != 13]
    assert [skip.place.key for skip in skipping.skipped] == ["13"]
    assert skipping.stats().segments[-1].deaths == 0


def test_a_sample_that_a_worker_cannot_unpickle_fails_alone() -> None:
    ds = from_items([0, 1, Unpicklable("load"), 3]).map(lambda x: x, **ONE_PROCESS)
    got: list[Any] = []
    with pytest.raises(StageError, match=r"not a number.*map\(<lambda>\).*key: 2"):
        got.extend(ds)
    assert got == [0, 1]
    assert list(ds.on_error("skip")) == [0, 1, 3]


class NotRebuildable(Exception):
    """Can be pickled but not unpickled: its args are not those of its constructor."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_errors_keep_their_stage_key_cause_and_text() -> None:
    def fails(x: int) -> int:
        if x == 3:
            raise FileNotFoundError(2, "no such thing", "a.txt")
        if x == 6:
            raise NotRebuildable(1, 2)
        return x

    ds = from_items(list(range(9))).map(fails, **ONE_PROCESS)
    with pytest.raises(StageError, match=r"no such thing.*map\(fails\).*key: 3") as caught:
        list(ds)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert caught.value.__cause__.filename == "a.txt"
    assert any("in fails" in note for note in caught.value.__cause__.__notes__)
    with pytest.raises(StageError, match=r"NotRebuildable: 1 and 2.*key: 6") as caught:
        list(ds.skip(4))
    assert "1 and 2" in str(caught.value.__cause__)
    assert list(ds.on_error("skip")) == [0, 1, 2, 4, 5, 7, 8]


# What a worker returns.


def pixels(x: int) -> dict[str, Any]:
    array = np.random.default_rng(x).integers(0, 256, (50_000 + 10_000 * (x % 7),), np.uint8)
    return {"x": x, "array": array, "tensor": torch.from_numpy(array[::2].copy()), "check": zlib.crc32(array.tobytes())}


def test_arrays_that_the_consumer_keeps_are_never_overwritten() -> None:
    ds = from_items(list(range(200))).map(pixels, on="processes", workers=2)
    kept = []
    for sample in ds:
        if sample["x"] % 3 == 0:  # the others are dropped, so that their memory is reused
            kept.append(sample if sample["x"] % 2 else {**sample, "tensor": sample["array"][::2]})
    assert [sample["x"] for sample in kept] == list(range(0, 200, 3))
    assert all(zlib.crc32(sample["array"].tobytes()) == sample["check"] for sample in kept)
    assert all(
        bytes(sample["tensor"].numpy() if sample["x"] % 2 else sample["tensor"]) == bytes(sample["array"][::2])
        for sample in kept
    )
    for sample in kept:
        sample["array"][:] = 0
    assert not any(sample["array"].any() for sample in kept)


def test_a_state_in_the_middle_of_a_large_block_restores_exactly_the_rest() -> None:
    def copies(x: int) -> Iterator[tuple[int, int]]:
        return ((x, number) for number in range(6000))  # more than one part

    ds = from_items([1, 2, 3]).flat_map(copies, **ONE_PROCESS)
    want = [pair for x in (1, 2, 3) for pair in copies(x)]
    loader = ds.loader()
    run = iter(loader)
    for done in (4000, 4500, 11_000):
        while next(run) != want[done - 1]:
            pass
        rest = ds.on("serial").loader()
        rest.load_state_dict(loader.state_dict())
        assert list(rest) == want[done:]
    assert list(run) == want[11_000:]


def test_inputs_that_a_worker_keeps_are_never_overwritten() -> None:
    kept: list[np.ndarray[Any, Any]] = []
    checks: list[int] = []

    def keeps(sample: dict[str, Any]) -> bool:
        kept.append(sample["array"])
        checks.append(sample["check"])
        return all(zlib.crc32(a.tobytes()) == c for a, c in zip(kept[::5], checks[::5], strict=True))

    arrays = [{name: sample[name] for name in ("array", "check")} for sample in map(pixels, range(60))]
    assert all(from_items(arrays).map(keeps, **ONE_PROCESS))


def test_a_consumer_that_keeps_nothing_needs_little_memory() -> None:
    ds = from_items(list(range(400))).map(lambda x: np.full(1_000_000, x % 256, np.uint8), **ONE_PROCESS)
    peaks = []
    for number, array in enumerate(ds):
        assert array[-1] == number % 256
        if number in (200, 399):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[1] - peaks[0] < 40_000, "KB"


# Runs inside each other and at the same time.


def test_a_function_in_a_process_may_iterate_over_a_dataset() -> None:
    inner = from_items([1, 2, 3]).map(plus_one, workers=2)
    assert list(from_items([0, 10]).map(lambda x: x + sum(inner.epoch(0)), **ONE_PROCESS)) == [9, 19]


def test_a_function_in_a_process_may_iterate_over_a_dataset_on_processes() -> None:
    inner = from_items([1, 2, 3]).map(plus_one, **ONE_PROCESS)
    assert list(from_items([0, 10]).flat_map(lambda x: [x + y for y in inner.epoch(0)], **ONE_PROCESS)) == [
        2,
        3,
        4,
        12,
        13,
        14,
    ]


def test_two_runs_on_processes_work_side_by_side() -> None:
    one = from_items(list(range(60))).map(plus_one, **ONE_PROCESS)
    two = from_items(list(range(60))).map(partial(plus, y=100), **ONE_PROCESS)
    assert list(zip(one, two, strict=True)) == [(x + 1, x + 100) for x in range(60)]


def test_several_threads_may_have_runs_on_processes() -> None:
    ds = from_items(list(range(40))).map(plus_one, **ONE_PROCESS).epoch(0)
    got: list[list[int]] = []
    threads = [threading.Thread(target=lambda: got.append(list(ds))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == [list(range(1, 41))] * 3


def test_a_forked_child_can_have_a_run_on_processes_after_its_parent(tmp_path: Path, warm_python: str) -> None:
    out = script(
        warm_python,
        """
        import os, sys
        ds = from_items(range(200)).map(lambda x: x + 1, on="processes", workers=1).map(lambda x: x, workers=2)
        want = list(ds)
        live = iter(ds)
        next(live)
        child = os.fork()
        if child == 0:
            assert list(ds) == want
            try:
                next(live)
            except ps.errors.EngineError as exc:
                print("refused", flush=True)
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert list(live) == want[1:]
        print("parent continues")
        """,
        tmp_path,
    )
    assert out == "refused\nparent continues\n"


class RankedDataset(torch.utils.data.IterableDataset[Any]):
    def __init__(self, ds: Dataset) -> None:
        self.ds = ds

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return iter(self.ds.shard(info.id, info.num_workers))


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_a_dataset_runs_inside_the_workers_of_a_data_loader(on: WorkerKind) -> None:
    ds = from_items(list(range(40))).map(plus_one, on=on, workers=1).epoch(0)
    assert list(ds) == list(range(1, 41))  # this process has run it before
    loader = torch.utils.data.DataLoader(
        RankedDataset(ds), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn about forks in a process with threads
        assert sorted(loader) == list(range(1, 41))


# Observers and statistics.


def test_an_observer_receives_events_in_order() -> None:
    seen: list[Event] = []

    def fatal(x: int) -> int:
        if x == 7:
            os._exit(1)
        return x

    ds = from_items(list(range(30))).map(fatal, **ONE_PROCESS).on_error("skip").on("local", observer=seen.append)
    assert len(list(ds)) == 29
    kinds = [event.kind for event in seen]
    assert (kinds[0], kinds[-1]) == ("begin", "end")
    assert (kinds.count("begin"), kinds.count("end")) == (1, 1)
    assert kinds.index("workers") < kinds.index("block")
    assert kinds.count("death") == 4
    assert all(event.problem and "exit status 1" in event.problem for event in seen if event.kind == "death")
    assert sum(event.items for event in seen if event.kind == "block") == 29
    assert {event.segment for event in seen if event.kind == "block"} == {"read -> map(fatal)"}
    assert all(0 <= event.took <= event.seconds for event in seen if event.kind == "block")
    assert [event.seconds for event in seen if event.kind != "tick"][-1] == max(event.seconds for event in seen)


@pytest.mark.parametrize("kind", ["begin", "workers", "block", "tick", "end"])
def test_an_observer_that_fails_does_not_stop_the_run(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engines.local.supervisor.TICK_S", 0.005)

    def observer(event: Event) -> None:
        if event.kind == kind:
            raise ValueError("the observer's own")

    def waits(x: int) -> int:
        time.sleep(0.01)
        return x

    assert list(from_items(list(range(40))).map(waits, workers=2).on("local", observer=observer)) == list(range(40))
    assert caplog.text.count("the observer failed") == 1


def test_stats_are_available_before_during_and_after_a_run() -> None:
    ds = from_items(list(range(50))).map(plus_one, **ONE_PROCESS)
    assert (ds.stats().items, ds.stats().segments) == (0, ())
    run = iter(ds)
    next(run)
    during = ds.stats()
    assert during.running
    assert during.segments[-1].on == "processes"
    assert during.items >= 1
    assert sum(1 for _ in run) == 49
    after = ds.stats()
    assert not after.running
    assert (after.items, after.segments[-1].items, after.segments[-1].workers) == (50, 50, 1)
    assert after.segments[-1].busy > 0
    assert "map(plus_one)" in str(after)


def test_the_stats_of_a_loader_are_those_of_its_last_epoch() -> None:
    loader = from_items(list(range(50))).map(plus_one, **ONE_PROCESS).loader()
    for _ in range(2):
        assert len(list(loader)) == 50
        assert (loader.stats().items, loader.stats().running) == (50, False)
    assert loader.stats().segments[-1].on == "processes"


def twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [sample, sample]


def test_a_half_delivered_window_is_resumed_by_processes() -> None:
    ds = numbers((9, 8)).flat_map(twice, on="processes", workers=2).shuffle(5)
    want = [sample["x"] for sample in ds.epoch(0).on("serial")]
    loader = ds.loader(uneven="keep")
    got = [sample["x"] for sample in islice(loader, 7)]
    again = ds.loader(uneven="keep")
    again.load_state_dict(loader.state_dict())
    loader.close()
    assert got + [sample["x"] for sample in again] == want


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_multiprocessing_starts_can_send_what_its_main_module_defines(
    method: str, warm_python: str, tmp_path: Path
) -> None:
    text = """
    import multiprocessing

    class Point:
        def __init__(self, x):
            self.x = x

    def point(x):
        return Point(x)

    def main():
        points = list(from_items([1, 2]).map(point, on="processes", workers=1))
        print([(type(point) is Point, point.x) for point in points])

    if __name__ == "__main__":
        main()
        process = multiprocessing.get_context(METHOD).Process(target=main)
        process.start()
        process.join()
    """
    assert script(warm_python, text.replace("METHOD", repr(method)), tmp_path) == "[(True, 1), (True, 2)]\n" * 2
