"""``penstock proc`` with ``{}`` in the output: one output shard for each input shard, resumed after interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.errors import PlanError
from penstock.storage import open_storage
from penstock.tarstream.shard_jobs import ShardJob, plan_jobs
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server

Capture = pytest.CaptureFixture[bytes]
WriteShards = Callable[..., str]

FULL = os.environ.get("PENSTOCK_FULL") == "1"
COMMAND = "echo done > sample.out; sleep ${PENSTOCK_TEST_SLEEP:-0}"


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.exists() and not path.name.endswith(".index")
    }


def test_outputs_are_named_by_the_braces_of_the_input() -> None:
    assert plan_jobs(["in-{08..09}.tar", "x-{a,b}.tgz"], "out/{}.tar") == [
        ShardJob("in-08.tar", "out/08.tar"),
        ShardJob("in-09.tar", "out/09.tar"),
        ShardJob("x-a.tgz", "out/a.tar"),
        ShardJob("x-b.tgz", "out/b.tar"),
    ]
    with pytest.raises(PlanError, match=r"a-1\.tar and b-1\.tar would both become c-1\.tar"):
        plan_jobs(["a-{1,2}.tar", "b-{1,2}.tar"], "c-{}.tar")


def test_existing_output_shards_are_not_written_again(
    write_shards: WriteShards, tmp_path: Path, capfdbinary: Capture
) -> None:
    pattern, out = write_shards(), tmp_path / "out"
    words = ["proc", "-c", COMMAND, pattern, "-o", str(out / "ocr-{}.tar"), "--jobs", "3"]
    assert main(words) == 0
    assert capfdbinary.readouterr().err == b"penstock: 4 shards done\n"
    expected = _files(out)
    assert sorted(expected) == ["manifest.json", *(f"ocr-{number:02d}.tar" for number in range(4))]
    assert main(["verify", str(out)]) == 0
    (out / "ocr-02.tar").unlink()
    assert main(words) == 0
    assert capfdbinary.readouterr().err.endswith(b"penstock: 1 shard done, 3 already existed\n")
    (out / "manifest.json").unlink()  # as if the run had been killed before it was written
    (out / "ocr-01.tar.index").unlink()
    assert main(words) == 0
    assert _files(out) == expected
    assert main(["verify", str(out)]) == 0


def test_a_killed_run_resumes_and_writes_the_same_bytes(
    write_shards: WriteShards, tmp_path: Path, warm_python: str
) -> None:
    words = [warm_python, "-m", "penstock", "proc", "-c", COMMAND, write_shards(count=6), "--jobs", "2", "-o"]
    subprocess.run([*words, str(tmp_path / "expected" / "{}.tar")], check=True, stderr=subprocess.DEVNULL)
    out = tmp_path / "out"
    slow = {**os.environ, "PENSTOCK_TEST_SLEEP": "0.1"}
    for sent in (signal.SIGKILL, signal.SIGINT):
        run = subprocess.Popen([*words, str(out / "{}.tar")], env=slow, stderr=subprocess.PIPE)
        before, deadline = len(list(out.glob("*.tar"))), time.monotonic() + 120
        while len(list(out.glob("*.tar"))) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        run.send_signal(signal.SIGRTMIN if sent == signal.SIGKILL else sent)
        _, error = run.communicate(timeout=120)
        assert run.returncode == (-9 if sent == signal.SIGKILL else 130), error
        if sent == signal.SIGINT:
            assert error == b"penstock: interrupted\n"
    assert 2 <= len(list(out.glob("*.tar"))) < 6
    subprocess.run([*words, str(out / "{}.tar")], check=True, stderr=subprocess.DEVNULL)
    hidden = [path for path in out.iterdir() if path.name.startswith(".")]  # left by the killed run
    assert {name: data for name, data in _files(out).items() if name[0] != "."} == _files(tmp_path / "expected")
    assert len(hidden) <= 2


def test_a_failing_shard_does_not_stop_the_others(
    write_shards: WriteShards, tmp_path: Path, capfdbinary: Capture
) -> None:
    out = tmp_path / "out"
    script = '[ "$PENSTOCK_KEY" != 1-3 ] || exit 9'
    assert main(["proc", "-c", script, write_shards(), "-o", str(out / "{}.tar"), "--jobs", "2"]) == 1
    error = capfdbinary.readouterr().err.decode()
    assert "in-01.tar failed: the command failed with exit code 9" in error
    assert error.endswith("penstock: 3 shards done, 1 failed\n")
    assert sorted(path.name for path in out.glob("*.tar")) == ["00.tar", "02.tar", "03.tar"]


def test_a_shard_that_cannot_be_written_does_not_stop_the_others(
    write_shards: WriteShards, tmp_path: Path, capfdbinary: Capture
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "01.tar").symlink_to(tmp_path / "missing" / "01.tar")
    assert main(["proc", "-c", COMMAND, write_shards(), "-o", str(out / "{}.tar")]) == 1
    err = capfdbinary.readouterr().err.decode().splitlines()
    assert err[0].endswith(f"failed: cannot write: No such file or directory (url: {out}/01.tar)")
    assert err[1:] == ["penstock: 3 shards done, 1 failed"]
    assert sorted(_files(out)) == ["00.tar", "02.tar", "03.tar", "manifest.json"]


def test_globs_keep_names_and_clashes_are_refused(
    write_shards: WriteShards, tmp_path: Path, capfdbinary: Capture
) -> None:
    write_shards(count=2)
    assert main(["proc", "-c", "true", f"{tmp_path}/in-*.tar", "-o", f"{tmp_path}/o/{{}}.tar"]) == 0
    assert sorted(path.name for path in (tmp_path / "o").glob("*.tar")) == ["in-00.tar", "in-01.tar"]
    assert main(["proc", "-c", "true", f"{tmp_path}/in-*.tar", "-o", f"{tmp_path}/{{}}.tar"]) == 1
    assert b"in-00.tar is read, and would be replaced by an output" in capfdbinary.readouterr().err
    inputs = [f"{tmp_path}/in-0{{0..1}}.tar", f"{tmp_path}/o/in-0{{0..1}}.tar"]
    assert main(["proc", "-c", "true", *inputs, "-o", f"{tmp_path}/p/{{}}.tar"]) == 1
    assert b"would both become" in capfdbinary.readouterr().err


def test_shards_of_a_bucket_become_shards_of_a_bucket(
    write_shards: WriteShards,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    samples_of: Callable[[bytes], dict[str, dict[str, bytes]]],
    capfdbinary: Capture,
) -> None:
    bucket = tmp_path / "root" / "b"
    bucket.mkdir(parents=True)
    write_shards(bucket, 3)
    words = ["proc", "-p", "4", "-c", "tr x y < sample.txt > sample.out", "--jobs", "2"]
    with s3_server(tmp_path / "root") as port:
        variables = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": ACCESS_KEY, "REGION": "us-east-1"}
        for name, value in {**variables, "SECRET_ACCESS_KEY": SECRET_KEY}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        remote = [*words, "s3://b/in-{00..02}.tar", "-o", "s3://b/remote/ocr-{}.tar"]
        assert main(remote) == 0
        open_storage("s3://b").delete("s3://b/remote/ocr-01.tar")
        assert main(remote) == 0
        assert capfdbinary.readouterr().err.endswith(b"penstock: 1 shard done, 2 already existed\n")
        assert main(["cat", "s3://b/remote/ocr-*.tar", "-c", "7", "-o", "s3://b/some.tar"]) == 0
        assert main(["cat", "s3://b/none.tar"]) == 1
        assert b"no such object (url: s3://b/none.tar)" in capfdbinary.readouterr().err
    assert main([*words, f"{bucket}/in-{{00..02}}.tar", "-o", str(tmp_path / "local" / "ocr-{}.tar")]) == 0
    assert _files(bucket / "remote") == _files(tmp_path / "local")
    assert list(samples_of((bucket / "some.tar").read_bytes()))[-1] == "1-1"


def test_the_manifest_lists_the_output_shards(write_shards: WriteShards, tmp_path: Path) -> None:
    assert main(["proc", "-c", "true", write_shards(count=2), "-o", str(tmp_path / "o" / "{}.tar")]) == 0
    shards = json.loads((tmp_path / "o" / "manifest.json").read_text())["shards"]
    assert [(shard["name"], shard["samples"]) for shard in shards] == [("00.tar", 5), ("01.tar", 5)]


if FULL:  # it starts Ray

    @pytest.mark.usefixtures("shared_ray")
    def test_shards_on_ray_are_the_same(write_shards: WriteShards, tmp_path: Path, capfdbinary: Capture) -> None:
        pattern = write_shards()
        for name, options in {"local": [], "ray": ["--engine", "ray"]}.items():
            words = ["proc", "-q", "-c", 'test "$PENSTOCK_KEY" != 2-1', pattern, "-o", str(tmp_path / name / "{}.tar")]
            assert main([*words, "--jobs", "2", *options]) == 1
            error = capfdbinary.readouterr().err.decode()
            assert "in-02.tar failed: the command failed with exit code 1" in error
            assert error.endswith("penstock: 3 shards done, 1 failed\n")
        assert _files(tmp_path / "ray") == _files(tmp_path / "local")

    @pytest.mark.usefixtures("shared_ray")
    def test_more_cores_than_any_node_has_are_refused_at_once(
        write_shards: WriteShards, tmp_path: Path, capfdbinary: Capture
    ) -> None:
        words = ["proc", "-p", "4000", "-c", "true", write_shards(), "-o", str(tmp_path / "{}.tar"), "--engine", "ray"]
        assert main(words) == 1
        assert b"proc -p 4000 asks for cpus=4000 for each worker; the cluster has" in capfdbinary.readouterr().err
