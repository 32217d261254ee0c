"""Members are read and grouped as WebDataset reads and groups them, whatever their names."""

from __future__ import annotations

import gzip
import io
import random
from typing import Any

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.compat.webdataset import tariterators
from penstock.formats.tar.archive import END_MARKER, ZEROS, member_header

KEYS = st.sampled_from(["a", "b", "d/c", "./a", "d.v/x", "__m__/k", "__n", "d/", "e.f", "long" * 30])
FIELDS = st.sampled_from(["jpg", "JPG", "cls", "seg.jpg", "", "__bad__", "json"])
RUNS = st.lists(FIELDS, min_size=1, max_size=3, unique=True)


def archive(names: list[str]) -> bytes:
    parts = []
    for number, name in enumerate(names):
        data = b"%d" % number * (number % 7)
        parts += [member_header(name.encode(), len(data)), data, ZEROS[: -len(data) % 512]]
    return b"".join([*parts, END_MARKER])


def grouped(library: Any, names: list[str], apart: bool = False) -> list[Any]:
    """Return the samples and the errors of an archive; ``apart``: its members are read before they are grouped."""
    seen: list[str] = []

    def handler(exn: Exception) -> bool:
        seen.append(type(exn).__name__)
        return True

    members = library.tar_file_expander([{"url": "u", "stream": io.BytesIO(archive(names))}], handler)
    return [*library.group_by_keys(list(members) if apart else members, handler=handler), seen]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(KEYS, RUNS, st.integers(1, 40)), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_names_are_grouped_as_by_webdataset(runs: list[Any], rng: random.Random) -> None:
    names = []
    for key, fields, count in runs:
        for number in range(count):
            name = f"{key}{number}" if rng.random() < 0.9 else key
            names += [f"{name}.{field}" if field else name for field in fields]
    expected = grouped(webdataset.tariterators, names)
    assert grouped(tariterators, names) == grouped(tariterators, names, apart=True) == expected


@pytest.mark.parametrize(
    "unusual", ["e.f{}.jpg", "__{}__/k.jpg", "d{}/.jpg", "same.jpg", "k{}.JPG", "{}.__bad__", ".jpg"]
)
def test_unusual_names_after_plain_ones_are_grouped_as_by_webdataset(unusual: str) -> None:
    for plain in range(12, 20):  # headers are read 16 at a time at first: one of these ends with a plain sample
        names = [f"k{number:03d}.jpg" for number in range(plain)] + [unusual.format(number) for number in range(50)]
        assert grouped(tariterators, names) == grouped(webdataset.tariterators, names)


def test_a_sample_ends_with_its_shard_even_if_the_next_one_begins_with_its_key() -> None:
    def samples(library: Any) -> list[Any]:
        names = [["a.jpg", "a.cls"], ["a.json", "a.txt", ".b", "a.c/x", "a.CLS"]]
        shards = [{"url": str(number), "stream": io.BytesIO(archive(each))} for number, each in enumerate(names)]
        return list(library.group_by_keys(library.tar_file_expander(shards)))

    assert samples(tariterators) == samples(webdataset.tariterators)
    assert [sorted(sample)[2:] for sample in samples(tariterators)] == [["cls", "jpg"], ["cls", "json", "txt"]]


@pytest.mark.parametrize("eof_value", [{}, None])
def test_members_that_are_left_out_do_not_end_a_sample(eof_value: Any) -> None:
    def samples(library: Any) -> list[Any]:
        parts = []
        for name, size in [("a.cls", 1), ("a.mp4", 3 << 20), ("a.mp5", 3 << 20), ("a.txt", 5)]:
            parts += [member_header(name.encode(), size), bytes(size), ZEROS[: -size % 512]]
        source = [{"url": "u", "stream": io.BytesIO(gzip.compress(b"".join([*parts, END_MARKER]), 1))}]
        files = library.tar_file_expander(source, select_files=lambda name: ".mp" not in name, eof_value=eof_value)
        return [*library.group_by_keys(iter(files))]

    assert samples(tariterators) == samples(webdataset.tariterators)
