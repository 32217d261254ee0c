"""What is refused by default, and what becomes of damaged shards."""

from __future__ import annotations

import os
import pickle
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.compat import webdataset as wds
from penstock.testing.servers import http_server


@pytest.fixture(autouse=True)
def _nothing_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TRUST_WDS", "")
    monkeypatch.delenv("WDS_SECURE", raising=False)


class Malicious:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('ran')",)


@pytest.fixture
def pickled(tmp_path: Path) -> str:
    with wds.TarWriter(str(tmp_path / "p.tar"), encoder=False) as sink:
        sink.write({"__key__": "a", "pyd": pickle.dumps(Malicious())})
    return str(tmp_path / "p.tar")


def test_pickles_are_refused_in_every_decoder_and_the_switch_is_named(pickled: str) -> None:
    for ds in (wds.WebDataset(pickled).decode(), wds.WebDataset(pickled).xdecode()):
        with pytest.raises((wds.DecodingError, ValueError), match=r"wds\.trust\(pickle=True\)"):
            next(iter(ds))
    wds.trust(pickle=True)
    with pytest.raises(SystemExit, match="ran"):
        next(iter(wds.WebDataset(pickled).decode()))


def test_pth_fields_hold_tensors_only_unless_pickle_is_trusted(tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "p.tar")) as sink:
        sink.write({"__key__": "a", "pth": Malicious()})
    with pytest.raises(wds.DecodingError, match=r"more than tensors and plain values, .* wds\.trust\(pickle=True\)"):
        next(iter(wds.WebDataset(str(tmp_path / "p.tar")).decode()))
    wds.trust(pickle=True)
    with pytest.raises(SystemExit, match="ran"):
        next(iter(wds.WebDataset(str(tmp_path / "p.tar")).decode()))


