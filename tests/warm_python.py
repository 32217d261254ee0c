"""An interpreter that has imported libraries that are slow to import, and forks a new process for every program.

``python warm_python.py DESCRIPTOR [large]`` accepts requests on a socket that listens already, and imports the
libraries on the first one; with ``large`` those that take seconds too. A program runs as with ``python ARGUMENTS`` (see
warm_client.py): with its own folder, environment and streams, and it ends as an interpreter ends. With the variable
``PENSTOCK_WARM_END=quick`` a program that succeeds does not free its objects at the end, which takes longer than many
programs. When the client disconnects, the program and its child processes are killed.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

LIBRARIES = (
    *("numpy", "pandas", "PIL.Image", "cv2", "pyarrow.parquet", "pyarrow.compute"),
    *("penstock.cli", "penstock.dataset.dataset", "penstock.dataset.table_sources", "penstock.engines.pipeline"),
    *("penstock.engines.local.process_worker", "penstock.landing.tar_sink", "penstock.landing.parquet_sink"),
    *("penstock.packing.packer", "penstock.inspection.info", "penstock.storage.local"),
    "penstock.testing.number_source",
)
LARGE = ("torch._dynamo", "transformers.trainer", "datasets", "webdataset")
EXECUTABLE = "PENSTOCK_WARM_EXECUTABLE"  # the variable with what a program has as sys.executable


def serve(listener: socket.socket, libraries: Sequence[str]) -> None:
    """Run programs until killed; returns only in a process that has run one."""
    clients: dict[int, tuple[socket.socket, int]] = {}  # by its descriptor: the client of a program, and the program
    endings: dict[int, int] = {}  # by a descriptor that is readable when a program has ended: that of its client
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    while True:
        for descriptor, _ in ready.poll():  # the listener first: a descriptor that is closed is not used again here
            if descriptor == listener.fileno():
                _import_all(libraries)
                libraries = ()
                client, _ = listener.accept()
                request, streams = _receive(client)
                if request is None:
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for each in (listener, client, *(other for other, _ in clients.values())):
                        each.close()
                    _run_request(request, streams)
                    return
                for stream in streams:
                    os.close(stream)
                with suppress(OSError):
                    client.sendall(b"%d\n" % pid)
                clients[client.fileno()] = client, pid
                endings[ending := os.pidfd_open(pid)] = client.fileno()
                ready.register(client, select.POLLIN)
                ready.register(ending, select.POLLIN)
            elif descriptor in endings:
                client, pid = clients.pop(endings.pop(descriptor))
                _, status = os.waitpid(pid, 0)
                for done in (descriptor, client.fileno()):
                    with suppress(KeyError):  # it has disconnected before
                        ready.unregister(done)
                with suppress(OSError):
                    client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                os.close(descriptor)
                client.close()
            elif descriptor in clients:  # a client sends nothing more, so it has disconnected
                ready.unregister(descriptor)
                for kill in (os.killpg, os.kill):  # it may not lead its group yet
                    with suppress(ProcessLookupError):
                        kill(clients[descriptor][1], signal.SIGKILL)


def _import_all(libraries: Sequence[str]) -> None:
    """Import the libraries, and keep the garbage collector from writing to, and so copying, what programs share."""
    with warnings.catch_warnings(action="ignore"):
        for name in libraries:
            import_module(name)
    gc.freeze()


def _receive(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return what a client asks for, and the streams of its program; None if it has ended before."""
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as file:
        request = file.read(int.from_bytes(size, "big"))
    if size and len(request) == int.from_bytes(size, "big"):
        return json.loads(request), streams
    for stream in streams:
        os.close(stream)
    return None, []


def _run_request(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Run the program as ``python ARGUMENTS`` would, as the leader of a new session."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.executable = os.environ.get(EXECUTABLE, sys.executable)
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    actions = [action for action in os.environ.get("PYTHONWARNINGS", "").split(",") if action]
    arguments = list(request["arguments"])
    while arguments[0] in ("-u", "-W"):
        if arguments.pop(0) == "-W":
            actions.append(arguments.pop(0))
    warnings.resetwarnings()
    for action in actions:
        warnings.simplefilter(action)  # type: ignore[arg-type]
    main = sys.modules["__main__"] = ModuleType("__main__")
    status = 0
    try:
        exec(_program(main, arguments), main.__dict__)
    except SystemExit as end:
        if not isinstance(end.code, int | None):  # a message
            raise
        status = end.code or 0
    if os.environ.get("PENSTOCK_WARM_END") != "quick":
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _program(main: ModuleType, arguments: list[str]) -> CodeType:
    """Prepare the main module and ``sys`` for a script, ``-m`` or ``-c``; return the code to run."""
    kind = arguments.pop(0) if arguments[0] in ("-c", "-m") else ""
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
        return compile(arguments[0], "<string>", "exec")
    if kind == "-m":
        sys.path[0] = os.getcwd()
        spec = find_spec(arguments[0])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{arguments[0]}.__main__")
        assert spec is not None
        assert spec.origin is not None
        main.__spec__, main.__package__ = spec, spec.parent
        main.__file__, sys.argv = spec.origin, [spec.origin, *arguments[1:]]
        return compile(Path(spec.origin).read_bytes(), spec.origin, "exec")
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
    main.__file__ = arguments[0]
    return compile(Path(arguments[0]).read_bytes(), arguments[0], "exec")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), (*LARGE, *LIBRARIES) if sys.argv[2:] else LIBRARIES)
