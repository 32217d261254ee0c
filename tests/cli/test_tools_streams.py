"""The tools on streams of samples: what is chosen, in which order, under which keys, in which form."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.formats.tar.writer import ShardWriter
from penstock.tarstream import sort as sorting

Out = pytest.CaptureFixture[bytes]
LONG = "a" * 120 + "/" + "b" * 180
HOSTILE = ["plain", "with space", "new\nline", "qu'o\"te\ttab", "ünïcode/键", LONG]


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Twenty samples: ``cls`` counts down by twos and repeats, ``txt`` is text, ``jpg`` is none."""
    with ps.TarWriter(tmp_path / "in.tar") as writer:
        for number in range(20):
            label = b"%d" % (9 - number % 10)
            writer.write({"__key__": f"k{number:02d}", "cls": label, "txt": b"t%d" % number, "jpg": b"\xff" * number})
    return str(tmp_path / "in.tar")


def keys(out: Out | bytes) -> list[str]:
    data = out if isinstance(out, bytes) else out.readouterr().out
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return list(dict.fromkeys(member.name.rpartition(".")[0] for member in tar))


def piped(data: bytes, *words: str, code: int = 0) -> bytes:
    done = subprocess.run([sys.executable, "-m", "penstock", *words], input=data, capture_output=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


def k(*numbers: int) -> list[str]:
    return [f"k{number:02d}" for number in numbers]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["-c", "3"], k(0, 1, 2)),
        (["-c", "0"], []),
        (["-s", "18"], k(18, 19)),
        (["-s", "2", "-c", "2"], k(2, 3)),
        (["--slice", "4:8"], k(4, 5, 6, 7)),
        (["--slice", "::7"], k(0, 7, 14)),
        (["--slice", ":9:4", "-s", "1", "-c", "2"], k(1, 5)),
        (["--where", "cls == 3"], k(6, 16)),
        (["--where", "cls < 5 and size('jpg') > 15", "-c", "2"], k(16, 17)),
        (["--rename", "{shard}/{number:03d}-{key}", "-c", "1"], ["in/000-k00"]),
    ],
)
def test_cat_takes_what_is_chosen(options: list[str], wanted: list[str], shard: str, capfdbinary: Out) -> None:
    assert main(["cat", shard, *options]) == 0
    assert keys(capfdbinary) == wanted


