"""What a newcomer gets wrong in the first hour: each mistake has one sentence that says what to do."""

from __future__ import annotations

import re
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import StageError

PACKAGE = Path(ps.__file__).parent
FRAME = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})

# The call, by the name of the folder of photos, the packed shards and an empty folder; and the message.
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a folder of photos": (
        lambda t: ps.read_tar("photos").take(1),
        "StorageError: there are no tar shards in this folder; 12 of its files are .jpg: read with ps.read_images, or "
        "make shards with `penstock pack photos FOLDER` (url: photos)",
    ),
    "decode": (
        lambda t: t.decode(jgp="rgb8").take(1),
        "PlanError: decode(jgp='rgb8'): no field 'jgp'; the fields are cls, jpg: did you mean jpg?",
    ),
    "parts": (
        lambda t: t.split(2, equal="yes"),
        "PlanError: equal='yes': expected True or False",
    ),
    "locality hints": (
        lambda t: t.streaming_split(2, locality_hints=["a", "b"]),
        "PlanError: split has no argument locality_hints; it takes n, equal; leave it out: Ray places the workers, and "
        "every part is read where it is consumed",
    ),
    "half a key": (
        lambda t: ps.S3(access_key="a"),
        "PlanError: S3(): access_key= and secret_key= belong together: give both, or neither",
    ),
    "a device": (
        lambda t: t.batched(2).loader(format="torch", device="gpu0"),
        "PlanError: device='gpu0': give a device of torch, such as 'cuda': Invalid device string: 'gpu0'",
    ),
    "a time limit": (
        lambda t: ps.connect("grpc://127.0.0.1:9", timeout_s=float("nan")),
        "PlanError: timeout_s=nan: expected a number of seconds above 0",
    ),
    "an idle time": (
        lambda t: ps.serve(t, "grpc://127.0.0.1:0", idle_s=-1),
        "PlanError: idle_s=-1: expected a number of seconds above 0",
    ),
    "select": (
        lambda t: t.select("jgp").take(1),
        "PlanError: select('jgp'): no field 'jgp'; the fields are cls, jpg: did you mean jpg?",
    ),
    "select of a list": (
        lambda t: t.select(["jpg", "cls"]),
        "PlanError: select needs field names, not ['jpg', 'cls']: write select('jpg', 'cls')",
    ),
    "a condition as text": (
        lambda t: t.filter("cls == 3"),
        "PlanError: filter needs a function, or a condition such as ps.col('cls') == 3, not 'cls == 3'",
    ),
    "loader(batch_size=)": (
        lambda t: t.loader(batch_size=8),
        "PlanError: loader has no argument batch_size; it takes rank, world, epoch, cut, uneven, ledger, format, "
        "device; write batched(n).loader()",
    ),
    "ps.concat": (
        lambda t: ps.concat([t, t]),  # type: ignore[attr-defined]
        "AttributeError: module 'penstock' has no attribute 'concat'; write a.union(b)",
    ),
    "ps.read_image": (
        lambda t: ps.read_image("photos"),  # type: ignore[attr-defined]
        "AttributeError: module 'penstock' has no attribute 'read_image'; did you mean read_images?",
    ),
    "drop": (
        lambda t: t.drop("jgp").take(1),
        "PlanError: drop('jgp'): no field 'jgp'; the fields are cls, jpg: did you mean jpg?",
    ),
    "rename": (
        lambda t: t.rename(image="jgp").take(1),
        "PlanError: rename(image='jgp'): no field 'jgp'; the fields are cls, jpg: did you mean jpg?",
    ),
    "to_tuple": (
        lambda t: t.to_tuple("jgp", "cls").take(1),
        "PlanError: to_tuple('jgp', 'cls'): no field 'jgp'; the fields are cls, jpg: did you mean jpg?",
    ),
    "a condition": (
        lambda t: t.filter(ps.col("clss") == 3).take(1),
        "PlanError: filter(col('clss') == 3): no field 'clss'; the fields are cls, jpg: did you mean cls?",
    ),
    "map that returns None": (
        lambda t: t.map(lambda sample: None).take(1),
        "StageError: TypeError: the function returned None: return the new sample, or use filter to leave samples out "
        "(stage: map(<lambda>), shard: packed/shard-000000.tar, key: *)",
    ),
    "from_items of a frame": (
        lambda t: ps.from_items(FRAME),
        "PlanError: from_items needs a list of samples, not DataFrame: write "
        "ps.from_arrow(pyarrow.Table.from_pandas(frame))",
    ),
    "from_items of columns": (
        lambda t: ps.from_items({"a": [1, 2]}),  # type: ignore[arg-type]
        "PlanError: from_items needs a list of samples, not dict: write ps.from_arrow(pyarrow.table(columns)) for a "
        "dict of columns, ps.from_items([sample]) for one sample",
    ),
    "pack of a frame": (
        lambda t: ps.pack(FRAME, "out"),
        "PlanError: a DataFrame cannot be packed as it is: write "
        "ps.pack(ps.from_arrow(pyarrow.Table.from_pandas(frame)), folder)",
    ),
    "rename of a dict": (
        lambda t: t.rename({"jpg": "image"}),
        "PlanError: rename takes keywords, new name first: write rename(image='jpg')",
    ),
    "shuffle(buffer_size=)": (
        lambda t: t.shuffle(buffer_size=1000),
        "PlanError: shuffle has no argument buffer_size; it takes window, shards, all, seed; write window=n, or "
        "all=True for a permutation of everything",
    ),
    "batched(drop_remainder=)": (
        lambda t: t.batched(8, drop_remainder=True),
        "PlanError: batched has no argument drop_remainder; it takes batch_size, drop_last, collate; write "
        "drop_last=True",
    ),
    "map(num_proc=)": (
        lambda t: t.map(dict, num_proc=4),
        "PlanError: map has no argument num_proc; it takes workers, on, cpus, gpus, retries, timeout_s, memory, "
        "fn_args, fn_kwargs; write workers=n, on='processes'",
    ),
    "with_format": (
        lambda t: t.with_format("torch"),
        "AttributeError: a Dataset has no 'with_format'; write loader(format='torch', device=...)",
    ),
    "remove_columns": (
        lambda t: t.remove_columns(["json"]),
        "AttributeError: a Dataset has no 'remove_columns'; write drop('name')",
    ),
    "random_shuffle": (
        lambda t: t.random_shuffle(),
        "AttributeError: a Dataset has no 'random_shuffle'; write shuffle()",
    ),
    "batch": (lambda t: t.batch(8), "AttributeError: a Dataset has no 'batch'; write batched(n)"),
    "prefetch": (
        lambda t: t.prefetch(2),
        "AttributeError: a Dataset has no 'prefetch'; leave it out: stages run ahead of the consumer by themselves",
    ),
    "from_pandas": (
        lambda t: ps.from_pandas(FRAME),  # type: ignore[attr-defined]
        "AttributeError: module 'penstock' has no attribute 'from_pandas'; write "
        "ps.from_arrow(pyarrow.Table.from_pandas(frame))",
    ),
    "convert to CSV": (
        lambda t: ps.convert("packed", "labels.csv"),
        "DataError: write_csv: field 'jpg' (bytes) cannot be stored in CSV; leave it out with drop('jpg'), or write "
        "Parquet (shard: packed/shard-000000.tar, key: *)",
    ),
    "a JSON array": (
        lambda t: ps.read_json("array.json").take(1),
        "DataError: the file is one JSON array; only JSON lines, with an object on each line, can be read "
        "(`jq -c '.[]'` writes them) (shard: array.json, key: line 1)",
    ),
    "pretty-printed JSON": (
        lambda t: ps.read_json("pretty.json").take(1),
        "DataError: the file is JSON over several lines; only JSON lines, with an object on each line, can be read "
        "(`jq -c .` writes them) (shard: pretty.json, key: line 1)",
    ),
    "S3 without keys": (
        lambda t: ps.read_tar("s3://bucket/a.tar").take(1),
        "StorageError: no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, pass "
        "storage=S3(...), or use s3://anonymous@bucket/key for anonymous access (url: s3://bucket/*)",
    ),
}

