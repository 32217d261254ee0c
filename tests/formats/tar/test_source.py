"""A source lists its shards, takes counts from manifests, and reports what is missing before anything is read."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PlanError, StorageError
from penstock.formats.tar import ShardWriter, TarReader
from penstock.formats.tar.source import StdinReader, TarSource
from penstock.plan import Fields
from penstock.testing.servers import plain_server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "shards", max_samples=3) as writer:
        for number in range(8):
            writer.write({"__key__": f"k{number}", "txt": b"x"})
    return tmp_path / "shards"


def opened(*patterns: str, **options: Any) -> TarReader:
    reader = TarSource(patterns, **options).open()
    assert isinstance(reader, TarReader)
    return reader


def test_counts_come_from_the_manifest_without_a_scan(folder: Path) -> None:
    reader = opened(str(folder))
    counts = reader.counts(scan=False)
    assert counts is not None
    assert counts.tolist() == [3, 3, 2]
    assert reader.names == ["shard-000000.tar", "shard-000001.tar", "shard-000002.tar"]
    (folder / "manifest.json").unlink()
    assert opened(str(folder)).counts(scan=False) is None


def test_a_missing_shard_is_an_error_when_the_source_is_opened(folder: Path) -> None:
    with pytest.raises(StorageError, match=r"no such shard.*none\.tar"):
        opened(str(folder / "none.tar"))


def test_a_folder_must_hold_every_shard_of_its_manifest(folder: Path) -> None:
    (folder / "shard-000001.tar").unlink()
    with pytest.raises(StorageError, match=r"the manifest names a shard that does not exist.*shard-000001\.tar"):
        opened(str(folder))
    assert opened(str(folder / "shard-00000{0,2}.tar")).counts(scan=False) is not None


def test_an_http_folder_is_listed_by_its_manifest(folder: Path) -> None:
    with plain_server(folder) as port:
        reader = opened(f"http://127.0.0.1:{port}")
        assert len(reader.names) == 3
        (folder / "manifest.json").unlink()
        with pytest.raises(StorageError, match="an HTTP folder cannot be listed"):
            opened(f"http://127.0.0.1:{port}")


def test_a_description_shows_three_patterns_and_no_password() -> None:
    source = TarSource(("https://me:secret@host/a.tar", "b.tar", "c.tar", "d.tar"))
    assert source.describe() == "read_tar('https://host/a.tar', 'b.tar', 'c.tar', ...)"


def test_a_cache_must_be_one() -> None:
    with pytest.raises(PlanError, match=r"ps\.Cache"):
        TarSource(("a.tar",), cache="folder")  # type: ignore[arg-type]


def test_standard_input_is_read_alone_and_in_order() -> None:
    with pytest.raises(PlanError, match="'-' is the standard input, which cannot be read together"):
        ps.read_tar(["-", "a.tar"])
    with pytest.raises(PlanError, match=r"read_tar\('-'\) is read once, front to back: it cannot be shuffled"):
        ps.read_tar("-").shuffle().first()


def test_standard_input_is_a_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TarSource(("-",))
    reader = source.open()
    assert source.streams
    assert isinstance(reader, StdinReader)
    data = (folder / "shard-000002.tar").read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    assert [sample["__key__"] for sample, _ in reader.stream(Fields())] == ["k6", "k7"]


def test_shards_signed_anew_have_the_order_and_the_state_of_the_copy_on_disk(folder: Path, tmp_path: Path) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == "k4":
            raise ValueError("bad")
        return sample

    def run(urls: Any, day: str, state: Any = None) -> tuple[list[str], Any]:
        ds = ps.read_tar(urls).shuffle(seed=1).map(fails).on_error("skip", quarantine=str(tmp_path / f"q{day}.jsonl"))
        loader = ds.loader(ledger=str(tmp_path / f"ledger{day}"), epoch=0)
        if state is not None:
            loader.load_state_dict(state)
        keys, states = [], []
        for sample in loader:
            keys.append(sample["__key__"])
            states.append(loader.state_dict())
        return keys, states

    paths = sorted(str(path) for path in folder.glob("*.tar"))
    (folder / "manifest.json").unlink()  # its entries have no query
    local, states = run(paths, "local")
    with plain_server(folder) as port:
        hosts = (f"me:word@127.0.0.1:{port}", f"127.0.0.1:{port}")
        for day, host in enumerate(hosts):
            urls = [f"http://{host}/{Path(path).name}?X-Amz-Signature=secret{day}/x" for path in paths]
            remote, _ = run(urls, str(day))
            assert remote == local
            assert run(urls, f"{day}-rest", states[2])[0] == local[3:]
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file.parent != folder)
    assert b"k4" in written
    assert b"secret" not in written
    assert b"word" not in written
