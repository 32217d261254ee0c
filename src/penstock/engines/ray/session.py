"""The Ray that a process works with: the one it is connected to, a cluster to attach to, or one that is started."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from typing import Any

from penstock.errors import EngineError, MissingExtra

log = logging.getLogger("penstock")

STORE = 1_000_000_000  # bytes of shared memory for a Ray started here: blocks on their way, not datasets
_SHARE = 0.5  # of the shared memory that is free, at most
_lock = threading.Lock()
_LISTEN_S = 10.0  # for somebody who listens to answer
_connected: list[int] = []  # the process that was seen connected; a fork of it is not
_attached: list[str] = []  # the address by which it was: Ray knows its cluster by another name


def ensure(address: str | None = None) -> None:
    """Have this process connected to Ray; whoever calls it may use ``ray`` afterwards.

    A process that is connected (a script that called ``ray.init``, a worker of Ray Train) stays as it is. Otherwise it
    is attached to ``address`` (``"auto"``: any Ray on this machine; ``"host:6379"``; ``"ray://host:10001"``), or
    without one to the cluster of ``RAY_ADDRESS`` or of ``ray start``. Only if there is none, Ray is started on this
    machine, which one line of the log says; it ends with the process. Ray that was not started here is never ended.
    Safe to call from several threads, and again and again.

    Raises:
        MissingExtra: Ray is not installed.
        EngineError: the cluster cannot be reached, the process is connected to another one, or was forked from one
            that is.
    """
    ray = imported()
    with _lock:
        if _connected and _connected[0] != os.getpid():
            raise EngineError("a forked process cannot use its parent's connection to Ray; use on('local') in it")
        if ray.is_initialized():
            _check_address(ray, address)
        elif address is not None or _running():
            _attach(ray, address)
            _attached[:] = [address] if address is not None else []
        else:
            _start(ray)
            _attached.clear()
        _connected[:] = [os.getpid()]


def imported() -> Any:
    """The module ``ray``.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import ray
    except ImportError as exc:
        raise MissingExtra("the Ray engine", "ray") from exc
    return ray


def _check_address(ray: Any, address: str | None) -> None:
    """Refuse an address that is not the one this process is connected to, where that can be told."""
    if address in (None, "auto", "local", *_attached):
        return
    here = _attached[0] if _attached else ray.get_runtime_context().gcs_address
    if here != address and (_attached or not str(address).startswith("ray://")):
        raise EngineError(f"address={address!r}: this process is connected to the Ray at {here} already")


def _running() -> bool:
    """Whether Ray's own rules name a cluster."""
    if os.environ.get("RAY_ADDRESS"):
        return True
    from ray._private.utils import read_ray_address

    return read_ray_address() is not None


def _attach(ray: Any, address: str | None) -> None:
    if address in (None, "auto"):
        problem, advice = "no running Ray was found", "without address= one is started on this machine"
    else:
        _check_listens(str(address))
        problem = f"the Ray at {address!r} cannot be used"
        advice = "it may want its token (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN=...), or the Ray and Python that it has"
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as exc:
        raise EngineError(f"{problem}: {exc}; {advice}") from exc


def _check_listens(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself would try it for two minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return  # of another kind
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTEN_S).close()
    except OSError as exc:
        raise EngineError(f"there is no Ray at {address!r}: {exc}; without address= one is started here") from exc


def _start(ray: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=_store(),
        logging_level=logging.WARNING,
    )
    cores = ray.cluster_resources().get("CPU", 0)
    log.warning("no Ray is running: started one on this machine with %d cores, until this process ends", cores)


def _store() -> int:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else STORE
    return max(100_000_000, min(STORE, int(_SHARE * free)))
