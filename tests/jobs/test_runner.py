from __future__ import annotations

import ctypes
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import penstock as ps
from penstock.errors import PlanError, StageError, StateError, StorageError
from penstock.jobs import Out, Processed
from penstock.landing.output_sink import JOB_FOLDER
from penstock.storage import Memory

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

FULL = os.environ.get("PENSTOCK_FULL") == "1"
PACKAGE = str(Path(ps.__file__).parent)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    return tmp_path


def _write_inputs(count: int = 6) -> list[str]:
    for number in range(count):
        Path("in", f"{number}.txt").write_text(f"word {number}")
    return [f"in/{number}.txt" for number in range(count)]


def _process(inputs: Any, fn: Any, **options: Any) -> Processed:
    return ps.process(inputs, fn, **{"out": "out", "on": "threads", "workers": 3, "retries": 0, **options})


def _outputs(out: str = "out") -> dict[str, str]:
    outputs = {}
    for parent, folders, names in os.walk(out):
        folders[:] = [name for name in folders if name != JOB_FOLDER]
        for name in names:
            path = os.path.join(parent, name)
            outputs[os.path.relpath(path, out)] = Path(path).read_text()
    return outputs


def _job_files() -> list[str]:
    return sorted(os.listdir(f"out/{JOB_FOLDER}"))


def upper(path: Path, out: Out) -> dict[str, Any]:
    text = path.read_text()
    out.path(f"{path.stem}.up").write_text(text.upper())
    return {"source": path, "letters": len(text)}


def failing(path: Path, out: Out) -> Iterator[dict[str, Any]]:
    """Write files and yield rows; then fail on odd numbers."""
    number = int(path.stem)
    time.sleep(random.Random(number).random() / 100)
    for part in range(number % 3):
        out.path(f"{number}/{part}.txt").write_text(f"{number} {part}")
        yield {"number": number, "part": part}
    if number % 2:
        raise ValueError(f"{number} is odd")


def test_rows_and_outputs_are_in_the_order_of_the_inputs() -> None:
    inputs = _write_inputs()[::-1]
    meta = _process(inputs, upper, metadata="m.jsonl")
    rows = [{"input": name, "source": name, "letters": 6} for name in inputs]
    assert meta.take_all() == rows == ps.read_json("m.jsonl").take_all()
    assert _outputs() == {f"{n}.up": f"WORD {n}" for n in range(6)}
    assert (meta.inputs, meta.worked, meta.failures) == (6, 6, ())
    assert _job_files() == ["journal.jsonl"]
    assert isinstance(meta, ps.Dataset)
    assert pickle.loads(pickle.dumps(meta)).map(lambda row: row["letters"]).take_all() == [6] * 6


def test_threads_and_processes_give_the_same_result() -> None:
    inputs, results = _write_inputs(12), []
    for on in ("threads", "processes"):
        meta = _process(inputs, failing, out=f"out-{on}", metadata=f"{on}.parquet", on=on, retries=1)
        failures = [(failure.input, failure.error, failure.traceback, failure.tries) for failure in meta.failures]
        results.append((meta.take_all(), Path(f"{on}.parquet").read_bytes(), _outputs(f"out-{on}"), failures))
    assert results[0] == results[1]
    rows, _, outputs, failures = results[0]
    expected = [(n, part) for n in range(0, 12, 2) for part in range(n % 3)]
    assert [(row["number"], row["part"]) for row in rows] == expected
    assert sorted(outputs) == sorted(f"{n}/{part}.txt" for n, part in expected)
    assert [failure[:2] for failure in failures] == [
        (f"in/{n}.txt", f"ValueError: {n} is odd") for n in range(1, 12, 2)
    ]
    for _, _, trace, tries in failures:
        assert "raise ValueError" in trace
        assert PACKAGE not in trace  # only frames of the user
        assert tries == 2