def test_cat_concatenates_everything_that_names_shards(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    assert main(["split", "-n", "7", "-o", str(tmp_path / "part"), shard]) == 0
    (tmp_path / "list.txt").write_text(f"{tmp_path}/part-000001.tar\n")
    for given in ([f"{tmp_path}/part-{{000000..000002}}.tar"], [f"{tmp_path}/part-*.tar"]):
        assert main(["cat", *given]) == 0
        assert keys(capfdbinary) == k(*range(20))
    assert main(["cat", f"{tmp_path}/part-000002.tar", "-v", "-T", str(tmp_path / "list.txt")]) == 0
    found = capfdbinary.readouterr()
    assert keys(found.out) == k(*range(14, 20), *range(7, 14))
    assert found.err == b"13 samples\n"
    assert main(["cat", "-p", "3", f"{tmp_path}/part-*.tar"]) == 0
    assert sorted(keys(capfdbinary)) == k(*range(20))


def test_cat_keeps_or_drops_fields(shard: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.tar.gz")
    assert main(["cat", shard, "-f", "txt cls", "-x", "cls", "-o", out]) == 0
    assert gzip.decompress(Path(out).read_bytes())
    assert [set(s) - {"__key__", "__url__"} for s in ps.read_tar(out)] == [{"txt"}] * 20
    assert len(ps.read_tar(out)) == 20
    assert (tmp_path / "out.tar.gz.index").exists()


def test_cat_of_a_whole_shard_is_that_shard(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    assert main(["cat", shard]) == 0
    assert capfdbinary.readouterr().out == Path(shard).read_bytes()
    assert main(["cat", shard, "-o", str(tmp_path / "out.tar")]) == 0
    assert (tmp_path / "out.tar").read_bytes() == Path(shard).read_bytes()
    assert main(["verify", str(tmp_path / "out.tar")]) == 0


def test_a_shuffle_buffer_loses_nothing_and_follows_the_seed(shard: str, capfdbinary: Out) -> None:
    found = []
    for seed in ("1", "1", "2"):
        assert main(["cat", shard, "--shuffle", "5", "--seed", seed]) == 0
        found.append(keys(capfdbinary))
    assert found[0] == found[1] != found[2]
    assert sorted(found[0]) == k(*range(20)) != found[0]


def test_a_key_twice_is_refused_and_renaming_helps(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    assert main(["cat", shard, shard]) == 1
    assert b"the key was written before; --rename gives other keys (shard: -, key: k00)" in capfdbinary.readouterr().err
    assert main(["cat", shard, shard, "--rename", "{number}", "-o", str(tmp_path / "both.tar")]) == 0
    assert len(ps.read_tar(str(tmp_path / "both.tar"))) == 40
    assert main(["cat", shard, "--rename", "same", "-o", str(tmp_path / "same.tar")]) == 1
    assert not (tmp_path / "same.tar").exists()


def test_damage_stops_or_is_left_out(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    data = bytearray(Path(shard).read_bytes())
    data[5000] ^= 255
    (tmp_path / "bad.tar").write_bytes(data[:-2000])
    out = str(tmp_path / "out.tar")
    assert main(["cat", str(tmp_path / "bad.tar"), "-o", out]) == 1
    assert not Path(out).exists()
    assert b"bad.tar" in capfdbinary.readouterr().err
    assert main(["cat", str(tmp_path / "bad.tar"), "-o", out, "--on-error", "skip"]) == 0
    assert b"left out: " in capfdbinary.readouterr().err
    assert len(ps.read_tar(out)) >= 15


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], k(*range(20))),
        (["-r"], k(*reversed(range(20)))),
        (["-s", "cls", "-S", "int", "-c", "12"], k(9, 8, 7, 6, 5, 4, 3, 2, 11, 1, 10, 0)[::1]),
        (["-s", "txt", "--where", "cls == 9"], k(0, 10)),
    ],
)
@pytest.mark.parametrize("records", [200_000, 3])
def test_sort_is_stable_by_key_field_and_number(
    options: list[str], wanted: list[str], records: int, shard: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: Out
) -> None:
    monkeypatch.setattr(sorting, "_RECORDS", records)
    assert main(["sort", shard, *options]) == 0
    found = keys(capfdbinary)
    if "cls" in options:
        labels = [9 - int(key[1:]) % 10 for key in found]
        assert labels == sorted(labels)
        assert len(found) == 12
        wanted = sorted(found, key=lambda key: (9 - int(key[1:]) % 10, key))
    assert found == wanted


def test_sorting_a_pipe_or_a_compressed_shard_is_sorting_the_file(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    assert main(["shuffle", "--seed", "3", shard]) == 0
    shuffled = capfdbinary.readouterr().out
    assert sorted(keys(shuffled)) == k(*range(20)) != keys(shuffled)
    assert piped(gzip.compress(shuffled), "sort", "-t", str(tmp_path)) == Path(shard).read_bytes()
    assert piped(gzip.compress(Path(shard).read_bytes()), "shuffle", "--seed", "3") == shuffled


@pytest.mark.parametrize("name", ["none", "txt"])
def test_what_cannot_be_sorted_by_is_told(name: str, shard: str, capfdbinary: Out) -> None:
    assert main(["sort", shard, "-s", name, "-S", "float"]) == 1
    assert b"key: k00" in capfdbinary.readouterr().err


def test_split_by_count_and_size_with_index_and_manifest(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    for name, options in {"n": ["-n", "6"], "s": ["-s", "20KB"]}.items():
        out = tmp_path / name
        assert main(["split", *options, "-o", f"{out}/", "--json", shard]) == 0
        told = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
        assert [one["name"] for one in told] == sorted(path.name for path in out.glob("*.tar"))
        assert [s["__key__"] for s in ps.read_tar(str(out))] == k(*range(20))
        assert main(["verify", str(out)]) == 0
        assert b"all well" in capfdbinary.readouterr().out
    assert [one["samples"] for one in map(json.loads, _manifest(tmp_path / "n"))] == [6, 6, 6, 2]
    assert all(path.stat().st_size <= 20_000 for path in (tmp_path / "s").glob("*.tar"))


def _manifest(folder: Path) -> list[str]:
    return [json.dumps(shard) for shard in json.loads((folder / "manifest.json").read_text())["shards"]]


@pytest.mark.parametrize("how", ["file", "pipe", "gz"])
@pytest.mark.parametrize("limits", [{"max_bytes": 60_000}, {"max_bytes": 90_000, "max_samples": 25}])
def test_split_cuts_as_if_samples_came_one_by_one(how: str, limits: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"__key__": f"k{n:03}", "cls": b"%d" % n, "txt": b"x" * (n * 37 % 1500)} for n in range(70)]
    source = tmp_path / ("in.tar.gz" if how == "gz" else "in.tar")
    with ps.TarWriter(source) as writer:
        for row in rows:
            writer.write(row)
    with ShardWriter(tmp_path / "one", **limits) as shards:
        for row in rows:
            shards.write(row)
    words = ["-s", str(limits.get("max_bytes", 10**9)), "-n", str(limits.get("max_samples", 10**6))]
    words = ["split", *words, "-o", f"{tmp_path}/two/"]
    if how == "pipe":
        with open(source, "rb") as file:
            subprocess.run([sys.executable, "-m", "penstock", *words], stdin=file, check=True)
    else:
        assert main([*words, str(source)]) == 0
    names = sorted(path.name for path in (tmp_path / "one").glob("*.tar"))
    assert names == sorted(path.name for path in (tmp_path / "two").glob("*.tar"))
    assert len(names) > 2
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)
    assert (tmp_path / "one/manifest.json").read_bytes() == (tmp_path / "two/manifest.json").read_bytes()


@pytest.mark.parametrize("name", ["x", "x-{shard:06d}.tar", "x-%06d.tar"])
def test_split_stops_after_so_many_shards(name: str, shard: str, tmp_path: Path) -> None:
    assert main(["split", "-n", "6", "--maxshards", "2", "-o", str(tmp_path / "o" / name), shard]) == 0
    assert sorted(path.name for path in (tmp_path / "o").glob("*.tar")) == ["x-000000.tar", "x-000001.tar"]
    assert len(ps.read_tar(str(tmp_path / "o"))) == 12


def test_first_writes_the_field_and_tells_whose(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    assert main(["first", "-S", "cls == 3", "-f", "png;txt", shard]) == 0
    found = capfdbinary.readouterr()
    assert (found.out, found.err) == (b"t6", b"k06.txt\n")
    assert main(["first", "-f", "txt", "-o", str(tmp_path / "t"), shard]) == 0
    assert (tmp_path / "t").read_bytes() == b"t0"
    capfdbinary.readouterr()
    assert main(["first", "-S", "cls == 33", shard]) == 1
    assert capfdbinary.readouterr().err == b"penstock: no sample meets that\n"


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    with ps.TarWriter(tmp_path / "hostile.tar") as writer:
        for number, key in enumerate(HOSTILE):
            writer.write({"__key__": key, "txt": f'a\tb\n"c", \\d {number}'.encode()})
    return str(tmp_path / "hostile.tar")


def test_tables_come_back_as_they_were(hostile: str, tmp_path: Path, capfdbinary: Out) -> None:
    wanted = [[key, f'a\tb\n"c", \\d {number}'] for number, key in enumerate(HOSTILE)]
    assert main(["tsv", hostile]) == 0
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert lines[0] == "__key__\ttxt"
    assert [_unescaped(line) for line in lines[1:]] == wanted
    assert main(["tsv", "-F", "csv", "-f", "txt", hostile]) == 0
    assert list(csv.reader(io.StringIO(capfdbinary.readouterr().out.decode(), newline="")))[1:] == wanted
    assert main(["tsv", "--json", hostile]) == 0
    rows = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [[row["__key__"], row["txt"]] for row in rows] == wanted
    assert main(["tsv", "-o", str(tmp_path / "t.parquet"), hostile]) == 0
    assert [[row["__key__"], row["txt"]] for row in ps.read_parquet(str(tmp_path / "t.parquet"))] == wanted


def _unescaped(line: str) -> list[str]:
    plain = {"\\t": "\t", "\\n": "\n", "\\\\": "\\"}
    cells = []
    for cell in line.split("\t"):
        out, at = "", 0
        while at < len(cell):
            step = 2 if cell[at : at + 2] in plain else 1
            out += plain.get(cell[at : at + 2], cell[at])
            at += step
        cells.append(out)
    return cells


def test_columns_choose_among_fields_and_bytes_have_a_place(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    assert main(["tsv", "-f", "png;txt cls", "--nokey", "-c", "1", shard]) == 0
    assert capfdbinary.readouterr().out == b"png\tcls\nt0\t9\n"
    assert main(["tsv", "-f", "none", "--noheader", "-c", "1", shard]) == 0
    assert capfdbinary.readouterr().out == b"k00\t\n"
    assert main(["tsv", "-f", "jpg", shard]) == 1
    assert b"the field 'jpg' is not text" in capfdbinary.readouterr().err
    assert main(["tsv", "-f", "jpg", "-c", "2", "--json", shard]) == 0
    assert b'{"__key__": "k01", "jpg": {"base64": "/w=="}}' in capfdbinary.readouterr().out
    assert main(["tsv", "-f", "jpg", "-o", str(tmp_path / "t.parquet"), shard]) == 0
    assert ps.read_parquet(str(tmp_path / "t.parquet")).take_all()[3]["jpg"] == b"\xff" * 3


@pytest.mark.parametrize("comma", [False, True])
def test_create_makes_what_the_plan_says(comma: bool, tmp_path: Path, capfdbinary: Out) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "1.jpg").write_bytes(b"\xffone")
    plan = tmp_path / ("plan.csv" if comma else "plan.tsv")
    lines = ["@jpg\tcls\ttxt", "1.jpg\t3\ta\\tb", "\t4\tc"]
    plan.write_text("\n".join(line.replace("\t", ",") if comma else line for line in lines) + "\n")
    assert main(["create", str(plan), "-C", str(tmp_path / "f"), "-o", str(tmp_path / "out.tar")]) == 0
    found = ps.read_tar(str(tmp_path / "out.tar")).drop("__url__").take_all()
    text = b"a\\tb" if comma else b"a\tb"
    assert found == [
        {"__key__": "000000000", "cls": b"3", "jpg": b"\xffone", "txt": text},
        {"__key__": "000000001", "cls": b"4", "txt": b"c"},
    ]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("", "the plan is empty"),
        ("@jpg\tcls\nnone.jpg\t1\n", "line 2: there is no file"),
        ("a\tb\n1\n", "line 2 has 1 cells, the first line 2"),
        ("a\t@a\n1\t2\n", "two columns are 'a'"),
        ("__key__\n1\n", "names no field"),
        ("__key__\ta\nx.y\t1\n", "line 2: the key has a dot"),
        ("__key__\ta\nx\t1\nx\t1\n", "line 3: the key was written before"),
        ("__key__\ta\n../x\t1\n", "line 2: the key is an absolute path or leads out"),
    ],
)
def test_a_plan_that_cannot_be_followed_leaves_nothing(plan: str, words: str, tmp_path: Path, capfdbinary: Out) -> None:
    (tmp_path / "plan.tsv").write_text(plan)
    assert main(["create", str(tmp_path / "plan.tsv"), str(tmp_path / "out.tar")]) == 1
    assert words in capfdbinary.readouterr().err.decode()
    assert not (tmp_path / "out.tar").exists()


