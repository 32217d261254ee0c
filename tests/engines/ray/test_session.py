"""Which Ray a process works with."""

from __future__ import annotations

import multiprocessing
import sys

import pytest

from penstock.engines.ray.session import ensure, imported
from penstock.errors import EngineError, MissingExtra

pytestmark = pytest.mark.xdist_group("ray")


def test_without_ray_installed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"penstock\[ray\]"):
        imported()


@pytest.mark.usefixtures("one_ray")
def test_a_process_that_is_connected_stays_as_it_is() -> None:
    import ray

    before = ray.get_runtime_context().gcs_address
    for address in (None, "auto", before):
        ensure(address)
    assert ray.get_runtime_context().gcs_address == before


@pytest.mark.usefixtures("one_ray")
def test_another_cluster_is_refused() -> None:
    with pytest.raises(EngineError, match="is connected to the Ray at"):
        ensure("203.0.113.7:6379")


@pytest.mark.usefixtures("one_ray")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_is_told_that_it_cannot_use_its_parents_connection() -> None:
    ensure()
    context = multiprocessing.get_context("fork")
    said: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_said, args=(said,))
    child.start()
    answer = said.get()
    child.join(10)
    assert "forked process" in answer


def _said(said: multiprocessing.SimpleQueue[str]) -> None:
    try:
        ensure()
    except EngineError as exc:
        said.put(str(exc))
    else:
        said.put("no error")