def test_a_rerun_does_only_what_is_missing_or_changed() -> None:
    inputs, called = _write_inputs(), []

    def fn(path: Path, out: Out) -> dict[str, Any]:
        called.append(path.name)
        out.path(f"{path.stem}.{path.read_text().split()[-1]}").write_text("")
        return {"text": path.read_text()}

    def rerun(**options: Any) -> list[str]:
        called.clear()
        meta = _process(inputs, fn, **options)
        assert meta["text"].take_all() == [Path(name).read_text() for name in inputs]
        assert meta.worked == len(called)
        return sorted(called)

    assert len(rerun()) == 6
    assert rerun() == []
    Path("in/2.txt").write_text("changed 7")
    assert rerun() == ["2.txt"]
    assert sorted(_outputs()) == ["0.0", "1.1", "2.7", "3.3", "4.4", "5.5"]  # 2.2 is gone
    Path("out/3.3").unlink()
    Path("out/4.4").write_text("cut off")
    assert rerun() == ["3.txt", "4.txt"]
    inputs.append("in/6.txt")
    _write_inputs(7)
    assert rerun() == [f"{n}.txt" for n in range(7)]  # because all were written again
    assert len(rerun(fresh=True)) == 7


def test_failed_inputs_are_processed_again_and_lose_their_old_outputs() -> None:
    inputs = _write_inputs(3)

    def fn(path: Path, out: Out) -> dict[str, Any]:
        out.path(path.name).write_text("")
        if "bad" in path.read_text():
            raise ValueError("bad")
        return {}

    assert len(_process(inputs, fn)) == 3
    Path("in/1.txt").write_text("bad")
    meta = _process(inputs, fn)
    assert [failure.input for failure in meta.failures] == ["in/1.txt"]
    assert (len(meta), sorted(_outputs())) == (2, ["0.txt", "2.txt"])
    Path("in/1.txt").write_text("good")
    meta = _process(inputs, fn)
    assert (meta.worked, meta.failures, len(meta), len(_outputs())) == (1, (), 3, 3)


def test_a_failed_call_is_repeated_up_to_retries_times() -> None:
    calls: dict[str, int] = {}

    def fn(path: Path, out: Out) -> dict[str, Any]:
        calls[path.stem] = calls.get(path.stem, 0) + 1
        out.path(f"{path.stem}-{calls[path.stem]}").write_text("")
        if calls[path.stem] <= int(path.stem):
            raise OSError("not yet")
        return {"calls": calls[path.stem]}

    meta = _process(_write_inputs(4), fn, retries=2)
    assert meta["calls"].take_all() == [1, 2, 3]
    assert [(failure.input, failure.error, failure.tries) for failure in meta.failures] == [
        ("in/3.txt", "OSError: not yet", 3)
    ]
    assert sorted(_outputs()) == ["0-1", "1-2", "2-3"]  # no outputs of failed calls


def test_failures_are_logged_and_raised_on_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        meta = _process(_write_inputs(4), failing)
    assert "2 of 4 inputs failed (in/1.txt: ValueError: 1 is odd; in/3.txt: ValueError: 3 is odd)" in caplog.text
    with pytest.raises(StageError, match=r"2 of 4 inputs failed; the first: ValueError: 1 is odd.*in/1.txt"):
        _process(_write_inputs(4), failing, on_failure="raise", metadata="m.csv")
    assert ps.read_csv("m.csv").count() == len(meta)


def test_a_trial_runs_in_this_process_and_nothing_counts_as_done() -> None:
    threads = []

    def fn(path: Path, out: Out) -> dict[str, Any]:
        threads.append(threading.current_thread())
        out.path(f"{len(threads)}.txt").write_text("")
        return {"n": len(threads)}

    meta = _process(_write_inputs(), fn, only=2, on="processes", metadata="m.csv")
    assert meta["n"].take_all() == [1, 2]
    assert set(threads) == {threading.main_thread()}
    assert sorted(_outputs()) == ["1.txt", "2.txt"]
    assert not os.path.exists("m.csv")
    assert _process(_write_inputs(), fn).worked == 6
    assert sorted(_outputs()) == [f"{n}.txt" for n in range(3, 9)]  # which replace those of the trial


