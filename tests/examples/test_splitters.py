"""The examples of jobs run, on this machine and on several nodes of a cluster, with the results of their docstrings."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import penstock as ps

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODES = [0, 3] if os.environ.get("PENSTOCK_FULL") == "1" else [0]  # 0: no cluster


@contextmanager
def _cluster(nodes: int) -> Iterator[list[str]]:
    """Start a cluster of this number of nodes; yields the options that name it, or none without nodes."""
    if not nodes:
        yield []
        return
    from ray.cluster_utils import Cluster

    cluster: Any
    resources = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**resources, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**resources)
        yield ["--engine", "ray", "--address", cluster.address]
    finally:
        cluster.shutdown()


def _run(python: str, program: str, folder: Path, nodes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    warnings = () if nodes else ("-W", "error")
    with _cluster(nodes) as options:
        call = [python, *warnings, str(EXAMPLES / program), "--folder", "x", *options, *arguments]
        done = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("nodes", NODES)
def test_every_part_of_every_word_is_in_the_table_in_order(nodes: int, tmp_path: Path, warm_python: str) -> None:
    done = _run(warm_python, "word_splitter.py", tmp_path, nodes)
    assert done.stdout.splitlines()[0] == "one word: ['sim', 'imp', 'mpl', 'ple']"
    assert done.stdout.splitlines()[-1] == "27 parts of 4 words; 0 words processed again"
    rows = ps.read_parquet(str(tmp_path / "x" / "metadata.parquet")).take_all()
    expected = {
        "a": "sim imp mpl ple",
        "b": "sca cal ale lea eab abl ble",
        "c": "pre rep epr pro roc oce ces ess ssi sin ing",
        "d": "pyt yto tor orc rch",
    }
    assert [row["part"] for row in rows] == " ".join(expected.values()).split()
    assert [row["input"] for row in rows] == [
        f"x/inputs/{name}.txt" for name, parts in expected.items() for _ in parts.split()
    ]
    for name, parts in expected.items():
        assert (tmp_path / "x" / "outputs" / f"{name}.parts").read_text().split() == parts.split()


@pytest.mark.parametrize("nodes", NODES)
def test_windows_with_annotations_are_kept_with_their_labels(nodes: int, tmp_path: Path, warm_python: str) -> None:
    done = _run(warm_python, "audio_splitter.py", tmp_path, nodes, "--count", "4", "--workers", "2")
    assert "003.wav has no annotations; skipped" in done.stderr or nodes  # on a cluster it is in Ray's log
    assert done.stdout.splitlines()[-1].endswith("windows of 4 recordings, 4 recordings split now")
    rows = ps.read_csv(str(tmp_path / "x" / "windows.csv")).take_all()
    assert [(row["begin"], row["end"], row["labels"]) for row in rows if row["source"].endswith("000.wav")] == [
        (0.0, 1.0, "owl|woodpecker"),
        (0.75, 1.75, "owl"),
        (2.25, 3.25, "towhee"),  # ends with the recording
    ]
    assert {row["source"] for row in rows} == {f"x/wavs/{n:03d}.wav" for n in range(3)}
    assert {row["annotation"] for row in rows} == {f"x/tables/{n:03d}.csv" for n in range(3)}
    written = sorted(name for name in os.listdir(tmp_path / "x" / "windows") if name.endswith(".wav"))
    assert written == sorted(row["dest"] for row in rows)
    for row in rows:
        identity = f"{row['source']}-{row['begin']}-{row['end']}"
        assert row["dest"] == hashlib.md5(identity.encode()).hexdigest() + ".wav"
        first = round(row["begin"] * 8000)
        assert _frames(tmp_path / "x" / "windows" / row["dest"]) == _frames(tmp_path / row["source"], first, 8000)


def test_without_annotations_every_window_is_kept(tmp_path: Path) -> None:
    spec = spec_from_file_location("audio_splitter_example", EXAMPLES / "audio_splitter.py")
    assert spec is not None
    assert spec.loader is not None
    program = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(program)
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setparams((2, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(range(250)) * 416)  # 3.25 s
    rows = ps.process(tmp_path / "x.wav", program.AudioSplitter(2, 0.5), tmp_path / "out", on="threads").take_all()
    assert [(row["begin"], row["end"], row["labels"]) for row in rows] == [(0.0, 2.0, ""), (1.25, 3.25, "")]
    assert _frames(tmp_path / "out" / rows[1]["dest"]) == _frames(tmp_path / "x.wav", 10_000, 16_000)


def _frames(path: Path, first: int = 0, count: int | None = None) -> bytes:
    with wave.open(str(path)) as file:
        file.setpos(first)
        return bytes(file.readframes(file.getnframes() if count is None else count))