def test_commands_and_rewriting_are_refused_and_the_switch_is_named(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"pipe:cat {shards}/shard-000000.tar"
    with pytest.raises(ValueError, match=r"wds\.trust\(pipe=True\)"):
        list(wds.WebDataset(url))
    with pytest.raises(ValueError, match=r"wds\.trust\(pipe=True\)"):
        wds.TarWriter("pipe:cat > /dev/null")
    monkeypatch.setenv("GOPEN_REWRITE", "http=file")
    with pytest.raises(ValueError, match=r"wds\.trust\(pipe=True\)"):
        wds.gopen("http://x/y")
    wds.trust(pipe=True)
    monkeypatch.delenv("GOPEN_REWRITE")
    assert len(list(wds.WebDataset(url))) == 6
    wds.trust(pipe=False)
    with pytest.raises(ValueError, match="refused"):
        list(wds.WebDataset(url))


def test_webdatasets_own_switch_works_in_both_directions(pickled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_SECURE", "0")
    assert wds.gopen("pipe:echo a").read() == b"a\n"
    monkeypatch.setattr(wds.utils, "enforce_security", True)
    with pytest.raises(ValueError, match="cannot open pipe URLs"):
        wds.gopen("pipe:echo a")


def test_a_failing_command_is_an_error() -> None:
    wds.trust(pipe=True)
    with pytest.raises(OSError, match="exit 3"):
        list(wds.WebDataset("pipe:exit 3"))


@pytest.mark.parametrize("cut", ["in data", "between members", "header broken"])
def test_a_damaged_shard_is_an_error_and_with_a_handler_counted(cut: str, shards: Path, tmp_path: Path) -> None:
    data = bytearray((shards / "shard-000000.tar").read_bytes())
    with tarfile.open(shards / "shard-000000.tar") as tar:
        member = next(m for m in tar if m.name == "s/0003.cls")
    if cut == "header broken":
        data[member.offset : member.offset + 2000] = b"x" * 2000
    else:
        del data[member.offset_data + (1 if cut == "in data" else 512) :]
    (tmp_path / "bad.tar").write_bytes(data)
    urls = [str(tmp_path / "bad.tar"), str(shards / "shard-000001.tar")]
    for ds in (wds.WebDataset(urls), wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples())):
        with pytest.raises(tarfile.ReadError, match=r"bad\.tar"):
            list(ds)
    seen: list[Exception] = []

    def count(exn: Exception) -> bool:
        seen.append(exn)
        return True

    ds = wds.WebDataset(urls, handler=count)
    with pytest.warns(RuntimeWarning, match="1 damaged places in shards were skipped"):
        keys = [sample["__key__"] for sample in ds]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [sample["__key__"] for sample in ds] == keys, "what was reported once is not reported again"
    assert [type(exn).__name__ for exn in seen] == ["ShardError"] * 2
    assert seen[0].args[-1] == urls[0]
    whole = [f"s/{number:04d}" for number in (*range(3), *range(6, 12))]
    assert [key for key in keys if key in whole] == whole
    assert keys.count("s/0003") <= 1
    assert ("s/0005" in keys) == (cut == "header broken")


@pytest.mark.parametrize("known", [False, True])
def test_a_shard_that_is_cut_off_while_it_is_read_is_an_error(known: bool, tmp_path: Path) -> None:
    path = tmp_path / "cut.tar"
    with wds.TarWriter(str(path)) as sink:
        for number in range(300):
            sink.write({"__key__": f"{number}", "bin": bytes(5000)})
    assert not known or len(list(wds.WebDataset(str(path)))) == 300  # its members are in a table from now on
    samples = iter(wds.WebDataset(str(path)))
    next(samples)
    os.truncate(path, 1_000_000)
    with pytest.raises(wds.ShardError, match=r"the file was cut to 1,000,000 bytes while it was read .*cut\.tar"):
        list(samples)


def test_a_missing_shard_is_an_error_here_and_on_a_server(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(wds.WebDataset(str(tmp_path / "gone.tar")))
    with http_server(shards) as port:
        with pytest.raises(OSError, match=r"gone\.tar"):
            list(wds.WebDataset(f"http://127.0.0.1:{port}/gone.tar"))
        kept = wds.WebDataset(
            [f"http://127.0.0.1:{port}/gone.tar", f"http://127.0.0.1:{port}/shard-000000.tar"],
            handler=wds.ignore_and_continue,
        )
        assert len(list(kept)) == 6


def test_remote_shards_are_the_local_ones_with_and_without_a_cache(shards: Path, tmp_path: Path) -> None:
    names = [f"shard-{number:06d}.tar" for number in range(4)]

    def plain(ds: Any) -> list[Any]:
        return [{k: v for k, v in s.items() if k not in ("__url__", "__local_path__")} for s in ds]

    expected = plain(wds.WebDataset([str(shards / name) for name in names]))
    (shards / "page.html").write_text("not found")
    with http_server(shards) as port:
        urls = [f"http://127.0.0.1:{port}/{name}" for name in names]
        assert plain(wds.WebDataset(urls)) == expected
        assert plain(wds.WebDataset([f"http://127.0.0.1:{port}/packed.tgz"]))
        assert plain(wds.WebDataset(urls, cache_dir=str(tmp_path))) == expected
        assert wds.gopen(urls[0]).read() == (shards / names[0]).read_bytes()
        with pytest.raises(ValueError, match="not a tar archive"):
            list(wds.WebDataset([f"http://127.0.0.1:{port}/page.html"], cache_dir=str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert plain(wds.WebDataset(urls, cache_dir=str(tmp_path))) == expected


def test_shards_are_written_to_a_storage() -> None:
    with wds.ShardWriter("memory://wds/a-%d.tar", 2, verbose=0) as sink:
        for number in range(5):
            sink.write({"__key__": f"k{number}", "cls": number})
    urls = [f"memory://wds/a-{number}.tar" for number in range(3)]
    assert [s["cls"] for s in ps.read_tar(urls).decode()] == list(range(5))
    assert [s["cls"] for s in wds.WebDataset(urls).decode()] == list(range(5))


def test_images_beyond_the_limits_and_programs_in_images_are_refused(tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "a.tar"), encoder=False) as sink:
        sink.write({"__key__": "a", "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"})
    with warnings.catch_warnings(), pytest.raises(wds.DecodingError):
        next(iter(wds.WebDataset(str(tmp_path / "a.tar")).decode("pil")))