def test_a_trial_raises_what_the_function_raises() -> None:
    def fn(path: Path, out: Out) -> None:
        out.path("x").write_text("")
        raise FileNotFoundError("my own")

    with pytest.raises(FileNotFoundError, match="my own"):
        _process(_write_inputs(), fn, only=1)
    assert _outputs() == {}
    with pytest.raises(StorageError, match="there is no such file"):
        _process(["gone"], fn, only=1)


def test_a_function_may_take_the_path_alone_or_be_a_class() -> None:
    class Counter:
        constructed = 0

        def __init__(self) -> None:
            Counter.constructed += 1

        def __call__(self, path: Path, out: Out) -> dict[str, Any]:
            return {"input": "mine", "own": out.input}

    assert _process(_write_inputs(2), lambda path: {"name": path.name})["name"].take_all() == ["0.txt", "1.txt"]
    meta = _process(_write_inputs(2), Counter, out="other", workers=1)
    assert meta.take_all() == [{"input": "mine", "own": "in/0.txt"}, {"input": "mine", "own": "in/1.txt"}]
    assert Counter.constructed == 1


def dying(path: Path, out: Out) -> dict[str, Any]:
    """Exit, crash, hang or call sys.exit on the first four inputs."""
    out.path(path.name).write_text("x")
    if path.stem == "0":
        os._exit(3)
    if path.stem == "1":
        ctypes.string_at(0)
    if path.stem == "2":
        time.sleep(60)
    if path.stem == "3":
        sys.exit(4)
    return {"n": int(path.stem)}


def test_a_worker_that_dies_or_hangs_fails_its_own_input_only() -> None:
    meta = ps.process(_write_inputs(9), dying, "out", "m.jsonl", workers=2, retries=0, timeout_s=5)
    assert meta["n"].take_all() == [4, 5, 6, 7, 8]
    assert sorted(_outputs()) == [f"{n}.txt" for n in range(4, 9)]
    errors = {failure.input[3]: failure.error for failure in meta.failures}
    assert "exit status 3" in errors["0"]
    assert "SIGSEGV" in errors["1"]
    assert "longer than timeout_s=5" in errors["2"]
    assert errors["3"] == "SystemExit: 4"
    assert _job_files() == ["journal.jsonl"]


def test_each_of_a_few_inputs_keeps_a_worker_busy() -> None:
    barrier = threading.Barrier(4)

    def fn(path: Path) -> dict[str, Any]:
        barrier.wait(60)
        return {}

    assert _process(_write_inputs(4), fn, workers=4).failures == ()


def test_inputs_that_write_the_same_name_all_fail_in_any_order() -> None:
    def fn(path: Path, out: Out) -> dict[str, Any]:
        number = int(path.stem)
        time.sleep(random.random() / 50)
        for name in {0: "a", 1: "ab", 2: "b", 3: "c"}[number]:
            out.path(name).write_text(str(number))
        return {"n": number}

    for attempt in range(6):
        meta = _process(_write_inputs(4), fn, out=f"out{attempt}")
        assert meta["n"].take_all() == [3]
        assert _outputs(f"out{attempt}") == {"c": "3"}
        errors = {failure.input: failure.error for failure in meta.failures}
        assert list(errors) == ["in/0.txt", "in/1.txt", "in/2.txt"]
        assert errors["in/0.txt"].startswith("'in/0.txt' and 'in/1.txt' both write 'a', so neither is published")
        assert errors["in/2.txt"].startswith("'in/1.txt' and 'in/2.txt' both write 'b'")
    meta = _process(["in/0.txt"], fn, out="out0")  # alone it has no rival
    assert (meta.failures, _outputs("out0")) == ((), {"a": "0", "c": "3"})
    meta = _process(["in/1.txt"], fn, out="out0")
    assert "an output of 'in/0.txt', an input of an earlier run" in meta.failures[0].error


def test_files_that_are_not_outputs_are_not_replaced_unless_requested() -> None:
    inputs = _write_inputs(2)
    Path("out").mkdir()
    Path("out/0.up").write_text("mine")
    meta = _process(inputs, upper)
    assert "the folder already holds '0.up', which is not an output of this job" in meta.failures[0].error
    assert _outputs() == {"0.up": "mine", "1.up": "WORD 1"}
    assert _process(inputs, upper, overwrite=True).failures == ()
    assert _outputs()["0.up"] == "WORD 0"