def test_what_is_tabulated_can_be_created_again(hostile: str, capfdbinary: Out) -> None:
    assert main(["tsv", hostile]) == 0
    table = capfdbinary.readouterr().out
    assert piped(table, "create") == Path(hostile).read_bytes()


def test_mix_takes_by_weight_and_stops_as_asked(shard: str, tmp_path: Path, capfdbinary: Out) -> None:
    other = str(tmp_path / "b.tar")
    assert main(["cat", shard, "--rename", "b-{key}", "-o", other]) == 0
    assert main(["mix", "-w", "3,1", shard, other, "--stop", "all", "--seed", "1"]) == 0
    found = keys(capfdbinary)
    assert sorted(found) == sorted([*k(*range(20)), *(f"b-{key}" for key in k(*range(20)))])
    assert sum(not key.startswith("b-") for key in found[:20]) > 12
    (tmp_path / "mix.json").write_text(json.dumps({"sources": [{"shards": shard, "weight": 1}, {"shards": [other]}]}))
    (tmp_path / "mix.yaml").write_text(f"sources:\n- shards: {shard}\n  weight: 1\n- shards: {other}\n")
    for name in ("mix.json", "mix.yaml"):
        assert main(["mix", str(tmp_path / name)]) == 0
        some = keys(capfdbinary)
        assert [key for key in some if key[0] == "k"] == k(*range(sum(key[0] == "k" for key in some)))
        assert 20 <= len(some) < 40


