"""The folder that a command runs in, and the meaning of the files that it leaves there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import EngineError, StorageError
from penstock.tarstream.gather import gather_samples
from penstock.tarstream.shell_command import CommandRunner, ShellCommand, run_on_each

Proc = Callable[..., tuple[dict[str, dict[str, bytes]], str]]


@pytest.mark.parametrize("parallel", ["1", "4"])
def test_a_command_sees_files_and_key_and_its_files_are_the_sample(parallel: str, small_shard: str, proc: Proc) -> None:
    script = 'ls; echo "$PENSTOCK_KEY $PENSTOCK_NUMBER" > sample.key; rm sample.txt; mv sample.cls sample.NUM; >b.txt'
    samples, printed = proc("-p", parallel, "-c", script, small_shard)
    assert list(samples) == [f"d/k{number}" for number in range(8)]
    assert samples["d/k3"] == {"key": b"d/k3 3\n", "num": b"3"}
    assert printed == "sample.cls\nsample.txt\n" * 8


def test_each_sample_has_its_own_folder_which_is_removed(small_shard: str, tmp_path: Path, proc: Proc) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = "pwd > sample.pwd; mkdir deep; chmod 000 deep; (sleep 100 &) "
    samples, _ = proc("-p", "3", "-w", str(work), "-c", script, small_shard)
    folders = {fields["pwd"] for fields in samples.values()}
    assert len(folders) == 8
    assert all(folder.startswith(str(work).encode()) for folder in folders)
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("sleep 50", "took longer than 0.3 s"),
        ("kill -11 $$", "killed by signal 11"),
        ("rm sample.txt; ln -s /etc/passwd sample.txt", "'sample.txt' is a link, not a file"),
        ("rm sample.txt; mkfifo sample.txt", "'sample.txt' is not a regular file"),
        ("mkdir sample.d", "'sample.d' is not a regular file"),
        ("truncate -s 1T sample.txt", "'sample.txt' has more than"),
        ("rm -rf ../*", "its files cannot be read back"),
        ("cp sample.txt sample.TXT", "two files are the field 'txt'"),
        ("echo a.b > sample.__key__", "the key has a dot"),
        ("echo /etc/x > sample.__key__", "absolute path"),
        ("echo ../x > sample.__key__", "leads out of its folder"),
    ],
)
def test_the_mistake_of_a_command_is_named(script: str, message: str, small_shard: str, proc: Proc) -> None:
    timeout_s = "0.3" if script == "sleep 50" else "60"
    _, error = proc("--timeout", timeout_s, "--count", "1", "-c", script, small_shard, code=1)
    assert message in error
    assert "key: d/k0" in error


@pytest.mark.parametrize(("script", "problem"), [("echo hello", None), ("sleep 100", "0.3 s")])
def test_a_command_runs_without_calls_that_only_linux_has(
    script: str, problem: str | None, small_shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memfd_create", "pidfd_open"):
        monkeypatch.delattr(os, name)
    command = ShellCommand(("/bin/sh", "-c", script), timeout_s=0.3 if problem else 60)
    with CommandRunner(command, str(tmp_path / "w")) as runner:
        result = next(run_on_each(gather_samples([small_shard]), runner, 1))
    assert result.printed == (b"" if problem else b"hello\n")
    assert (result.problem is None) if problem is None else problem in (result.problem or "")


def test_a_key_file_sets_a_new_key_and_a_sample_without_files_is_dropped(small_shard: str, proc: Proc) -> None:
    script = 'if [ "$PENSTOCK_NUMBER" = 1 ]; then rm *; else echo "x-$PENSTOCK_NUMBER" > sample.__key__; fi'
    samples, error = proc("-c", script, "--add-log", "log", "--count", "1", small_shard)
    assert samples == {"x-0": {"cls": b"0", "txt": b"text", "log": b""}}
    samples, error = proc("-c", script, small_shard)
    assert list(samples) == [f"x-{number}" for number in (0, 2, 3, 4, 5, 6, 7)]
    assert error == "penstock: 8 samples, 1 dropped because no file was left\n"


def test_folders_of_a_killed_run_are_removed_by_the_next(small_shard: str, tmp_path: Path, proc: Proc) -> None:
    left = tmp_path / "w" / "penstock-proc-abc" / "_00000000"
    left.mkdir(parents=True)
    proc("-c", "true", "-w", str(tmp_path / "w"), small_shard)
    assert list((tmp_path / "w").iterdir()) == []


def test_the_folder_of_a_live_run_stays_whatever_its_process_is_numbered(
    small_shard: str, tmp_path: Path, proc: Proc
) -> None:
    command = ShellCommand(("/bin/sh", "-c", "true"))
    with CommandRunner(command, str(tmp_path / "w")) as runner:
        (folder,) = (tmp_path / "w").iterdir()
        foreign = folder.rename(folder.with_name(f"penstock-proc-{2**22 + 1}-abc"))  # no process here has this number
        proc("-c", "true", "-w", str(tmp_path / "w"), small_shard)
        assert list((tmp_path / "w").iterdir()) == [foreign]
        foreign.rename(folder)
        runner.stop()
    assert list((tmp_path / "w").iterdir()) == []


def test_a_stopped_runner_starts_no_command(small_shard: str, tmp_path: Path) -> None:
    with CommandRunner(ShellCommand(("/bin/sh", "-c", "true")), str(tmp_path / "w")) as runner:
        runner.stop()
        with pytest.raises(EngineError, match="the command was stopped"):
            list(run_on_each(gather_samples([small_shard]), runner, 2))
    assert list((tmp_path / "w").iterdir()) == []


def test_only_the_end_of_a_long_log_is_kept(small_shard: str, tmp_path: Path) -> None:
    command = ShellCommand(("/bin/sh", "-c", "head -c 100000 /dev/zero; echo end"), log_field="log")
    with CommandRunner(command, str(tmp_path / "w")) as runner:
        result = next(run_on_each(gather_samples([small_shard]), runner, 1))
    assert len(result.printed) == 64 << 10
    assert result.printed.endswith(b"end\n")


def test_a_work_folder_that_cannot_be_created_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot create the work folder"):
        CommandRunner(ShellCommand(("true",)), str(tmp_path / "file" / "w"))


def test_the_files_of_a_sample_may_have_another_base_name(small_shard: str, proc: Proc) -> None:
    samples, _ = proc(
        "-b", "x", "-c", "test -e x.cls && cp x.cls x.new && touch sample.no", "--count", "1", small_shard
    )
    assert [set(fields) for fields in samples.values()] == [{"cls", "txt", "new"}]
