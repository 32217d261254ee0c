"""Command lines and programs from the documentation of tarproc and WebDataset, unchanged."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from PIL import Image

import penstock as ps
from penstock.cli import old_name, parser_of
from penstock.cli.tools import OLD_NAMES

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

# The second line is a command to sh and a string to Python: a "#!" line cannot name a path with a space.
GM = """#!/bin/sh
"exec" "{python}" "$0" "$@"
import glob, sys
from PIL import Image
assert sys.argv[1:3] == ["mogrify", "-size"], sys.argv
for name in [word for word in sys.argv if word.endswith(".jpg")]:
    image = Image.open(name)
    image.thumbnail((16, 16))
    image.save(name)
"""
OLD_NAME = """#!/bin/sh
"exec" "{python}" "$0" "$@"
import sys
from penstock.cli import old_name
sys.exit(old_name())
"""


@pytest.fixture
def shell(tmp_path: Path, photo_shards: Path, warm_python: str) -> Any:
    """A shell in a folder with shards; the old names are commands, gm and gsutil are small substitutes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = dict.fromkeys(OLD_NAMES, OLD_NAME) | {"gm": GM, "gsutil": '#!/bin/sh\ncat "${{2#gs://lpr-imagenet/}}"\n'}
    for name, text in scripts.items():
        (folder / name).write_text(text.format(python=warm_python))
        (folder / name).chmod(0o755)
    with open(tmp_path / "imagenet_train-0000.tgz", "wb") as file:
        subprocess.run(["gzip", "-c", photo_shards / "train-0000.tar"], stdout=file, check=True)
    (tmp_path / "mdata").symlink_to(photo_shards)
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    def run(line: str, code: int = 0) -> str:
        words = ["bash", "-o", "pipefail", "-c", line]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        run.error = done.stderr  # type: ignore[attr-defined]
        return done.stdout

    return run


def test_the_documented_command_lines_work(shell: Any, tmp_path: Path) -> None:
    # gsutil fails when its pipe is closed early, which a pipe without pipefail ignores.
    line = "gsutil cat gs://lpr-imagenet/imagenet_train-0000.tgz | tarscat -c 10 > small.tar"
    shell(f"set +o pipefail; {line}")
    assert shell("tar tvf small.tar | fgrep .jpg | wc -l").strip() == "10"

    rows = [line.split("\t") for line in shell("tar2tsv -f cls small.tar").splitlines()]
    assert rows[0] == ["__key__", "cls"]
    assert rows[1:] == [[f"{number:06}", str(number % 3)] for number in range(10)]

    shell("tar -cf - --sort=name -C mdata/ photos | tarsplit -s 1e9 -o imagenet_train --maxshards 2")
    assert len(ps.read_tar(str(tmp_path / "imagenet_train-000000.tar"))) == 24
    shell("set +o pipefail; tar -cf - --sort=name -C mdata/ photos | tarsplit -s 2e4 -o small_train --maxshards 2")
    assert sorted(path.name for path in tmp_path.glob("small_train-*.tar")) == [
        "small_train-000000.tar",
        "small_train-000001.tar",
    ]

    shown = shell("tarshow  -c 2 small.tar")
    assert shown.startswith("000000\n  jpg ")
    assert shown.count("\n\n") == 2

    shell("tarproc -p 5 -c 'ls; gm mogrify -size 256x256 *.jpg -resize 256x256' small.tar > out.tar")
    assert shell.error.count("sample.jpg\n") == 10
    before, after = (ps.read_tar(str(tmp_path / name)).decode("pil").take_all() for name in ("small.tar", "out.tar"))
    assert [row["__key__"] for row in after] == [row["__key__"] for row in before]
    assert {row["jpg"].size for row in before} == {(48, 32)}
    assert all(max(row["jpg"].size) == 16 for row in after)


def test_the_documented_job_over_many_shards_works(shell: Any, tmp_path: Path, warm_python: str) -> None:
    for number in range(2):
        shell(f"tarcat mdata/train-000{number}.tar -c 4 > scanned-000{number}.tar")
        shell(f"tarproc -p 16 -q -c 'wc -c *.png' scanned-000{number}.tar -o one-000{number}.tar")
    penstock = f"{shlex.quote(warm_python)} -m penstock"
    shell(f"{penstock} proc -p 16 -q -c 'wc -c *.png' 'scanned-{{0000..0001}}.tar' -o 'ocr-{{}}.tar' --jobs 16")
    for number in range(2):
        assert (tmp_path / f"one-000{number}.tar").read_bytes() == (tmp_path / f"ocr-000{number}.tar").read_bytes()


def test_the_other_old_names_work(shell: Any, tmp_path: Path) -> None:
    assert shell("tarpcat -p 2 -s 100 mdata/train-000{0..3}.tar | tar tf - | grep -c jpg").strip() == "100"
    shell("tarsort -s cls -S int mdata/train-0000.tar -o sorted.tar")
    labels = [row["cls"] for row in ps.read_tar(str(tmp_path / "sorted.tar"))]
    assert labels == sorted(labels)
    assert shell("tarfirst -S 'cls == 2' -f cls mdata/train-0000.tar") == "2"
    (tmp_path / "plan.tsv").write_text("__key__\t@jpg\tcls\na\tmdata/photos/cat/000.jpg\t3\n")
    shell("tarcreate plan.tsv > made.tar")
    assert shell("tar tf made.tar").split() == ["a.cls", "a.jpg"]
    (tmp_path / "mix.json").write_text('{"sources": [{"shards": "mdata/train-0000.tar"}, {"shards": "made.tar"}]}')
    assert "a.jpg" in shell("tarmix mix.json --stop all | tar tf -")
    assert shell("tarcat --help").startswith("usage: tarcat ")
    shell("tarcat none.tar", code=1)


