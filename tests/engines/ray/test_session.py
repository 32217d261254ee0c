"""Which Ray a process connects to."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from penstock.engines.ray import session
from penstock.engines.ray.session import connect_ray, import_ray, kill_actor
from penstock.errors import EngineError, MissingExtra

FULL = os.environ.get("PENSTOCK_FULL") == "1"

pytestmark = pytest.mark.xdist_group("ray")


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"penstock\[ray\]"):
        import_ray()


@pytest.mark.usefixtures("shared_ray")
def test_a_connected_process_stays_connected() -> None:
    import ray

    before = ray.get_runtime_context().gcs_address
    for address in (None, "auto", before):
        connect_ray(address)
    assert ray.get_runtime_context().gcs_address == before


@pytest.mark.usefixtures("shared_ray")
def test_an_address_of_another_cluster_is_refused() -> None:
    with pytest.raises(EngineError, match="is already connected to the Ray at"):
        connect_ray("203.0.113.7:6379")


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_cannot_use_its_parents_connection() -> None:
    connect_ray()
    context = multiprocessing.get_context("fork")
    messages: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_report_error, args=(messages,))
    child.start()
    message = messages.get()
    child.join(120)
    assert "forked process" in message


def _report_error(messages: multiprocessing.SimpleQueue[str]) -> None:
    try:
        connect_ray()
    except EngineError as exc:
        messages.put(str(exc))
    else:
        messages.put("no error")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_nothing_listens_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "import_ray", lambda: SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(EngineError, match=f"there is no Ray at '{address}': .*refused"):
        connect_ray(address)


def test_a_cluster_that_refuses_the_connection_is_not_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Failed to connect")

    monkeypatch.setattr(session, "import_ray", lambda: SimpleNamespace(is_initialized=lambda: False, init=init))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"the Ray at '{address}' cannot be used: .*RAY_AUTH_MODE=token"):
            connect_ray(address)


def test_an_address_may_be_repeated_although_ray_reports_another(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[bool] = []
    context = SimpleNamespace(gcs_address="192.0.2.1:6379")
    ray = SimpleNamespace(
        is_initialized=lambda: bool(connected),
        init=lambda **_: connected.append(True),
        get_runtime_context=lambda: context,
    )
    for name in ("_connected", "_attached"):
        monkeypatch.setattr(session, name, [])
    monkeypatch.setattr(session, "import_ray", lambda: ray)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        connect_ray(address)
        connect_ray(address)
        for other in ("127.0.0.1:6379", "ray://127.0.0.1:10001"):
            with pytest.raises(EngineError, match=f"is already connected to the Ray at {address}"):
                connect_ray(other)
    assert connected == [True]


def test_an_actor_is_killed_only_while_ray_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []  # by the real Ray, a call after its shutdown starts it again
    for runs in (True, False):
        ray = SimpleNamespace(is_initialized=lambda runs=runs: runs, kill=killed.append)
        monkeypatch.setattr(session, "import_ray", lambda ray=ray: ray)
        kill_actor(f"{runs}")
    assert killed == ["True"]


SHUT_DOWN_FIRST = """
import ray
import penstock as ps

ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
run = iter(ps.from_items(range(100)).map(lambda x: x, workers=1).on("ray"))
assert next(run) == 0
ray.shutdown()
run.close()
assert not ray.is_initialized()
"""

if FULL:  # it starts a Ray of its own

    def test_a_run_that_is_closed_after_ray_does_not_start_it_again(warm_python: str) -> None:
        done = subprocess.run([warm_python, "-c", SHUT_DOWN_FIRST], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