def test_show_is_plain_in_a_pipe_and_commands_no_terminal(tmp_path: Path, capfdbinary: Out) -> None:
    with ps.TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a\x1b[31m", "txt": b"red \x1b[31m\nline " + b"x" * 500, "bin": b"\x00\xff"})
        writer.write({"__key__": "b", "txt": "für".encode(), "bin": b""})
    assert main(["show", str(tmp_path / "a.tar")]) == 0
    out = capfdbinary.readouterr().out.decode()
    assert "\x1b" not in out
    assert "a\\x1b[31m\n" in out
    assert "red \\x1b[31m\\nline xxx" in out
    assert "für" in out
    assert max(map(len, out.splitlines())) <= 90
    assert main(["show", "--json", "-f", "txt", "-c", "1", str(tmp_path / "a.tar")]) == 0
    assert json.loads(capfdbinary.readouterr().out)["fields"] == {"txt": 515}


def test_show_draws_pictures_and_waves(photo_shards: Path, tmp_path: Path, capfdbinary: Out) -> None:
    shard = str(photo_shards / "train-0000.tar")
    for how, mark in {"blocks": "▀", "iterm": "\x1b]1337;File=inline=1", "kitty": "\x1b_Gf=100,a=T,m="}.items():
        assert main(["show", "-c", "1", "-f", "jpg", "--draw", how, "--width", "20", shard]) == 0
        assert mark in capfdbinary.readouterr().out.decode()
    with ps.TarWriter(tmp_path / "s.tar") as writer:
        writer.write({"__key__": "s", "wav": _wav(), "jpg": b"\xff\xd8 damaged"})
    assert main(["show", "--draw", "blocks", "--width", "8", str(tmp_path / "s.tar")]) == 0
    assert "█ 0.10 s, 8,000 Hz" in capfdbinary.readouterr().out.decode()


def _wav() -> bytes:
    import wave

    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8000, 800, "NONE", ""))
        file.writeframes(b"".join((number * 40).to_bytes(2, "little") for number in range(800)))
    return out.getvalue()


