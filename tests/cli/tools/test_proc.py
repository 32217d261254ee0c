"""``penstock proc``: the order of samples, failures, scripts and interruption."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Proc = Callable[..., tuple[dict[str, dict[str, bytes]], str]]


def test_samples_are_written_in_order_unless_unordered(small_shard: str, tmp_path: Path, proc: Proc) -> None:
    done = tmp_path / "done"  # the first sample waits for the fifth one, which begins when another one has ended
    slow_first = f'case "$PENSTOCK_NUMBER" in 0) until [ -e "{done}" ]; do sleep 0.01; done;; 4) : > "{done}";; esac'
    assert next(iter(proc("-p", "4", "-c", slow_first, small_shard)[0])) == "d/k0"
    done.unlink()
    keys = list(proc("-p", "4", "--unordered", "-c", slow_first, small_shard)[0])
    assert sorted(keys) == [f"d/k{number}" for number in range(8)]
    assert keys[0] != "d/k0"


FAIL_ON_K2 = 'if [ "$PENSTOCK_KEY" = d/k2 ]; then echo broken; exit 3; fi; echo fine > sample.ok'


def test_a_failing_sample_ends_the_run_with_its_output(small_shard: str, tmp_path: Path, proc: Proc) -> None:
    out = tmp_path / "out.tar"
    _, error = proc("-q", "-p", "2", "-c", FAIL_ON_K2, small_shard, "-o", str(out), code=1)
    assert error == (
        f"penstock: the command failed with exit code 3\nbroken\n (stage: proc, shard: {small_shard}, key: d/k2)\n"
    )
    assert not out.exists()


@pytest.mark.parametrize(("on_failure", "action"), [("skip", "skipped"), ("keep", "kept unchanged")])
def test_a_failing_sample_is_skipped_or_kept(on_failure: str, action: str, small_shard: str, proc: Proc) -> None:
    samples, error = proc("-q", "-e", on_failure, "-c", FAIL_ON_K2, small_shard)
    assert ("d/k2" in samples) == (on_failure == "keep")
    assert samples.get("d/k2", {"cls": b"2", "txt": b"text"}) == {"cls": b"2", "txt": b"text"}
    assert samples["d/k3"]["ok"] == b"fine\n"
    assert "broken\n" in error
    assert f"penstock: {action}: the command failed with exit code 3 (shard: {small_shard}, key: d/k2)\n" in error
    assert error.endswith("penstock: 8 samples, 1 failed\n")


def test_a_script_may_have_another_interpreter(small_shard: str, tmp_path: Path, proc: Proc) -> None:
    (tmp_path / "script.py").write_text("open('sample.py', 'w').write('here')")
    samples, _ = proc("-s", str(tmp_path / "script.py"), "--interpreter", sys.executable, small_shard)
    assert all(fields["py"] == b"here" for fields in samples.values())
    _, error = proc("-c", "x", "--interpreter", "/no/shell", small_shard, code=1)
    assert error == "penstock: cannot start the command: No such file or directory (url: /no/shell)\n"


def test_a_terminated_run_leaves_no_partial_file(small_shard: str, tmp_path: Path, warm_python: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    words = ["proc", "-c", "echo here; sleep 60", small_shard, "-w", str(tmp_path / "w"), "-o", str(out / "x.tar")]
    run = subprocess.Popen([warm_python, "-m", "penstock", *words], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("w/*/_*/sample.txt")) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.terminate()
    try:
        _, error = run.communicate(timeout=120)
    finally:
        run.kill()
    assert (run.returncode, error) == (143, b"penstock: terminated\n")
    assert list(out.iterdir()) == list((tmp_path / "w").iterdir()) == []


# Sets the flag of the signal without sending one, which would end the wait of the main thread.
SIGTERM_BEFORE_A_WAIT = """
import _thread, glob, signal, sys, threading, time
from penstock.cli import main

def interrupt():
    while not glob.glob(sys.argv[1] + "/*/_*/sample.txt"):
        time.sleep(0.01)
    time.sleep(0.2)
    _thread.interrupt_main(signal.SIGTERM)

threading.Thread(target=interrupt, daemon=True).start()
sys.exit(main(sys.argv[2:]))
"""


def test_sigterm_just_before_a_wait_is_handled(small_shard: str, tmp_path: Path, warm_python: str) -> None:
    folder = str(tmp_path / "w")
    words = ["proc", "-c", "sleep 20", small_shard, "-w", folder, "-o", str(tmp_path / "out.tar")]
    script = [warm_python, "-c", SIGTERM_BEFORE_A_WAIT, folder, *words]
    done = subprocess.run(script, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (143, b"penstock: terminated\n")
    assert not (tmp_path / "out.tar").exists()
