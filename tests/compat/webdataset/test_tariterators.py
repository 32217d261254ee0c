"""The one loop that reads and groups members yields what the two stages of WebDataset yield, one after the other."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.compat.webdataset import filters, tariterators
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


def grouped(names: list[str], fused: bool) -> list[Any]:
    sources = [{"url": "u", "stream": io.BytesIO(archive(names))}]
    seen: list[str] = []

    def handler(exn: Exception) -> bool:
        seen.append(str(exn.args[0]))
        return True

    if fused:
        samples = tariterators.grouped_samples(sources, handler, None, None, handler)
    else:
        samples = tariterators.group_by_keys(tariterators.tar_file_expander(sources, handler), handler=handler)
    return [*samples, len(seen)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(KEYS, RUNS, st.integers(1, 40)), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_one_loop_groups_any_names_as_two_stages_do(runs: list[Any], rng: random.Random) -> None:
    names = []
    for key, fields, count in runs:
        for number in range(count):
            name = f"{key}{number}" if rng.random() < 0.9 else key
            names += [f"{name}.{field}" if field else name for field in fields]
    assert grouped(names, fused=True) == grouped(names, fused=False)


@pytest.mark.parametrize(
    "unusual", ["e.f{}.jpg", "__{}__/k.jpg", "d{}/.jpg", "same.jpg", "k{}.JPG", "{}.__bad__", ".jpg"]
)
def test_unusual_names_after_plain_ones_are_grouped_alike(unusual: str) -> None:
    for plain in range(12, 20):  # headers are read 16 at a time at first: one of these ends with a plain sample
        names = [f"k{number:03d}.jpg" for number in range(plain)] + [unusual.format(number) for number in range(50)]
        assert grouped(names, fused=True) == grouped(names, fused=False)


def test_fields_that_a_consumer_adds_do_not_reach_the_next_sample() -> None:
    names = [f"k{number:03d}.{field}" for number in range(50) for field in ("cls", "jpg")]
    seen = []
    for sample in tariterators.grouped_samples([{"url": "u", "stream": io.BytesIO(archive(names))}]):
        seen.append(sorted(sample))
        sample["added"] = sample.pop("cls")
    assert seen == [["__key__", "__url__", "cls", "jpg"]] * 50


def test_a_replaced_stage_is_not_fused() -> None:
    expander, grouper, other = (
        filters.pipelinefilter(f)() for f in (tariterators.tar_file_expander, tariterators.group_by_keys, list)
    )
    assert tariterators.fused(expander, grouper) is not None
    assert tariterators.fused(expander, other) is None
