"""Errors form one tree, can be pickled, and name the shard, key, stage or URL that they know."""

from __future__ import annotations

import pickle

import pytest

import penstock as ps
from penstock import errors
from penstock.errors import (
    DataError,
    EngineError,
    MissingExtra,
    PenstockError,
    PlanError,
    StageError,
    StateError,
    StorageError,
)

ALL_ERRORS = [
    PenstockError("broken"),
    PlanError("a bad argument"),
    StateError("another plan"),
    EngineError("closed"),
    DataError("bad header", "a.tar", "0001"),
    DataError("bad header"),
    StageError("KeyError: 'x'", "map(f)", "0001", "a.tar"),
    StageError("KeyError: 'x'"),
    StorageError("not found", "s3://b/a.tar"),
    StorageError("not found"),
    MissingExtra("decoding flac", "audio"),
]


@pytest.mark.parametrize("error", ALL_ERRORS, ids=repr)
def test_a_pickled_error_keeps_its_type_attributes_and_text(error: PenstockError) -> None:
    unpickled = pickle.loads(pickle.dumps(error))
    assert type(unpickled) is type(error)
    assert (unpickled.args, unpickled.__dict__, str(unpickled)) == (error.args, error.__dict__, str(error))


@pytest.mark.parametrize(
    ("error_type", "builtin"),
    [
        (PlanError, ValueError),
        (DataError, ValueError),
        (StageError, RuntimeError),
        (StorageError, OSError),
        (StateError, ValueError),
        (MissingExtra, ImportError),
        (EngineError, RuntimeError),
    ],
)
def test_every_error_is_a_penstock_error_and_the_builtin_a_caller_expects(
    error_type: type[PenstockError], builtin: type[Exception]
) -> None:
    assert issubclass(error_type, PenstockError)
    assert issubclass(error_type, builtin)


def test_every_error_of_the_module_is_tested_here() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert {type(error) for error in ALL_ERRORS} == defined


def test_the_text_names_what_the_error_knows() -> None:
    assert str(DataError("bad header", "a.tar", "0001")) == "bad header (shard: a.tar, key: 0001)"
    assert str(DataError("bad header", key="0001")) == "bad header (key: 0001)"
    assert str(DataError("bad header")) == "bad header"
    error = StageError("KeyError: 'x'", "map(f)", "0001", "a.tar")
    assert str(error) == "KeyError: 'x' (stage: map(f), shard: a.tar, key: 0001)"
    assert str(StorageError("not found", "a.tar")) == "not found (url: a.tar)"


def test_a_missing_extra_names_the_pip_command() -> None:
    assert "pip install 'penstock[audio]'" in str(MissingExtra("decoding flac", "audio"))


def test_the_facts_of_an_error_are_attributes() -> None:
    data = DataError("p", "s", "k")
    assert (data.problem, data.shard, data.key) == ("p", "s", "k")
    stage = StageError("p", "map(f)", "k", "s")
    assert (stage.problem, stage.stage, stage.key, stage.shard) == ("p", "map(f)", "k", "s")
    assert StorageError("p", "u").url == "u"
    assert (MissingExtra("f", "e").feature, MissingExtra("f", "e").extra) == ("f", "e")


def test_control_characters_of_a_key_do_not_reach_the_terminal() -> None:
    text = str(DataError("bad", "a\x9b.tar", "\x1b[2Jk\u202e"))
    assert text == r"bad (shard: a\x9b.tar, key: \x1b[2Jk\u202e)"
    assert str(DataError("one\ntwo: é 日本")) == "one\ntwo: é 日本"


def test_an_exception_without_a_text_has_a_message() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    def fails(sample: object) -> object:
        raise BrokenError

    with pytest.raises(StageError, match="BrokenError"):
        list(ps.from_items([1]).map(fails))
    assert list(ps.from_items([1]).map(fails).on_error("skip")) == []
