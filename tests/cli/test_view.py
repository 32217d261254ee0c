"""``penstock view`` on the command line: prints an address with a token, and ends on a signal."""

from __future__ import annotations

import builtins
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main


def test_the_address_opens_the_page(tiny_shards: list[Path], warm_python: str) -> None:
    call = [warm_python, "-m", "penstock", "view", str(tiny_shards[0]), "--no-browser"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with opener.open(address, timeout=60) as response:
                assert response.status == 200
            with opener.open(address.partition("?")[0], timeout=60) as response:
                assert "25 samples in 1 shard" in response.read().decode()
        finally:
            process.send_signal(signal.SIGINT)
            _, complaint = process.communicate()
    assert process.returncode in (0, 130)
    assert "Traceback" not in complaint


def test_a_dataset_without_samples_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("import penstock as ps\nds = ps.from_items([])\n")
    monkeypatch.setattr("penstock.view.serve_view", lambda view, port, opened: opened(f"{view.browser.total} samples"))
    assert main(["view", f"{tmp_path / 'program.py'}:ds", "--no-browser"]) == 0
    assert capsys.readouterr().out == "0 samples\n"


def test_nothing_to_view_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["view"])
    assert "name what to view" in capsys.readouterr().err


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "nothing.tar"), "--no-browser"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_ledger_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "--ledger", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("penstock: the ledger cannot be read: No such file or directory (url:")


def test_without_the_extra_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "starlette":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["view", "--run", "runs"]) == 1
    assert "pip install 'penstock[view]'" in capsys.readouterr().err
