"""The options of an engine are checked where they are written."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engines import ENGINES, engine_options
from penstock.engines.options import OPTIONS
from penstock.errors import PlanError


def test_every_engine_has_its_options() -> None:
    assert OPTIONS.keys() == ENGINES.keys()


def test_options_are_sorted_so_that_equal_choices_are_equal() -> None:
    first = engine_options("local", {"ordered": False, "cpus": 2})
    second = engine_options("local", {"cpus": 2, "ordered": False})
    assert first == second
    assert (first.name, first.get("cpus"), first.get("ordered")) == ("local", 2, False)


def test_devices_become_a_tuple() -> None:
    assert engine_options("local", {"devices": ["cuda:0", "cuda:1"]}).get("devices") == ("cuda:0", "cuda:1")
    assert engine_options("local", {"devices": None}).get("devices") is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("spark", {}, r"engine='spark': .*'local', 'ray', 'serial'"),
        ("serial", {"cpus": 2}, r"the serial engine has no option cpus; it has: monitor, observer, report"),
        ("ray", {"devices": []}, r"the ray engine has no option devices"),
        ("local", {"cpus": 0}, r"cpus=0"),
        ("local", {"memory": "much"}, r"memory='much'"),
        ("ray", {"address": 10001}, r"address=10001: expected an address such as 'auto'"),
        ("local", {"ordered": "no"}, r"ordered='no': expected True or False"),
        ("local", {"report": 1}, r"report=1: expected True or False"),
        ("local", {"observer": "print"}, r"observer needs a function"),
        ("local", {"devices": "cuda:0"}, r"devices='cuda:0': expected a list such as \['cuda:0', 'cuda:1'\]"),
        ("local", {"monitor": ""}, r"monitor='': expected a local folder"),
        ("local", {"monitor": "s3://b/x"}, r"monitor='s3://b/x': expected a local folder"),
        ("local", {"devices": 2}, r"devices=2: expected a list"),
    ],
)
def test_an_invalid_option_is_an_error_that_names_it(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        engine_options(name, options)
