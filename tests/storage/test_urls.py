from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError, StorageError
from penstock.formats.files import find_files
from penstock.storage import Listed, Memory, expand, expand_braces, local_path, relative_names, url_patterns, urls
from penstock.testing.storages import write

PATTERNS = [
    "train-{0000..0003}.tar", "a{01..3}b", "{3..01}", "{-05..5}", "{0..10..5}", "{10..0..3}", "{0..10..-5}",
    "{0..10..0}", "{000..9..3}", "{-9..-11}", "{0..-03}", "{5..-5..5}", "{1..1}", "{-1..01}", "{a,b}", "{a,b{1,2}}",
    "{{a,b},c}", "{{1..3},x}", "{1..2}{a,b}", "x{a}y", "x{}y", "a{b", "a}b", "{a{1,2}}", "a{b{1,2}", "{a,b}}",
    "{1..3}{", "}{1..3}", "{1..2,3}", "{1..}", "{1..a}", "{a..e}", "{e..a..2}", "{A..C}", "{{a}}", "{a,{b}}", "plain",
]  # fmt: skip


def _bash(pattern: str) -> list[str]:
    script = f"printf '%s\\n' {pattern}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()


def test_braces_expand_as_in_bash() -> None:
    # One shell for all patterns, separated by a word that none of them contains.
    output = _bash(" == ".join(PATTERNS))
    want = " ".join(output).split(" == ")
    assert {p: " ".join(expand_braces(p)) for p in PATTERNS} == dict(zip(PATTERNS, want, strict=True))


def test_random_patterns_expand_as_in_bash() -> None:
    words = st.lists(st.sampled_from(["{", "}", ",", "a", "b", "{1..3}", "{x,y}", "{09..11}"]), min_size=1, max_size=7)
    patterns: list[str] = []

    @given(words)
    def collect(parts: list[str]) -> None:
        # "{}" and empty words depend on how the shell quotes, and mean nothing in names.
        pattern = "w" + "".join(parts)
        if "{}" not in pattern:
            patterns.append(pattern)

    collect()
    want = " ".join(_bash(" == ".join(patterns))).split(" == ")
    assert [" ".join(expand_braces(p)) for p in patterns] == want


def test_a_pattern_that_expands_to_too_many_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_MAX_NAMES", 1000)
    assert len(list(expand_braces("{0..999}"))) == 1000
    with pytest.raises(PlanError, match="more than 1,000 names"):
        list(expand_braces("{0..999}{0..9}"))


@pytest.mark.parametrize(
    ("urls", "patterns"),
    [
        ("a.tar", ("a.tar",)),
        ("a.tar::b.tar", ("a.tar", "b.tar")),
        (["a.tar", "b.tar::c.tar"], ("a.tar", "b.tar", "c.tar")),
        (Path("x/a.tar"), ("x/a.tar",)),
        ([Path("a.tar"), "b.tar"], ("a.tar", "b.tar")),
        ("-", ("-",)),
    ],
)
def test_paths_lists_and_double_colons_are_split_into_patterns(
    urls: str | Path | list[str | Path], patterns: tuple[str, ...]
) -> None:
    assert url_patterns(urls) == patterns


@pytest.mark.parametrize("value", ["", [], "::", 3, b"a.tar", None, [3]])
def test_values_that_are_not_paths_or_urls_are_refused(value: object) -> None:
    with pytest.raises(PlanError):
        url_patterns(value)  # type: ignore[arg-type]


def test_the_order_of_a_set_is_the_same_in_every_process() -> None:
    names = [f"s3://b/{number}.tar" for number in range(9)]
    assert url_patterns({*reversed(names)}) == url_patterns(frozenset(names)) == tuple(names)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("a.tar", "a.tar"),
        ("/d/a.tar", "/d/a.tar"),
        ("file:/d/a.tar", "/d/a.tar"),
        ("file:///d/a.tar", "/d/a.tar"),
        ("file://localhost/d/a.tar", "/d/a.tar"),
        ("file:a.tar", "a.tar"),
    ],
)
def test_file_urls_are_local_paths(url: str, path: str) -> None:
    assert local_path(url) == path


def test_a_url_that_is_not_local_is_refused() -> None:
    with pytest.raises(StorageError, match="nfs9") as caught:
        local_path("nfs9://bucket/a.tar")
    assert caught.value.url == "nfs9://bucket/a.tar"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.tar", "a.tar", "a.tar.json", ".hidden.tar", "c.tgz"):
        (tmp_path / name).touch()
    (tmp_path / "sub.tar").mkdir()
    return tmp_path


def test_the_files_of_a_folder_are_sorted_by_name(folder: Path) -> None:
    found = expand([str(folder)], (".tar", ".tgz"))
    assert [os.path.basename(path) for path in found] == ["a.tar", "b.tar", "c.tgz"]


def test_the_files_of_a_glob_are_sorted_by_name(folder: Path) -> None:
    assert expand([f"{folder}/*.tar"], (".tar",)) == [f"{folder}/a.tar", f"{folder}/b.tar"]


