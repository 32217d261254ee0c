"""Connect a process to Ray: to the Ray it already uses, to a running cluster, or to one that is started for it."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from contextlib import suppress
from typing import Any

from penstock.errors import EngineError, import_extra

log = logging.getLogger("penstock")

STORE_BYTES = 1_000_000_000  # object store of a Ray that is started here: for blocks in transit, not for datasets
_MAX_STORE_SHARE = 0.5  # of the free shared memory
_lock = threading.Lock()
_CONNECT_TIMEOUT_S = 10.0
_connected: list[int] = []  # the process that was last seen connected; a fork of it is not
_attached: list[str] = []  # the address that it attached to: Ray knows the cluster by another name


def connect_ray(address: str | None = None) -> None:
    """Connect this process to Ray, so that the caller can use ``ray``.

    A process that is connected (a script that called ``ray.init``, a worker of Ray Train) stays as it is. Otherwise it
    attaches to ``address`` (``"auto"``: any Ray on this machine; ``"host:6379"``; ``"ray://host:10001"``) or, without
    an address, to the cluster of ``RAY_ADDRESS`` or of ``ray start``. If there is no cluster, Ray is started on this
    machine, with a line in the log, and ends with the process. A Ray that was not started here is never stopped.
    Thread-safe; a second call does nothing.

    Raises:
        MissingExtra: Ray is not installed.
        EngineError: The cluster cannot be reached, the process is connected to another cluster, or it was forked from
            a process that is connected.
    """
    ray = import_ray()
    with _lock:
        if _connected and _connected[0] != os.getpid():
            raise EngineError("a forked process cannot use its parent's connection to Ray; use on('local') in it")
        if ray.is_initialized():
            _check_address(ray, address)
        elif address is not None or _has_cluster():
            _attach(ray, address)
            _attached[:] = [address] if address is not None else []
        else:
            _start(ray)
            _attached.clear()
        _connected[:] = [os.getpid()]


def import_ray() -> Any:
    """Import ``ray`` and return it.

    Raises:
        MissingExtra: Ray is not installed.
    """
    return import_extra("ray", "the Ray engine", "ray")


def running_ray() -> Any:
    """Return ``ray`` for a call in the middle of a run: where Ray was shut down, the call would start it again.

    Raises:
        RaySystemError: Ray was shut down.
    """
    ray = import_ray()
    if not ray.is_initialized():
        raise ray.exceptions.RaySystemError("Ray was shut down")
    return ray


def call_actor(method: Any, *args: Any) -> Any:
    """Call a method of an actor in the middle of a run; return the reference of its result.

    Raises:
        RaySystemError: Ray was shut down.
    """
    running_ray()
    return method.remote(*args)


def kill_actor(actor: Any) -> None:
    """Kill an actor, unless it is gone, or Ray was shut down."""
    with suppress(Exception):
        running_ray().kill(actor)


def _check_address(ray: Any, address: str | None) -> None:
    """Reject an address that differs from the one this process is connected to, if they can be compared."""
    if address in (None, "auto", "local", *_attached):
        return
    current = _attached[0] if _attached else ray.get_runtime_context().gcs_address
    if current != address and (_attached or not str(address).startswith("ray://")):
        raise EngineError(
            f"address={address!r}: this process is already connected to the Ray at {current}; "
            "use that address, or call ray.shutdown() first"
        )


def _has_cluster() -> bool:
    """Return whether Ray would find a running cluster by itself."""
    if os.environ.get("RAY_ADDRESS"):
        return True
    from ray._private.utils import read_ray_address

    return read_ray_address() is not None


def _attach(ray: Any, address: str | None) -> None:
    if address in (None, "auto"):
        problem, advice = "no running Ray was found", "without address= Ray is started on this machine"
    else:
        _check_listens(str(address))
        problem = f"the Ray at {address!r} cannot be used"
        advice = "it may need a token (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN=...), or another version of Ray or Python"
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as exc:
        raise EngineError(f"{problem}: {exc}; {advice}") from exc


def _check_listens(address: str) -> None:
    """Reject an address where nothing listens: Ray itself would try to connect for two minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return  # an address of another kind, which only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as exc:
        raise EngineError(f"there is no Ray at {address!r}: {exc}; without address= Ray is started here") from exc


def _start(ray: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=_store_bytes(),
        logging_level=logging.WARNING,
    )
    cores = ray.cluster_resources().get("CPU", 0)
    log.warning("no Ray is running: started Ray on this machine with %d cores; it ends with this process", cores)


def _store_bytes() -> int:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else STORE_BYTES
    return max(100_000_000, min(STORE_BYTES, int(_MAX_STORE_SHARE * free)))
