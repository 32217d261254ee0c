"""Shards for the tests of the tools, and helpers that run a tool and read what it writes."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main

LONG_KEY = "a" * 120 + "/" + "b" * 180
HOSTILE_KEYS = ["plain", "with space", "new\nline", "qu'o\"te\ttab", "ünïcode/键", LONG_KEY]

Samples = dict[str, dict[str, bytes]]


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Twenty samples k00 to k19: ``cls`` counts down from 9 to 0, twice; ``txt`` is text and ``jpg`` is not."""
    with ps.TarWriter(tmp_path / "in.tar") as writer:
        for number in range(20):
            label = b"%d" % (9 - number % 10)
            writer.write({"__key__": f"k{number:02d}", "cls": label, "txt": b"t%d" % number, "jpg": b"\xff" * number})
    return str(tmp_path / "in.tar")


@pytest.fixture
def small_shard(tmp_path: Path) -> str:
    """Eight samples d/k0 to d/k7, each with ``cls`` and ``txt``."""
    with ps.TarWriter(tmp_path / "in.tar") as writer:
        for number in range(8):
            writer.write({"__key__": f"d/k{number}", "cls": b"%d" % number, "txt": b"text"})
    return str(tmp_path / "in.tar")


@pytest.fixture
def hostile_keys() -> list[str]:
    """Keys that are hard to print, to quote and to store in a tar header."""
    return HOSTILE_KEYS


@pytest.fixture
def hostile_shard(tmp_path: Path) -> str:
    """A sample for each of the hostile keys, with a text that is as hostile."""
    with ps.TarWriter(tmp_path / "hostile.tar") as writer:
        for number, key in enumerate(HOSTILE_KEYS):
            writer.write({"__key__": key, "txt": f'a\tb\n"c", \\d {number}'.encode()})
    return str(tmp_path / "hostile.tar")


@pytest.fixture
def write_shards(tmp_path: Path) -> Callable[..., str]:
    """Write shards in-00.tar, in-01.tar, ... of five samples each; return the pattern that names them."""

    def write(folder: Path = tmp_path, count: int = 4) -> str:
        for shard in range(count):
            with ps.TarWriter(folder / f"in-{shard:02d}.tar") as writer:
                for number in range(5):
                    writer.write({"__key__": f"{shard}-{number}", "txt": b"x" * 1000})
        return f"{folder}/in-{{00..{count - 1:02d}}}.tar"

    return write


@pytest.fixture
def keys_of() -> Callable[[bytes], list[str]]:
    """Return the keys of an archive, in order."""

    def keys(archive: bytes) -> list[str]:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            return list(dict.fromkeys(member.name.rpartition(".")[0] for member in tar))

    return keys


@pytest.fixture
def samples_of() -> Callable[[bytes], Samples]:
    """Return the fields of each sample of an archive, by key."""

    def samples(archive: bytes) -> Samples:
        found: Samples = {}
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None
                found.setdefault(key, {})[field] = file.read()
        return found

    return samples


@pytest.fixture
def pipe(warm_python: str) -> Callable[..., bytes]:
    """Pipe data into ``penstock WORDS`` in a separate process; return its standard output."""

    def run(data: bytes, *words: str) -> bytes:
        command = [warm_python, "-m", "penstock", *words]
        done = subprocess.run(command, input=data, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def proc(
    capfdbinary: pytest.CaptureFixture[bytes], samples_of: Callable[[bytes], Samples]
) -> Callable[..., tuple[Samples, str]]:
    """Run ``penstock proc WORDS``; return the samples on standard output, if it succeeds, and standard error."""

    def run(*words: str, code: int = 0) -> tuple[Samples, str]:
        assert main(["proc", *words]) == code
        captured = capfdbinary.readouterr()
        return (samples_of(captured.out) if not code else {}), captured.err.decode()

    return run