COMMANDS: dict[str, tuple[int, str]] = {
    "info photos": (
        1,
        "penstock: there are no tar shards in this folder; 12 of its files are .jpg: read with ps.read_images, or make "
        "shards with `penstock pack photos FOLDER` (url: photos)",
    ),
    "verify photos": (1, "penstock: there are no tar shards in this folder; 12 of its files are .jpg: *"),
    "bench photos": (1, "penstock: there are no tar shards in this folder; 12 of its files are .jpg: *"),
    "show table.parquet": (
        1,
        "penstock: this is not a tar shard: read with ps.read_parquet, or make shards with `penstock convert "
        "table.parquet FOLDER` (url: table.parquet)",
    ),
    "cat packed/shard-000000.tar -o out.tar --where clss==3": (
        1,
        "penstock: the samples have no field 'clss'; the fields are cls, jpg: did you mean cls? "
        "(shard: packed/shard-000000.tar)",
    ),
    "cat packed/shard-000000.tar -o out.tar -f jgp": (
        1,
        "penstock: the samples have no field 'jgp'; the fields are cls, jpg: did you mean jpg? "
        "(shard: packed/shard-000000.tar)",
    ),
    "cat packed/shard-000000.tar -o out.tar --where cls=3": (
        2,
        "penstock: 'cls=3' is not an expression: *; a comparison is written ==",
    ),
    "convert photos out": (
        1,
        "penstock: photos: there are no files of a supported format, only *; `penstock pack` packs other files",
    ),
    "mix packed packed --weights 1 -o out.tar": (
        2,
        "penstock: --weights has 1 weight for 2 sources: give one for each",
    ),
    "tsv packed/shard-000000.tar -o out.tsv -f clss": (
        1,
        "penstock: the samples have no field 'clss'; the fields are cls, jpg: did you mean cls? "
        "(shard: packed/shard-000000.tar)",
    ),
    "convert packed labels.csv": (
        1,
        "penstock: field 'jpg' (bytes) cannot be stored in CSV; leave it out with --drop jpg, or write Parquet "
        "(shard: packed/shard-000000.tar, key: *)",
    ),
    "pak photos out": (2, "penstock: error: there is no command 'pak': did you mean `penstock pack`?"),
    "pack photos out --fromat tar": (
        2,
        "penstock pack: error: unrecognized arguments: --fromat tar; did you mean --format?",
    ),
    "pack photos changed": (
        1,
        "penstock: changed * --mode replace *",
    ),
    "info s3://bucket/a.tar": (
        1,
        "penstock: no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use "
        "s3://anonymous@bucket/key for anonymous access (url: s3://bucket/*)",
    ),
    "proc packed/shard-000000.tar": (
        2,
        "penstock: give one of --command CMD, --script FILE and --python MODULE:FUNCTION",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with photos, shards of them, a table and JSON that is not in lines."""
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert main(["example", "photos", "photos", "--samples", "12"]) == 0
    ps.pack("photos", "packed")
    ps.pack("photos", "changed", max_samples=5)
    ps.from_items([{"a": 1}]).write_parquet("tables")
    Path("table.parquet").write_bytes(next(Path("tables").glob("*.parquet")).read_bytes())
    Path("array.json").write_text('[\n  {"a": 1},\n  {"a": 2}\n]\n')
    Path("pretty.json").write_text('{\n  "a": 1,\n  "b": 2\n}\n')
    return tmp_path


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text, re.DOTALL) is not None


def test_the_message_of_each_mistake_says_what_to_do(folder: Path) -> None:
    shards = ps.read_tar("packed")
    wrong = []
    for name, (call, message) in CALLS.items():
        try:
            call(shards)
            wrong.append(f"{name}: no error")
        except Exception as exc:
            if not _matches(message, found := f"{type(exc).__name__}: {exc}"):
                wrong.append(f"{name}:\n  {found}\n  {message}")
    assert not wrong, "\n".join(wrong)


def test_the_message_of_each_command_says_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for words, (status, message) in COMMANDS.items():
        capsys.readouterr()
        try:
            code: Any = main(words.split())
        except SystemExit as exit_:
            code = exit_.code
        found = capsys.readouterr().err.strip().splitlines()[-1]
        if code != status or not _matches(message, found):
            wrong.append(f"{words} ({code}):\n  {found}\n  {message}")
    assert not wrong, "\n".join(wrong)
    assert not (folder / "out.tar").exists()


def test_what_a_message_advises_works(folder: Path) -> None:
    assert main(["convert", "packed", "labels.csv", "--drop", "jpg"]) == 0
    assert ps.read_csv("labels.csv").schema()["cls"] == "int"
    assert ps.read_tar("packed").rename(image="jpg").first().keys() == {"__key__", "__url__", "cls", "image"}
    assert main(["pack", "photos", "changed", "--mode", "replace"]) == 0
    assert len(ps.read_tar("changed")) == 12


def _failing() -> ps.Dataset:
    def divides(sample: dict[str, int]) -> dict[str, float]:
        return {"b": inverse(sample["a"])}

    def inverse(number: int) -> float:
        return 1 / (number - 3)

    return ps.from_items([{"a": number} for number in range(5)]).map(divides)


@pytest.mark.parametrize("consume", [list, lambda ds: ds.take_all(), lambda ds: list(ds.batched(2).loader())])
def test_a_failing_sample_shows_the_users_frames_and_one_of_ours(consume: Callable[[Any], Any]) -> None:
    with pytest.raises(StageError) as caught:
        consume(_failing())
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert len([frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]) == 1, frames
    assert [frame.name for frame in frames[-2:]] == ["divides", "inverse"]
    cause = caught.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert any(frame.name == "_results" for frame in traceback.extract_tb(cause.__traceback__))


def test_the_users_frames_in_a_process_are_in_a_note(tmp_path: Path, warm_python: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS_IN_A_PROCESS)
    done = subprocess.run([warm_python, str(script)], capture_output=True, text=True)
    complete, _, short = done.stderr.partition("The above exception was the direct cause")
    assert "in _results" in complete
    assert "in _results" not in short
    assert short.index("in items") < short.index("StageError: ZeroDivisionError") < short.index("in fails")


FAILS_IN_A_PROCESS = """
import penstock as ps

def fails(sample):
    return 1 / sample["a"]

for _ in ps.from_items([{"a": 0}]).map(fails, on="processes", workers=1):
    pass
"""

OPEN_AT_EXIT = """
import penstock as ps
from torch.utils.data import DataLoader
numbers = ps.from_items([{"a": i} for i in range(600)])
iterators = [
    iter(numbers.map(dict, workers=2)),
    iter(numbers.map(dict, on="processes", workers=1)),
    iter(numbers.map(dict, workers=2).to_torch()),
    iter(DataLoader(numbers.map(dict), batch_size=None, num_workers=1)),
]
for iterator in iterators:
    next(iterator)
"""


def test_iterators_that_are_open_at_the_end_of_a_program_print_nothing(tmp_path: Path, warm_python: str) -> None:
    done = subprocess.run([warm_python, "-c", OPEN_AT_EXIT], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
