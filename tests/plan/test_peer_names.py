from __future__ import annotations

import re
from importlib import import_module

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.plan.peer_names import FUNCTIONS, METHODS, check_arguments, unknown_argument

CALL = re.compile(r"(?<![\w.])(?:ps\.(\w+)|(?:ds\.)?(\w+)\()")
NOT_OURS = {"fn", "list", "range", "len"}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_a_peer_is_not_ours_and_is_answered_by_one_that_is(name: str) -> None:
    assert not hasattr(ps.Dataset, name)
    ds = ps.from_items([{"a": 1}])
    with pytest.raises(AttributeError, match=re.escape(f"a Dataset has no {name!r}; ")) as caught:
        getattr(ds, name)
    assert METHODS[name] in str(caught.value)
    _check_names(METHODS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_peer_is_not_ours_and_is_answered_by_one_that_is(name: str) -> None:
    assert name not in dir(ps)
    with pytest.raises(AttributeError, match=re.escape(f"module 'penstock' has no attribute {name!r}; write ")):
        getattr(ps, name)
    _check_names(FUNCTIONS[name])


def _check_names(advice: str) -> None:
    """Check that every name of ours in an advice exists."""
    for function, method in CALL.findall(advice):
        if function:
            assert hasattr(ps, function), advice
        elif method not in NOT_OURS:
            assert hasattr(ps.Dataset, method) or method in ("state_dict", "load_state_dict", "sum"), advice
    if advice.startswith("penstock.compat"):
        import_module(advice.partition(",")[0])


def test_a_typing_error_gets_the_nearest_name() -> None:
    with pytest.raises(AttributeError, match=r"a Dataset has no 'shufle'; did you mean shuffle\?"):
        _ = ps.from_items([1]).shufle  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no attribute 'raed_tar'; did you mean read_tar\?$"):
        _ = ps.raed_tar  # type: ignore[attr-defined]


def test_a_private_name_has_no_advice() -> None:
    with pytest.raises(AttributeError, match=r"^a Dataset has no '_take'$"):
        _ = ps.from_items([1])._take  # type: ignore[attr-defined]


def test_an_argument_of_a_peer_is_answered() -> None:
    with pytest.raises(PlanError, match="shuffle has no argument buffer_size; it takes window; write window=n, or all"):
        check_arguments("shuffle", {"buffer_size": 100}, ["window"])
    assert str(unknown_argument("map", "nmu_cpus", ["workers"], ["num_cpus"])).endswith("; did you mean num_cpus?")
    check_arguments("shuffle", {}, ["window"])
