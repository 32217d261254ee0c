"""A selection chooses samples by condition, shuffle and slice, and gives them keys and fields."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from random import Random

import pytest

from penstock.errors import DataError, PlanError
from penstock.formats.tar.archive import EncodedSamples
from penstock.plan.expression_text import TextExpression
from penstock.tarstream.gather import gather_runs, gather_samples
from penstock.tarstream.raw import RawSample
from penstock.tarstream.select import KeyTemplate, Selection, shuffle_buffered

MakeArchive = Callable[..., str]
KEYS = [f"k{n:03}" for n in range(200)]


@pytest.fixture
def path(make_archive: MakeArchive) -> str:
    return make_archive("in.tar", KEYS, tarfile.GNU_FORMAT)


def keys(encoded: Iterator[EncodedSamples]) -> list[str]:
    return [key for samples in encoded for key in samples.keys]


def test_a_slice_of_runs_is_that_slice(path: str) -> None:
    random = Random(5)
    for _ in range(30):
        start, stop = random.randrange(220), random.choice([None, random.randrange(220)])
        selection = Selection(start=start, stop=stop)
        assert selection.copies_runs
        assert keys(selection.encode_runs(gather_runs([path], mapped=True))) == KEYS[start:stop]


@pytest.mark.parametrize("mapped", [False, True])
def test_similar_samples_are_copied_in_few_pieces(mapped: bool, make_archive: MakeArchive) -> None:
    written = [f"k{n:04}" for n in range(2000)]
    path = make_archive("many.tar", written, tarfile.GNU_FORMAT, size=30)
    encoded = list(Selection().encode_runs(gather_runs([path], mapped=mapped)))
    assert keys(iter(encoded)) == written
    assert len(encoded) < 100


@pytest.mark.parametrize(
    "selection",
    [
        Selection(where=TextExpression("cls == 3")),
        Selection(shuffle=5),
        Selection(step=2),
        Selection(fields=frozenset({"cls"})),
        Selection(drop=frozenset({"cls"})),
        Selection(rename=KeyTemplate("{number}")),
    ],
    ids=["where", "shuffle", "step", "fields", "drop", "rename"],
)
def test_a_selection_that_changes_samples_or_their_order_does_not_copy_runs(selection: Selection) -> None:
    assert not selection.copies_runs


def test_the_condition_is_applied_before_the_slice(path: str) -> None:
    selection = Selection(where=TextExpression("cls >= 10"), start=1, stop=6, step=2)
    assert [raw.key for raw in selection.samples(gather_samples([path]))] == [KEYS[11], KEYS[13], KEYS[15]]


def test_no_more_is_read_than_the_slice_needs(path: str) -> None:
    def stream() -> Iterator[RawSample]:
        for raw in gather_samples([path]):
            assert raw.key < "k003"
            yield raw

    assert keys(Selection(stop=3).encode(stream())) == KEYS[:3]


def test_a_shuffle_buffer_yields_every_sample_once_in_an_order_of_the_seed(path: str) -> None:
    orders = [[raw.key for raw in shuffle_buffered(gather_samples([path]), 20, Random(seed))] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == KEYS != orders[0]


def test_samples_without_a_field_to_keep_are_omitted(path: str) -> None:
    (first, *_) = Selection(drop=frozenset({"cls"})).encode(gather_samples([path]))
    assert first.field_names == ("jpg",)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(fields=frozenset({"clss"})),
        Selection(where=TextExpression("clss == 3 or size('jpg') > 10")),
        Selection(where=TextExpression("_['clss'] == 3")),
        Selection(where=TextExpression("lower(str(clss)) == key")),
        Selection(named=(("png", "clss"),)),
    ],
)
def test_a_field_that_no_sample_has_is_an_error_with_the_fields_there_are(selection: Selection, path: str) -> None:
    with pytest.raises(DataError, match=r"no field .*'clss'; the fields are cls, jpg: did you mean cls\?"):
        list(selection.encode(gather_samples([path])))


@pytest.mark.parametrize(
    "selection",
    [
        Selection(where=TextExpression("has('json') or cls == 3 or shard == key")),
        Selection(named=(("png", "jpg"), ("__key__",))),
        Selection(stop=2, fields=frozenset({"cls"})),
    ],
)
def test_a_field_that_may_be_missing_is_no_error(selection: Selection, path: str) -> None:
    list(selection.encode(gather_samples([path])))


def test_keys_come_from_a_template(make_archive: MakeArchive) -> None:
    (raw,) = gather_samples([make_archive("in.tar", ["folder/name"])])
    template = KeyTemplate("{shard}/{folder}/{number:03d}-{name}-{key}")
    assert template.key(raw, 7) == "in/folder/007-name-folder/name"
    with pytest.raises(DataError, match=r"the key is empty: ''.*key: folder/name"):
        KeyTemplate("").key(raw, 0)


@pytest.mark.parametrize("template", ["{keys}", "{number:q}", "{}"])
def test_an_invalid_template_is_a_plan_error(template: str) -> None:
    with pytest.raises(PlanError, match=r"use key, name|Unknown format code"):
        KeyTemplate(template)
