from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import main

Capture = pytest.CaptureFixture[bytes]
KeysOf = Callable[[bytes], list[str]]


def numbered(*numbers: int) -> list[str]:
    return [f"k{number:02d}" for number in numbers]


@pytest.fixture
def other(shard: str, tmp_path: Path) -> str:
    """The samples of ``shard`` under keys that begin with ``b-``."""
    path = str(tmp_path / "b.tar")
    assert main(["cat", shard, "--rename", "b-{key}", "-o", path]) == 0
    return path


def test_samples_are_chosen_by_weight(shard: str, other: str, keys_of: KeysOf, capfdbinary: Capture) -> None:
    assert main(["mix", "-w", "3,1", shard, other, "--stop", "all", "--seed", "1"]) == 0
    keys = keys_of(capfdbinary.readouterr().out)
    assert sorted(keys) == sorted([*numbered(*range(20)), *(f"b-{key}" for key in numbered(*range(20)))])
    assert sum(not key.startswith("b-") for key in keys[:20]) > 12


def test_a_file_may_describe_the_mixture_which_stops_with_the_first_source(
    shard: str, other: str, tmp_path: Path, keys_of: KeysOf, capfdbinary: Capture
) -> None:
    (tmp_path / "mix.json").write_text(json.dumps({"sources": [{"shards": shard, "weight": 1}, {"shards": [other]}]}))
    (tmp_path / "mix.yaml").write_text(f"sources:\n- shards: {shard}\n  weight: 1\n- shards: {other}\n")
    for name in ("mix.json", "mix.yaml"):
        assert main(["mix", str(tmp_path / name)]) == 0
        keys = keys_of(capfdbinary.readouterr().out)
        assert [key for key in keys if key[0] == "k"] == numbered(*range(sum(key[0] == "k" for key in keys)))
        assert 20 <= len(keys) < 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the mixture cannot be parsed"),
        ('{"sources": []}', "the mixture lists no source"),
        ('{"sources": [{"weight": 1}]}', "the mixture is not of the form {"),
    ],
)
def test_a_wrong_mixture_is_named(text: str, message: str, tmp_path: Path, capfdbinary: Capture) -> None:
    (tmp_path / "mix.json").write_text(text)
    assert main(["mix", str(tmp_path / "mix.json")]) == 1
    error = capfdbinary.readouterr().err.decode()
    assert message in error
    assert "mix.json" in error
