from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import main


def test_the_field_is_written_and_its_name_printed(
    shard: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["first", "-S", "cls == 3", "-f", "png;txt", shard]) == 0
    captured = capfdbinary.readouterr()
    assert (captured.out, captured.err) == (b"t6", b"k06.txt\n")
    assert main(["first", "-f", "txt", "-o", str(tmp_path / "t"), shard]) == 0
    assert (tmp_path / "t").read_bytes() == b"t0"
    capfdbinary.readouterr()


def test_no_matching_sample_is_exit_1(shard: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["first", "-S", "cls == 33", "-f", "txt", shard]) == 1
    error = b"penstock: no sample that meets the condition has the field txt\n"
    assert capfdbinary.readouterr().err == error
    assert main(["first", "-f", "png gif", shard]) == 1
    error = b"penstock: the samples have no field 'png' or 'gif'; the fields are cls, jpg, txt: did you mean jpg?\n"
    assert capfdbinary.readouterr().err == error
    assert main(["first", "-S", "clss == 3", "-f", "txt", shard]) == 1
    assert b"no field 'clss'; the fields are cls, jpg, txt: did you mean cls?" in capfdbinary.readouterr().err