def process_sample(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__key__": sample["__key__"], "png": sample["jpg"].resize((256, 256)), "cls": str(sample["cls"])}


def _check_rescaled(path: Path, keys: list[str]) -> None:
    rows = ps.read_tar(str(path)).decode("pil").take_all()
    assert sorted(row["__key__"] for row in rows) == keys
    assert all(isinstance(row["png"], Image.Image) and row["png"].size == (256, 256) for row in rows)


def test_map_reduce_works_in_one_process_in_a_pool_and_over_shards(tiny_shards: list[Path], tmp_path: Path) -> None:
    small = str(tmp_path / "small.tar")
    with ps.TarWriter(small) as writer:
        for sample in ps.read_tar(str(tiny_shards[0])).limit(6):
            writer.write(sample)
    keys = [f"{number:06}" for number in range(6)]

    sink = ps.TarWriter(tmp_path / "out1.tar")
    for sample in ps.read_tar(small).decode("pil"):
        sink.write(process_sample(sample))
    sink.close()
    _check_rescaled(tmp_path / "out1.tar", keys)

    processed = ps.read_tar(small).decode("pil").map(process_sample, workers=2, on="processes")
    processed.write_tar(str(tmp_path / "out2.tar"))  # beside its input, as the documentation does
    assert (tmp_path / "out2.tar").read_bytes() == (tmp_path / "out1.tar").read_bytes()

    def process_shard(shards: tuple[str, str]) -> None:
        ps.read_tar(shards[0]).limit(3).decode("pil").map(process_sample).write_tar(shards[1])

    shards = [(str(path), str(tmp_path / f"rescaled-{number:04d}.tar")) for number, path in enumerate(tiny_shards[:2])]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(process_shard, shards))
    for number in range(2):
        _check_rescaled(
            tmp_path / f"rescaled-{number:04d}.tar", [f"{number * 25 + position:06}" for position in range(3)]
        )


def test_an_archive_does_not_replace_its_own_input(tmp_path: Path) -> None:
    ps.from_items([{"__key__": "a", "txt": "x"}]).write_tar(str(tmp_path / "a.tar"))
    with pytest.raises(ps.errors.PlanError, match="where it is to be written"):
        ps.read_tar(str(tmp_path / "a.tar")).write_tar(str(tmp_path / "a.tar"))
    ps.read_tar(str(tmp_path / "a.tar")).write_tar(str(tmp_path / "b.tar"))
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert tar.getnames() == ["a.txt"]


def test_tarproc_skips_samples_that_fail_and_penstock_proc_stops() -> None:
    defaults = [parser_of("proc", prog).parse_args(["-c", "true"]).on_failure for prog in ("tarproc", "penstock proc")]
    assert defaults == ["skip", "abort"]


@pytest.fixture
def tarproc(
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    samples_of: Callable[[bytes], dict[str, dict[str, bytes]]],
) -> Callable[..., tuple[dict[str, dict[str, bytes]], str]]:
    """Run ``tarproc WORDS``; return the samples on standard output, and standard error."""

    def run(*words: str, code: int = 0) -> tuple[dict[str, dict[str, bytes]], str]:
        monkeypatch.setattr(sys, "argv", ["tarproc", *words])
        assert old_name() == code
        captured = capfdbinary.readouterr()
        return (samples_of(captured.out) if not code else {}), captured.err.decode()

    return run


Tarproc = Callable[..., tuple[dict[str, dict[str, bytes]], str]]
MORE_FILES = "ls; cp sample.txt sample-1.txt; cp sample.txt other.txt; mkdir sub.d; cat __key__ > sample.key"


def test_the_script_of_tarproc_is_a_file_or_a_command(small_shard: str, tmp_path: Path, tarproc: Tarproc) -> None:
    (tmp_path / "script").write_text(MORE_FILES)
    samples, printed = tarproc("-S", str(tmp_path / "script"), "--count", "1", small_shard)
    assert printed == "__key__\n__source__\nsample.cls\nsample.txt\n"
    text = {"txt": b"text"}
    assert samples == {"d/k0other": text, "d/k0": {"cls": b"0", "key": b"d/k0", **text}, "d/k0-1": text}
    assert list(samples) == ["d/k0other", "d/k0", "d/k0-1"]
    assert tarproc("-S", "rm sample.cls", "-p", "0", "--count", "1", small_shard)[0] == {"d/k0": text}


def test_tarproc_runs_on_some_fields_and_joins_keys_by_a_separator(
    small_shard: str, tmp_path: Path, tarproc: Tarproc
) -> None:
    options = ["-f", "txt,jpg", "-s", "_", "--count", "1", "--working_dir", str(tmp_path), small_shard]
    samples, printed = tarproc("-c", MORE_FILES, "-E", "^other", *options)
    assert printed == "__key__\n__source__\nsample.txt\n"
    assert samples == {"d/k0": {"key": b"d/k0", "txt": b"text"}, "d/k0_-1": {"txt": b"text"}}
    assert list(tarproc("-c", MORE_FILES, "-I", "^other", *options)[0]) == ["d/k0_other"]
    assert "'jpg'" in tarproc("-c", MORE_FILES, "-F", "error", *options, code=1)[1]


def test_tarproc_ignores_exit_codes_if_asked(small_shard: str, tarproc: Tarproc) -> None:
    samples, _ = tarproc("-e", "ignore", "-c", "echo x > sample.new; exit 3", "--count", "1", small_shard)
    assert samples == {"d/k0": {"cls": b"0", "new": b"x\n", "txt": b"text"}}
