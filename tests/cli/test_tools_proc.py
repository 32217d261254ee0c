"""A command or a function on every sample: what goes in, what comes out, what happens when it fails."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.storage import open_storage
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server

Out = pytest.CaptureFixture[bytes]


FULL = os.environ.get("PENSTOCK_FULL") == "1"


@pytest.fixture
def shard(tmp_path: Path) -> str:
    with ps.TarWriter(tmp_path / "in.tar") as writer:
        for number in range(8):
            writer.write({"__key__": f"d/k{number}", "cls": b"%d" % number, "txt": b"text"})
    return str(tmp_path / "in.tar")


def samples(data: bytes) -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            key, _, field = member.name.partition(".")
            file = tar.extractfile(member)
            assert file is not None
            found.setdefault(key, {})[field] = file.read()
    return found


def proc(out: Out, *words: str, code: int = 0) -> tuple[dict[str, dict[str, bytes]], str]:
    assert main(["proc", *words]) == code
    found = out.readouterr()
    return (samples(found.out) if not code else {}), found.err.decode()


@pytest.mark.parametrize("parallel", ["1", "4"])
def test_a_command_sees_the_files_and_the_key_and_its_files_are_the_sample(
    parallel: str, shard: str, capfdbinary: Out
) -> None:
    script = 'ls; echo "$PENSTOCK_KEY $PENSTOCK_NUMBER" > sample.key; rm sample.txt; mv sample.cls sample.NUM; >b.txt'
    found, printed = proc(capfdbinary, "-p", parallel, "-c", script, shard)
    assert list(found) == [f"d/k{number}" for number in range(8)]
    assert found["d/k3"] == {"key": b"d/k3 3\n", "num": b"3"}
    assert printed == "sample.cls\nsample.txt\n" * 8


def test_samples_come_in_order_unless_that_is_not_asked_for(shard: str, capfdbinary: Out) -> None:
    slow = '[ "$PENSTOCK_NUMBER" != 0 ] || sleep 0.6'
    assert next(iter(proc(capfdbinary, "-p", "4", "-c", slow, shard)[0])) == "d/k0"
    found = list(proc(capfdbinary, "-p", "4", "--unordered", "-c", slow, shard)[0])
    assert sorted(found) == [f"d/k{number}" for number in range(8)]
    assert found[0] != "d/k0"


def test_each_sample_has_a_folder_of_its_own_that_is_removed(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = "pwd > sample.pwd; mkdir deep; chmod 000 deep; (sleep 100 &) "
    found, _ = proc(capfdbinary, "-p", "3", "-w", str(work), "-c", script, shard)
    places = {fields["pwd"] for fields in found.values()}
    assert len(places) == 8
    assert all(place.startswith(str(work).encode()) for place in places)
    assert list(work.iterdir()) == []


FAIL = 'if [ "$PENSTOCK_KEY" = d/k2 ]; then echo broken; exit 3; fi; echo fine > sample.ok'


def test_a_failing_sample_ends_the_run_with_its_output(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    out = tmp_path / "out.tar"
    _, said = proc(capfdbinary, "-q", "-p", "2", "-c", FAIL, shard, "-o", str(out), code=1)
    assert said == f"penstock: the command failed with exit code 3\nbroken\n (stage: proc, shard: {shard}, key: d/k2)\n"
    assert not out.exists()


@pytest.mark.parametrize("what", ["skip", "keep"])
def test_a_failing_sample_is_left_out_or_kept(what: str, shard: str, capfdbinary: Out) -> None:
    found, said = proc(capfdbinary, "-q", "-e", what, "-c", FAIL, shard)
    assert ("d/k2" in found) == (what == "keep")
    assert found.get("d/k2", {"cls": b"2", "txt": b"text"}) == {"cls": b"2", "txt": b"text"}
    assert found["d/k3"]["ok"] == b"fine\n"
    assert "broken\n" in said
    assert said.endswith("penstock: 8 samples, 1 failed\n")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sleep 50", "took longer than 0.3 s"),
        ("kill -11 $$", "ended by signal 11"),
        ("rm sample.txt; ln -s /etc/passwd sample.txt", "'sample.txt' is a link, not a file"),
        ("rm sample.txt; mkfifo sample.txt", "'sample.txt' is no file"),
        ("mkdir sample.d", "'sample.d' is no file"),
        ("truncate -s 1T sample.txt", "'sample.txt' has more than"),
        ("rm -rf ../*", "its files cannot be read back"),
        ("cp sample.txt sample.TXT", "two files are the field 'txt'"),
        ("echo a.b > sample.__key__", "the key has a dot"),
        ("echo /etc/x > sample.__key__", "absolute path"),
        ("echo ../x > sample.__key__", "leads out of its folder"),
    ],
)
def test_what_a_command_does_wrong_is_told(script: str, words: str, shard: str, capfdbinary: Out) -> None:
    _, said = proc(capfdbinary, "--timeout", "0.3", "--count", "1", "-c", script, shard, code=1)
    assert words in said
    assert "key: d/k0" in said


def test_a_key_is_changed_by_a_file_and_a_sample_without_files_is_gone(shard: str, capfdbinary: Out) -> None:
    script = 'if [ "$PENSTOCK_NUMBER" = 1 ]; then rm *; else echo "x-$PENSTOCK_NUMBER" > sample.__key__; fi'
    found, said = proc(capfdbinary, "-c", script, "--add-log", "log", "--count", "1", shard)
    assert found == {"x-0": {"cls": b"0", "txt": b"text", "log": b""}}
    found, said = proc(capfdbinary, "-c", script, shard)
    assert list(found) == [f"x-{number}" for number in (0, 2, 3, 4, 5, 6, 7)]
    assert said == "penstock: 8 samples, 1 left without files\n"


def test_a_script_and_another_shell(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    (tmp_path / "script.py").write_text("open('sample.py', 'w').write('here')")
    found, _ = proc(capfdbinary, "-s", str(tmp_path / "script.py"), "--interpreter", sys.executable, shard)
    assert all(fields["py"] == b"here" for fields in found.values())
    _, said = proc(capfdbinary, "-c", "x", "--interpreter", "/no/shell", shard, code=1)
    assert said == "penstock: the command cannot be started: No such file or directory (url: /no/shell)\n"


FUNCTIONS = """
def upper(sample):
    if sample["__key__"] == "d/k7":
        return None
    return {**sample, "txt": sample["txt"].upper(), "n": sample["cls"] + 1} if "n" not in sample else sample