def test_numbers_in_names_are_compared_as_numbers(tmp_path: Path) -> None:
    names = ["0-of-2-1.tar", "0-of-2-2.tar", "0-of-2-10.tar", "1-of-2-0.tar", "1-of-2-00.tar", "x\u0662.tar"]
    for name in names:
        (tmp_path / name).touch()
        write(Memory(), f"memory://natural/{name}", b"x")
    for folder in (str(tmp_path), "memory://natural"):
        for pattern in (folder, f"{folder}/*.tar"):
            assert [url.rpartition("/")[2] for url in expand([pattern], (".tar",))] == names


def test_patterns_keep_their_order(folder: Path) -> None:
    assert expand([f"{folder}/b.tar", f"{folder}/a.tar"], ()) == [f"{folder}/b.tar", f"{folder}/a.tar"]


def test_names_without_a_glob_are_not_looked_up() -> None:
    assert expand(["nowhere/x-{0..1}.tar"], ()) == ["nowhere/x-0.tar", "nowhere/x-1.tar"]


@dataclass(frozen=True)
class Listings(Memory):
    """Memory that logs which folders are listed, and cannot list those named ``hidden``."""

    def list(self, prefix: str) -> Iterator[Listed]:
        LISTED.append(prefix)
        if "hidden" in prefix:
            raise NotImplementedError
        return super().list(prefix)


LISTED: list[str] = []


def test_a_remote_folder_may_have_the_name_of_a_file() -> None:
    storage = Listings()
    for name in ("t.csv/a.csv", "t.csv/b.csv", "both.csv", "both.csv/a.csv", "hidden.csv"):
        write(storage, f"memory://folders/{name}", b"x")
    inside = ["memory://folders/t.csv/a.csv", "memory://folders/t.csv/b.csv"]
    assert expand(["memory://folders/t.csv"], (".csv",), storage) == inside
    assert find_files(("memory://folders/t.csv",), (".csv",), storage) == inside
    for name in ("both.csv", "hidden.csv", "none.csv"):
        url = f"memory://folders/{name}"
        assert expand([url], (".csv",), storage) == find_files((url,), (".csv",), storage) == [url]
    LISTED.clear()  # names that are given together are not looked up one by one
    names = ["memory://folders/t.csv", "memory://folders/both.csv"]
    assert expand(names, (".csv",), storage) == find_files(tuple(names), (".csv",), storage) == names
    assert not LISTED


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path: Path) -> None:
    (tmp_path / "a[1].tar").touch()
    write(Memory(), "memory://globs/a[1].tar", b"x")
    for name in (f"{tmp_path}/a[1].tar", "memory://globs/a[1].tar"):
        assert expand([name], ()) == [name]


@pytest.mark.parametrize("pattern", ["*.parquet", ""])
def test_a_glob_or_folder_without_matching_files_is_an_error(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(StorageError, match="matches no files"):
        expand([f"{tmp_path}/{pattern}"], (".tar",))


def test_names_are_relative_to_the_common_root() -> None:
    assert relative_names(["/d/a.tar", "/d/b.tar"]) == ["a.tar", "b.tar"]
    assert relative_names(["/d/x/a.tar", "/d/y/a.tar"]) == ["x/a.tar", "y/a.tar"]
    assert relative_names(["/d/a.tar"]) == ["a.tar"]


def test_repeated_names_get_a_number() -> None:
    assert relative_names(["/d/a.tar", "/d/a.tar", "/d/a.tar"]) == ["a.tar", "a.tar#2", "a.tar#3"]


def test_names_of_urls_have_no_host_user_or_query() -> None:
    signed = [f"https://me:word@cdn{n}.org:8080/d/{name}.tar?X-Amz-Signature={n}/x" for n, name in enumerate("ab")]
    assert relative_names(signed) == ["a.tar", "b.tar"]
    assert relative_names(["http://h/d/x/a.tar?s=1", "http://h/d/y/a.tar?s=2"]) == ["x/a.tar", "y/a.tar"]
    assert relative_names(["s3://bucket/d/a?.tar", "s3://bucket/d/b#.tar"]) == ["a?.tar", "b#.tar"]  # parts of the key


def test_names_that_only_the_host_tells_apart_have_the_host() -> None:
    assert relative_names(["http://one/a.tar", "http://me:word@two/a.tar"]) == ["one/a.tar", "two/a.tar"]


def test_names_that_only_the_query_tells_apart_have_a_hash_of_it_that_outlives_a_signature() -> None:
    monday, tuesday = (
        relative_names([f"http://h/get?file={name}&token=secret{day}" for name in "ab"]) for day in ("1", "2")
    )
    assert monday == tuesday
    assert len(set(monday)) == 2
    assert not any("file" in name or "secret" in name for name in monday)


def test_a_pattern_that_expands_to_too_many_names_is_shown_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_MAX_NAMES", 1000)
    with pytest.raises(PlanError) as caught:
        list(expand_braces("https://me:word@host/{0..2000}.tar?sig=secret"))
    assert "word" not in str(caught.value)
    assert "secret" not in str(caught.value)