def test_hostile_keys_go_through_every_tool(hostile: str, tmp_path: Path, capfdbinary: Out) -> None:
    for words in (["cat"], ["sort"], ["shuffle"], ["cat", "-f", "txt"], ["proc", "-c", "true"]):
        assert main([*words, hostile]) == 0
        assert sorted(keys(capfdbinary)) == sorted(HOSTILE)
    assert main(["split", "-n", "2", "-o", f"{tmp_path}/split/", hostile]) == 0
    assert [s["__key__"] for s in ps.read_tar(f"{tmp_path}/split/")] == HOSTILE
    up = io.BytesIO()
    with tarfile.open(fileobj=up, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../up.txt"))
    (tmp_path / "up.tar").write_bytes(up.getvalue())
    capfdbinary.readouterr()
    assert main(["proc", "-c", "true", str(tmp_path / "up.tar")]) == 1
    assert b"paths with '..' are refused" in capfdbinary.readouterr().err


@pytest.mark.parametrize(
    "words", [["cat", "-o"], ["sort", "-o"], ["split", "-o"], ["tsv", "--json", "-f", "bin", "-o"]]
)
def test_a_full_disk_is_one_line_and_leaves_nothing(words: list[str], tmp_path: Path) -> None:
    with ps.TarWriter(tmp_path / "in.tar") as writer:
        for number in range(40):
            writer.write({"__key__": f"{number}", "bin": os.urandom(100_000)})
    (tmp_path / "out").mkdir()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words, str(tmp_path / "out" / "x.tar"), str(tmp_path / "in.tar")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limited,
    )
    assert done.returncode == 1
    assert done.stderr.lower().startswith("penstock: ")
    assert "file too large" in done.stderr.lower()
    assert str(tmp_path / "out" / "x.tar") in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_a_pipe_that_is_closed_early_is_no_error(shard: str, tmp_path: Path) -> None:
    with ps.TarWriter(tmp_path / "big.tar") as writer:
        for number in range(300):
            writer.write({"__key__": f"{number}", "bin": os.urandom(20_000)})
    script = """set -o pipefail
    "$1" -m penstock cat "$2" | head -c 10000 > /dev/null
    cat "$2" | "$1" -m penstock cat -c 2 > "$3" || test $? = 141
    "$1" -m penstock tsv --json -f bin "$2" | head -n 1 > /dev/null"""
    words = ["bash", "-c", script, "bash", sys.executable, str(tmp_path / "big.tar"), str(tmp_path / "two.tar")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(ps.read_tar(str(tmp_path / "two.tar"))) == 2


def test_other_storages_are_read_and_written(shard: str, capfdbinary: Out) -> None:
    place = "memory://tools"
    assert main(["cat", shard, "-o", f"{place}/in.tar"]) == 0
    assert main(["split", "-n", "6", "-o", f"{place}/set/", f"{place}/in.tar"]) == 0
    assert main(["sort", "-r", f"{place}/set/*.tar"]) == 0
    assert keys(capfdbinary) == k(*reversed(range(20)))
    assert main(["tsv", "-f", "cls", "-o", f"{place}/t.tsv", f"{place}/set/"]) == 0
    assert (
        main(["proc", "-c", "rm sample.jpg", f"{place}/set/shard-{{000000..000003}}.tar", "-o", f"{place}/p/{{}}.tar"])
        == 0
    )
    rows: list[dict[str, Any]] = ps.read_tar(f"{place}/p/").take_all()
    assert [row["__key__"] for row in rows] == k(*range(20))
    assert set(rows[0]) == {"__key__", "__url__", "cls", "txt"}


@pytest.mark.parametrize("tool", ["cat", "sort", "split", "tsv", "proc"])
def test_a_key_that_leads_outside_is_refused_and_writes_nothing(tool: str, tmp_path: Path, capfdbinary: Out) -> None:
    with tarfile.open(tmp_path / "in.tar", "w") as tar:
        for name in ("a.txt", "../../evil.txt"):
            tar.addfile(tarfile.TarInfo(name))
    more = ["-c", "true"] if tool == "proc" else []
    assert main([tool, *more, str(tmp_path / "in.tar"), "-o", str(tmp_path / "out" / "x")]) == 1
    assert b"paths with '..' are refused" in capfdbinary.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["in.tar"]