def twice(sample):
    return [{"__key__": f"{sample['__key__']}-{i}", "txt": sample["txt"]} for i in range(2)]

def fails(sample):
    if sample["__key__"] == "d/k2":
        raise ValueError("broken")
    return sample
"""


def test_a_function_instead_of_a_command(
    shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Out
) -> None:
    (tmp_path / "functions9.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found, _ = proc(capfdbinary, "--python", "functions9:twice", shard)
    assert list(found)[:3] == ["d/k0-0", "d/k0-1", "d/k1-0"]
    _, said = proc(capfdbinary, "--python", "functions9:fails", shard, code=1)
    assert "broken" in said
    found, said = proc(capfdbinary, "--python", "functions9:fails", "-e", "keep", shard)
    assert len(found) == 8
    assert "ValueError: broken" in said
    found, _ = proc(capfdbinary, "--python", "functions9:fails", "-e", "skip", shard)
    assert len(found) == 7
    _, said = proc(capfdbinary, "--python", "functions9:none", shard, code=1)
    assert "no such function" in said


def test_a_function_gets_decoded_samples_in_processes(shard: str, tmp_path: Path) -> None:
    (tmp_path / "functions9.py").write_text(
        "import os\n\ndef plus(sample):\n"
        "    return {**sample, 'n.txt': str(sample['cls'] + 1), 'p.txt': str(os.getpid())}\n"
    )
    words = [sys.executable, "-m", "penstock", "proc", "--python", "functions9:plus", "--decode", "rgb8", "-p", "2"]
    subprocess.run([*words, shard, "-o", "out.tar"], cwd=tmp_path, check=True)
    rows = ps.read_tar(str(tmp_path / "out.tar")).take_all()
    assert [row["n.txt"] for row in rows] == [b"%d" % (number + 1) for number in range(8)]
    assert {row["p.txt"] for row in rows} != {str(os.getpid()).encode()}


def _many(folder: Path, count: int = 4) -> str:
    for shard in range(count):
        with ps.TarWriter(folder / f"in-{shard:02d}.tar") as writer:
            for number in range(5):
                writer.write({"__key__": f"{shard}-{number}", "txt": b"x" * 1000})
    return f"{folder}/in-{{00..{count - 1:02d}}}.tar"


WORK = "echo done > sample.out; sleep ${PENSTOCK_TEST_SLEEP:-0}"


def _tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".index")}


def test_shards_become_shards_and_what_is_there_is_not_done_again(tmp_path: Path, capfdbinary: Out) -> None:
    pattern, out = _many(tmp_path), tmp_path / "out"
    words = ["proc", "-c", WORK, pattern, "-o", str(out / "ocr-{}.tar"), "--jobs", "3"]
    assert main(words) == 0
    assert capfdbinary.readouterr().err == b"penstock: 4 shards done\n"
    want = _tree(out)
    assert sorted(want) == ["manifest.json", *(f"ocr-{number:02d}.tar" for number in range(4))]
    assert main(["verify", str(out)]) == 0
    (out / "ocr-02.tar").unlink()
    assert main(words) == 0
    assert capfdbinary.readouterr().err.endswith(b"penstock: 1 shards done, 3 were there\n")
    (out / "manifest.json").unlink()  # as if the run had been killed before it was written
    (out / "ocr-01.tar.index").unlink()
    assert main(words) == 0
    assert _tree(out) == want
    assert main(["verify", str(out)]) == 0


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    pattern = _many(tmp_path, 6)
    words = [sys.executable, "-m", "penstock", "proc", "-c", WORK, pattern, "--jobs", "2", "-o"]
    subprocess.run([*words, str(tmp_path / "want" / "{}.tar")], check=True, stderr=subprocess.DEVNULL)
    out = tmp_path / "got"
    slow = {**os.environ, "PENSTOCK_TEST_SLEEP": "0.1"}
    for sent in (signal.SIGKILL, signal.SIGINT):
        run = subprocess.Popen([*words, str(out / "{}.tar")], env=slow, stderr=subprocess.PIPE)
        before, deadline = len(list(out.glob("*.tar"))), time.monotonic() + 20
        while len(list(out.glob("*.tar"))) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        run.send_signal(sent)
        _, said = run.communicate(timeout=20)
        assert run.returncode == (-9 if sent == signal.SIGKILL else 130), said
        if sent == signal.SIGINT:
            assert said == b"penstock: interrupted\n"
    assert 2 <= len(list(out.glob("*.tar"))) < 6
    subprocess.run([*words, str(out / "{}.tar")], check=True, stderr=subprocess.DEVNULL)
    hidden = [path for path in out.iterdir() if path.name.startswith(".")]  # of the run that was killed
    assert {name: data for name, data in _tree(out).items() if name[0] != "."} == _tree(tmp_path / "want")
    assert len(hidden) <= 2


def test_a_shard_that_fails_does_not_stop_the_others(tmp_path: Path, capfdbinary: Out) -> None:
    pattern, out = _many(tmp_path), tmp_path / "out"
    script = '[ "$PENSTOCK_KEY" != 1-3 ] || exit 9'
    assert main(["proc", "-c", script, pattern, "-o", str(out / "{}.tar"), "--jobs", "2"]) == 1
    said = capfdbinary.readouterr().err.decode()
    assert "in-01.tar failed: the command failed with exit code 9" in said
    assert said.endswith("penstock: 3 shards done, 1 failed\n")
    assert sorted(path.name for path in out.glob("*.tar")) == ["00.tar", "02.tar", "03.tar"]


def test_globs_keep_names_and_clashes_are_refused(tmp_path: Path, capfdbinary: Out) -> None:
    _many(tmp_path, 2)
    assert main(["proc", "-c", "true", f"{tmp_path}/in-*.tar", "-o", f"{tmp_path}/o/{{}}.tar"]) == 0
    assert sorted(path.name for path in (tmp_path / "o").glob("*.tar")) == ["in-00.tar", "in-01.tar"]
    assert main(["proc", "-c", "true", f"{tmp_path}/in-*.tar", "-o", f"{tmp_path}/{{}}.tar"]) == 1
    assert b"would become itself" in capfdbinary.readouterr().err
    inputs = [f"{tmp_path}/in-0{{0..1}}.tar", f"{tmp_path}/o/in-0{{0..1}}.tar"]
    assert main(["proc", "-c", "true", *inputs, "-o", f"{tmp_path}/p/{{}}.tar"]) == 1
    assert b"would both become" in capfdbinary.readouterr().err


def test_one_that_was_terminated_leaves_no_half_file(shard: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    words = [
        sys.executable,
        "-m",
        "penstock",
        "proc",
        "-c",
        "echo here; sleep 60",
        shard,
        "-w",
        str(tmp_path / "w"),
        "-o",
    ]
    run = subprocess.Popen([*words, str(out / "x.tar")], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("w/*/_*/sample.txt")) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.terminate()
    try:
        _, said = run.communicate(timeout=20)
    finally:
        run.kill()
    assert (run.returncode, said) == (143, b"penstock: terminated\n")
    assert list(out.iterdir()) == list((tmp_path / "w").iterdir()) == []


HEARD = """
import _thread, signal, sys, threading
from penstock.cli import main
threading.Timer(0.5, _thread.interrupt_main, [signal.SIGTERM]).start()  # its flag alone: a signal would end the wait
sys.exit(main(sys.argv[1:]))
"""


def test_a_request_to_end_is_heard_though_it_came_just_before_a_wait(shard: str, tmp_path: Path) -> None:
    words = ["proc", "-c", "sleep 20", shard, "-o", str(tmp_path / "out.tar")]
    done = subprocess.run([sys.executable, "-c", HEARD, *words], capture_output=True, timeout=15, check=False)
    assert (done.returncode, done.stderr) == (143, b"penstock: terminated\n")
    assert not (tmp_path / "out.tar").exists()


def test_shards_of_a_bucket_become_shards_of_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Out
) -> None:
    bucket = tmp_path / "root" / "b"
    bucket.mkdir(parents=True)
    _many(bucket, 3)
    words = ["proc", "-p", "4", "-c", "tr x y < sample.txt > sample.out", "--jobs", "2"]
    with s3_server(tmp_path / "root") as port:
        known = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": ACCESS_KEY, "REGION": "us-east-1"}
        for name, value in {**known, "SECRET_ACCESS_KEY": SECRET_KEY}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        remote = [*words, "s3://b/in-{00..02}.tar", "-o", "s3://b/far/ocr-{}.tar"]
        assert main(remote) == 0
        open_storage("s3://b").delete("s3://b/far/ocr-01.tar")
        assert main(remote) == 0
        assert capfdbinary.readouterr().err.endswith(b"penstock: 1 shards done, 2 were there\n")
        assert main(["cat", "s3://b/far/ocr-*.tar", "-c", "7", "-o", "s3://b/some.tar"]) == 0
        assert main(["cat", "s3://b/none.tar"]) == 1
        assert b"no such object (url: s3://b/none.tar)" in capfdbinary.readouterr().err
    assert main([*words, f"{bucket}/in-{{00..02}}.tar", "-o", str(tmp_path / "near" / "ocr-{}.tar")]) == 0
    assert _tree(bucket / "far") == _tree(tmp_path / "near")
    assert list(samples((bucket / "some.tar").read_bytes()))[-1] == "1-1"


def test_what_a_killed_run_left_is_removed_by_the_next(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / "w" / f"penstock-proc-{dead.pid}-abc" / "_00000000"
    left.mkdir(parents=True)
    proc(capfdbinary, "-c", "true", "-w", str(tmp_path / "w"), shard)
    assert list((tmp_path / "w").iterdir()) == []


def test_the_manifest_names_what_it_should(tmp_path: Path) -> None:
    assert main(["proc", "-c", "true", _many(tmp_path, 2), "-o", str(tmp_path / "o" / "{}.tar")]) == 0
    shards = json.loads((tmp_path / "o" / "manifest.json").read_text())["shards"]
    assert [(shard["name"], shard["samples"]) for shard in shards] == [("00.tar", 5), ("01.tar", 5)]


if FULL:  # it starts a Ray

    @pytest.mark.usefixtures("one_ray")
    def test_shards_on_ray_are_the_same(tmp_path: Path, capfdbinary: Out) -> None:
        pattern = _many(tmp_path)
        for name, more in {"here": [], "ray": ["--engine", "ray"]}.items():
            words = ["proc", "-q", "-c", 'test "$PENSTOCK_KEY" != 2-1', pattern, "-o", str(tmp_path / name / "{}.tar")]
            assert main([*words, "--jobs", "2", *more]) == 1
            said = capfdbinary.readouterr().err.decode()
            assert "in-02.tar failed: the command failed with exit code 1" in said
            assert said.endswith("penstock: 3 shards done, 1 failed\n")
        assert _tree(tmp_path / "ray") == _tree(tmp_path / "here")
