"""Shards, indexes and manifests that lie: reading them ends, takes little memory, and yields ordinary names."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import DataError, PenstockError
from penstock.formats.tar import Index, ShardWriter
from penstock.testing.servers import plain_server

SEEDS = range(3000 if os.environ.get("PENSTOCK_FULL") == "1" else 80)
MAX_MEMORY = 300 << 20
SAMPLES = 12
HUGE: tuple[Any, ...] = (
    -1,
    0,
    1,
    7,
    2**20,
    2**31,
    2**40,
    2**62,
    2**63,
    2**64,
    10**30,
    1.5,
    float("inf"),
    None,
    True,
    "x",
    [],
    {},
)
NAMES = ("..", "../x", "a/../b", "/etc/x", "", "a\0b", "__key__", "__url__", "TXT", "txt", "k0", "a/b", "{a,b}", "*")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with their indexes and their manifest."""
    with ShardWriter(tmp_path / "d", max_samples=SAMPLES // 2) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"k{number}", "txt": b"x" * 50, "cls": b"3"})
    return tmp_path / "d"


def edit_index(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of an index file; its checksum is correct again."""
    data = path.read_bytes()
    length = int.from_bytes(data[8:16], "little")
    about = json.loads(data[16 : 16 + length])
    edit(about)
    head = json.dumps(about).encode()
    body = b"".join(
        [data[:8], len(head).to_bytes(8, "little"), head, bytes(-len(head) % 8), data[16 + length + -length % 8 : -4]]
    )
    path.write_bytes(body + zlib.crc32(body).to_bytes(4, "little"))


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    edit(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def read_all(folder: Path | str) -> list[dict[str, Any]]:
    """All samples, under skip, within the memory bound."""
    tracemalloc.start()
    try:
        # Not list(), which allocates by len().
        return [sample for sample in ps.read_tar(str(folder)).on_error("skip").on("serial")]  # noqa: C416
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_MEMORY


@pytest.mark.parametrize("nbytes", [3072, 2**59])
@pytest.mark.parametrize("count", [20_000_000, 2**40, 2**62])
def test_a_count_that_the_shard_cannot_hold_is_an_error_and_takes_no_memory(
    folder: Path, count: int, nbytes: int
) -> None:
    def edit(content: dict[str, Any]) -> None:
        for shard in content["shards"]:
            shard.update(samples=count, bytes=nbytes)

    edit_manifest(folder, edit)
    with pytest.raises(DataError, match=f"{count}"):
        read_all(folder)


@pytest.mark.parametrize("name", ["..", "a\0b", "__key__", "__url__", "__source__", "", "a/b", "TXT", "cls"])
def test_an_index_whose_fields_no_scan_yields_is_not_used(folder: Path, name: str) -> None:
    path = folder / "shard-000000.tar.index"
    edit_index(path, lambda about: about.update(kinds=[["cls", name if name != ".." else "../x"]]))
    with pytest.raises(DataError, match="a scan refuses"):
        Index.from_bytes(path.read_bytes())
    samples = read_all(folder)
    assert len(samples) == SAMPLES
    assert all(set(sample) == {"__key__", "__url__", "cls", "txt"} for sample in samples)


@pytest.mark.parametrize("key", ["..", "/x", "\0x", "k1"])
def test_an_index_whose_keys_no_scan_yields_is_not_used(folder: Path, key: str) -> None:
    path = folder / "shard-000000.tar.index"
    data = path.read_bytes()
    at = data.index(b"k0k1k2")
    body = data[:at] + key.encode().ljust(2, b"x")[:2] + data[at + 2 : -4]
    path.write_bytes(body + zlib.crc32(body).to_bytes(4, "little"))
    with pytest.raises(DataError, match="a scan refuses"):
        Index.from_bytes(path.read_bytes())
    assert sorted(sample["__key__"] for sample in read_all(folder)) == sorted(f"k{n}" for n in range(SAMPLES))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, 10**30])
def test_an_index_with_impossible_numbers_is_built_anew(folder: Path, value: float) -> None:
    path = folder / "shard-000000.tar.index"
    original = path.read_bytes()
    for name in ("samples", "members", "text", "grid", "skipped", "content_size"):
        path.write_bytes(original)
        edit_index(path, partial(dict.update, **{name: value}))
        assert len(read_all(folder)) == SAMPLES, name


def test_an_index_of_deeply_nested_json_is_built_anew(folder: Path) -> None:
    head = b"[" * 100_000
    body = b"PSTKIX02" + len(head).to_bytes(8, "little") + head
    (folder / "shard-000000.tar.index").write_bytes(body + zlib.crc32(body).to_bytes(4, "little"))
    assert len(read_all(folder)) == SAMPLES


@pytest.mark.parametrize("name", ["..", ".hidden.tar", "a\0.tar", "a/b.tar", ""])
def test_a_manifest_names_only_files_of_its_folder(folder: Path, name: str) -> None:
    edit_manifest(folder, lambda content: content["shards"][0].update(name=name))
    with pytest.raises(DataError, match="invalid file name"):
        read_all(folder)


def test_names_in_a_manifest_over_http_are_not_patterns_and_have_no_query(folder: Path) -> None:
    names = ["{x,y}*?.tar", "a#b%2e.tar"]
    for old, new in zip(sorted(folder.glob("*.tar")), names, strict=True):
        old.rename(folder / new)
        Path(f"{old}.index").rename(folder / f"{new}.index")

    def edit(content: dict[str, Any]) -> None:
        for shard, name in zip(content["shards"], names, strict=True):
            shard["name"] = name

    edit_manifest(folder, edit)
    with plain_server(folder) as port:
        ds = ps.read_tar(f"http://127.0.0.1:{port}/")
        assert len(ds) == SAMPLES
        assert sorted(sample["__key__"] for sample in ds) == sorted(f"k{n}" for n in range(SAMPLES))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mutated_file_gives_samples_or_an_error(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 2)):
        rng.choice([flip_bytes, flip_bytes, mutate_index, mutate_manifest])(folder, rng)
    try:
        samples = read_all(folder)
    except PenstockError:
        return
    assert len(samples) <= SAMPLES
    for sample in samples:
        key, fields = sample["__key__"], sample.keys() - {"__key__", "__url__"}
        assert ".." not in key.split("/")
        assert "\0" not in key
        assert not key.startswith("/")
        assert fields
        assert not any(name.startswith("__") or "/" in name or name != name.lower() for name in fields)


def flip_bytes(folder: Path, rng: random.Random) -> None:
    """Change, cut out or repeat bytes of a file."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 3, 30])):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0 | 1:
                data[at] = rng.randrange(256)
            case 2:
                del data[at : at + rng.choice([1, 8, 512, 5000])]
            case 3:
                data[at:at] = data[at : at + rng.choice([1, 8, 512])]
        data = data or bytearray(b"x")
    path.write_bytes(data)


def mutate_index(folder: Path, rng: random.Random) -> None:
    def edit(about: dict[str, Any]) -> None:
        name = rng.choice(sorted(about))
        value: Any = rng.choice(HUGE)
        if name == "kinds" and rng.random() < 0.8:
            value = [[rng.choice(NAMES), rng.choice(NAMES)]]
        if name == "stamp" and rng.random() < 0.5:
            value = [rng.choice(HUGE), rng.choice(HUGE), 0]
        if name in ("bad", "lost") and rng.random() < 0.5:
            value = [[rng.choice(HUGE), "x"]] if name == "bad" else [rng.choice(HUGE)]
        about[name] = value

    with suppress(ValueError):  # it was damaged before
        edit_index(rng.choice(sorted(folder.glob("*.index"))), edit)


def mutate_manifest(folder: Path, rng: random.Random) -> None:
    def edit(content: dict[str, Any]) -> None:
        shard = rng.choice(content["shards"])
        name = rng.choice(sorted(shard))
        shard[name] = rng.choice(NAMES) if name == "name" else rng.choice(HUGE)

    with suppress(ValueError, TypeError, KeyError, AttributeError, IndexError):  # it was damaged before
        edit_manifest(folder, edit)