def test_inputs_and_metadata_are_never_replaced() -> None:
    def fn(path: Path, out: Out) -> None:
        out.path(path.name if path.stem == "0" else "m.csv").write_text("")

    meta = _process(_write_inputs(2), fn, out="in", metadata="in/m.csv", overwrite=True)
    assert [failure.error.partition(";")[0] for failure in meta.failures] == [
        "the output '0.txt' would replace the input 'in/0.txt'",
        "the output 'm.csv' would replace the metadata",
    ]
    assert Path("in/0.txt").read_text() == "word 0"


def test_a_link_cannot_lead_outputs_out_of_the_folder() -> None:
    def fn(path: Path, out: Out) -> None:
        out.path(f"link/{path.name}").write_text("")

    Path("elsewhere").mkdir()
    Path("out").mkdir()
    os.symlink("../elsewhere", "out/link")
    meta = _process(_write_inputs(2), fn)
    assert all("leads out of the folder, through a link" in failure.error for failure in meta.failures)
    assert len(meta.failures) == 2
    assert os.listdir("elsewhere") == []


def test_a_name_below_a_published_file_fails_alone() -> None:
    def fn(path: Path, out: Out) -> dict[str, Any]:
        out.path("a" if path.stem == "0" else "a/b").write_text("")
        return {}

    meta = _process(_write_inputs(2), fn, workers=1)
    assert (len(meta), len(meta.failures), len(_outputs())) == (1, 1, 1)
    assert "cannot be published" in meta.failures[0].error


_HOSTILE = ["a b", "\u00fc\n'\"", "[x]{1,2}*", "-rf", "x" * 200, b"\xff".decode("utf-8", "surrogateescape")]


@pytest.mark.parametrize("name", _HOSTILE, ids=ascii)
def test_inputs_may_have_hostile_names(name: str) -> None:
    Path("in", name).write_text("x")
    given = f"in/{name}"

    def fn(path: Path, out: Out) -> dict[str, Any]:
        out.path(path.name).write_text(path.read_text())
        return {"source": path}

    for format in ("parquet", "csv", "jsonl"):
        meta = _process([given], fn, metadata=f"m.{format}")
        shown = given.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        assert meta.take_all() == [{"input": shown, "source": shown}]
    assert meta.worked == 0
    assert os.listdir("out") == [JOB_FOLDER, name] or os.listdir("out") == [name, JOB_FOLDER]


def test_missing_inputs_and_wrong_return_values_are_described() -> None:
    _write_inputs(1)

    def fn(path: Path) -> Any:
        return 3

    meta = _process(["gone.txt", "in/0.txt"], fn, retries=5)
    errors = [(failure.input, failure.error, failure.tries) for failure in meta.failures]
    assert errors[0] == ("gone.txt", "there is no such file (url: gone.txt)", 6)
    assert errors[1][1] == "the function returned 3 (int); return a row (a dict), several rows, or None"


