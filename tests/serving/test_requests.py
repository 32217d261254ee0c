from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import DataError, EngineError, PenstockError, PlanError, StateError, StorageError
from penstock.plan import Cut
from penstock.serving.requests import (
    MAX_REQUEST_BYTES,
    BadRequest,
    BatchRequest,
    cut_json,
    error_from_json,
    error_json,
    get_pieces,
    parse_request,
)
from penstock.testing import numbers


def test_a_request_is_what_was_asked() -> None:
    state = numbers((9,)).loader(1, 3).state_dict()
    for request in (
        BatchRequest(Cut(1, 3, "step", "pad"), state, None, (1, 2), True),
        BatchRequest(Cut(0, 1), None, (4, [0, 3, 1, 0]), (0, 1), False),
    ):
        assert BatchRequest.from_json(parse_request(json.dumps(request.to_json()).encode())) == request


@pytest.mark.parametrize("data", [b"", b"x", b"[]", b"{}", b'{"v": 9}', b" " * (MAX_REQUEST_BYTES + 1), b"[" * 99_999])
def test_a_malformed_request_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_request(data)


@pytest.mark.parametrize(
    "change",
    [
        {"cut": None},
        {"cut": {**cut_json(Cut(0, 1)), "rank": 1}},
        {"cut": {**cut_json(Cut(0, 1)), "kind": "x"}},
        {"part": [1, 1]},
        {"part": [0, 1 << 40]},
        {"part": "x"},
        {"state": None},
        {"repeated": [[0, 1, 1, 0]]},
        {"state": None, "repeated": [[0, 1, 0, 0]], "epoch": 0},
        {"state": None, "repeated": [[0, 1, 1, 0]], "epoch": -1},
        {"state": {"v": 1}},
    ],
)
def test_impossible_entries_are_refused(change: dict[str, Any]) -> None:
    good = BatchRequest(Cut(0, 1), numbers((9,)).loader().state_dict(), None, (0, 1), False).to_json()
    with pytest.raises((BadRequest, StateError)):
        BatchRequest.from_json({**good, **change})


def test_questions_about_many_positions_are_refused() -> None:
    with pytest.raises(BadRequest, match="positions"):
        get_pieces({"pieces": [[0, 1 << 40, 1, 0]]}, "pieces")


@pytest.mark.parametrize(
    "error", [DataError("bad", "shard", "key"), PlanError("x"), StorageError("y", "url"), EngineError("z")]
)
def test_errors_arrive_as_they_were(error: PenstockError) -> None:
    got = error_from_json(json.loads(json.dumps(error_json(error))))
    assert (type(got), got.args) == (type(error), error.args)


@pytest.mark.parametrize("described", [None, ["os", "system"], ["DataError", {}], ["PlanError"] * 9, 7])
def test_an_error_that_is_not_one_of_ours_is_an_engine_error(described: Any) -> None:
    assert isinstance(error_from_json(described), PenstockError)
    assert error_json(ValueError("v")) == ["EngineError", "ValueError: v"]