def test_an_input_that_changes_during_the_call_fails() -> None:
    def fn(path: Path) -> dict[str, Any]:
        path.write_text("changed, and longer")
        return {}

    assert "the input changed while it was being processed" in _process(_write_inputs(1), fn).failures[0].error


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fn": 3}, "needs a function"),
        ({"fn": lambda: None}, r"cannot be called with \(path, out\)"),
        ({"fn": int}, "class without __call__|cannot be called"),
        ({"metadata": "m.xlsx"}, "metadata"),
        ({"engine": "spark"}, "engine"),
        ({"on": "gpu"}, "on="),
        ({"workers": 0}, "workers"),
        ({"retries": -1}, "retries"),
        ({"only": 0}, "only"),
        ({"timeout_s": 1}, "a thread cannot be stopped"),
        ({"on_failure": "ignore"}, "on_failure"),
        ({"address": "auto"}, "engine='ray'"),
    ],
    ids=lambda options: "-".join(options) if isinstance(options, dict) else "",
)
def test_arguments_are_checked_before_anything_is_written(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        _process(_write_inputs(1), **{"fn": upper, **options})
    assert not os.path.exists("out")


def test_a_folder_that_cannot_be_written_is_a_storage_error() -> None:
    Path("file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        _process(_write_inputs(1), upper, out="file/out")


def test_a_full_disk_ends_the_run_and_finished_inputs_are_kept() -> None:
    free = Path("free").absolute()  # a file: a list would be a part of the function, and its change one of the function
    free.write_text("...")

    def fn(path: Path, out: Out) -> dict[str, Any]:
        out.path(path.name).write_text("")
        if not free.read_text():
            raise OSError(28, "No space left on device")
        free.write_text(free.read_text()[1:])
        return {"n": path.stem}

    with pytest.raises(StorageError, match="No space left on device; finished inputs are kept: free some space"):
        _process(_write_inputs(), fn, workers=1)
    assert len(_outputs()) == 3
    assert _job_files() == ["journal.jsonl"]
    free.write_text("..." * 3)
    meta = _process(_write_inputs(0) or [f"in/{n}.txt" for n in range(6)], fn, workers=1)
    assert (meta.worked, meta["n"].take_all()) == (3, list("012345"))


def test_a_folder_belongs_to_one_run_at_a_time() -> None:
    started, finish = threading.Event(), threading.Event()

    def fn(path: Path) -> dict[str, Any]:
        started.set()
        finish.wait(60)
        return {}

    for out in ("out", "memory://jobs/busy"):
        started.clear()
        finish.clear()
        first = threading.Thread(target=_process, args=(_write_inputs(1), fn), kwargs={"out": out})
        first.start()
        started.wait(60)
        with pytest.raises(PlanError, match=rf"another job \(process {os.getpid()} on .*\) is writing there"):
            _process(_write_inputs(1), upper, out=out)
        finish.set()
        first.join()


def test_another_function_is_refused_and_fresh_starts_over() -> None:
    _process(_write_inputs(2), upper)
    with pytest.raises(StateError, match="holds the outputs of upper, not of failing"):
        _process(_write_inputs(2), failing)
    meta = _process(_write_inputs(3), failing, fresh=True)
    assert meta.worked == 3
    assert sorted(_outputs()) == ["2/0.txt", "2/1.txt"]


def _versions() -> Any:
    """Return a maker of functions of one name, whose code is the same and whose closures are not."""

    def make(text: str, fails: bool = False) -> Any:
        def fn(path: Path, out: Out) -> dict[str, Any]:
            out.path(f"{path.stem}.txt").write_text(text)
            if fails and path.stem == "1":
                os.kill(os.getpid(), signal.SIGINT)
            return {"text": text}

        return fn

    return make


@pytest.mark.parametrize("out", ["out", "memory://changed/out"])
def test_inputs_are_processed_again_by_a_changed_function(out: str) -> None:
    inputs, make = _write_inputs(3), _versions()
    for text, worked in (("a", 3), ("a", 0), ("b", 3), ("b", 0), ("a", 3)):
        meta = _process(inputs, make(text), out=out)
        assert (meta.worked, meta["text"].take_all()) == (worked, [text] * 3)

    def other(path: Path, out: Out) -> dict[str, Any]:
        return {"text": "no files"}

    other.__qualname__ = make("a").__qualname__
    other.__name__ = "fn"
    meta = _process(inputs, other, out=out)
    assert (meta.worked, meta["text"].take_all()) == (3, ["no files"] * 3)
    assert _outputs() == {}
    assert not [one.url for one in Memory().list("memory://changed/out/") if JOB_FOLDER not in one.url]


def test_remote_outputs_of_a_version_that_was_interrupted_do_not_count_for_the_version_before() -> None:
    inputs, make, out = _write_inputs(3), _versions(), "memory://reverted/out"
    _process(inputs, make("a"), out=out)
    with pytest.raises(KeyboardInterrupt):
        _process(inputs, make("b", fails=True), out=out)
    assert _process(inputs, make("a"), out=out).worked == 3
    assert [b"".join(Memory().stream(f"{out}/{n}.txt")) for n in range(3)] == [b"a"] * 3


def test_inputs_outputs_and_metadata_may_be_remote() -> None:
    for number in range(4):
        with Memory().put(f"memory://jobs/in/{number}.txt") as upload:
            upload.write(f"word {number}".encode())
            upload.commit()

    def outputs() -> list[str]:
        return sorted(info.url for info in Memory().list("memory://jobs/out/") if JOB_FOLDER not in info.url)

    remote = {"out": "memory://jobs/out/", "metadata": "memory://jobs/m.parquet"}
    meta = _process("memory://jobs/in/*.txt", upper, **remote)
    assert [row["input"] for row in meta] == [f"memory://jobs/in/{n}.txt" for n in range(4)]
    assert ps.read_parquet("memory://jobs/m.parquet")["letters"].take_all() == [6] * 4
    assert outputs() == [f"memory://jobs/out/{n}.up" for n in range(4)]
    Memory().delete("memory://jobs/out/2.up")
    assert _process("memory://jobs/in/*.txt", upper, **remote).worked == 1
    with Memory().put("memory://jobs/in/1.txt") as upload:
        upload.write(b"other")
        upload.commit()
    meta = _process("memory://jobs/in/*.txt", upper, **remote)
    assert (meta.worked, meta["letters"].take_all()) == (1, [6, 5, 6, 6])
    assert _process("memory://jobs/in/*.txt", upper, fresh=True, **remote).worked == 4

    def clash(path: Path, out: Out) -> None:
        out.path("same").write_text(path.name)

    meta = _process("memory://jobs/in/*.txt", clash, out="memory://jobs/out/", fresh=True)
    assert len(meta.failures) == 4
    assert outputs() == []


JOB = """
    import os, sys, time
    import penstock as ps

    def work(path, out):
        number = int(path.stem)
        time.sleep(0.002)
        if number >= LAST and not os.path.exists("go"):
            time.sleep(60)  # the run is killed before it is complete
        for part in range(1 + number % 2):
            with open(out.path(f"{number % 7}/{number}-{part}.txt"), "w") as file:
                file.write(str(number))
                file.flush()
                file.write("-" * 5000)
            yield {"number": number, "part": part}
        if number % 20 == 7:
            raise ValueError(f"{number} fails")

    if __name__ == "__main__":
        inputs = [f"in/{number}.txt" for number in range(int(sys.argv[1]))]
        ps.process(inputs, work, "out", "m.parquet", workers=4, retries=1)
"""


def test_a_job_that_is_killed_twice_ends_as_if_it_had_never_been_killed(warm_python: str) -> None:
    count = 10_000 if FULL else 240
    _write_inputs(count)
    Path("job.py").write_text(textwrap.dedent(JOB).replace("LAST", str(count * 9 // 10)))
    journal = Path(f"out/{JOB_FOLDER}/journal.jsonl")
    for share in (0.3, 0.6):
        process = subprocess.Popen([warm_python, "job.py", str(count)], stderr=subprocess.DEVNULL)
        while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < share * count):
            time.sleep(0.01)
        process.send_signal(signal.SIGRTMIN)
        assert process.wait() == -signal.SIGKILL
        assert not os.path.exists("m.parquet")
        assert all(text == f"{name.split('/')[1].split('-')[0]}{'-' * 5000}" for name, text in _outputs().items())
    before = journal.read_bytes().count(b'"done": true')
    Path("go").touch()
    done = subprocess.run([warm_python, "job.py", str(count)], capture_output=True, text=True, check=True)
    good = [number for number in range(count) if number % 20 != 7]
    parts = [(n, part) for n in good for part in range(1 + n % 2)]
    rows = [{"input": f"in/{n}.txt", "number": n, "part": part} for n, part in parts]
    assert ps.read_parquet("m.parquet").take_all() == rows
    assert _outputs() == {f"{n % 7}/{n}-{part}.txt": f"{n}{'-' * 5000}" for n, part in parts}
    assert f"{count - len(good)} of {count} inputs failed" in done.stderr
    # Only the inputs that were being processed when the run was killed are processed twice.
    assert journal.read_bytes().count(b'"done": true') <= len(good) + 2 * 8
    assert before > 0.5 * count
    assert _job_files() == ["journal.jsonl"]
