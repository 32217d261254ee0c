"""An interpreter that has imported libraries that are slow to import, and forks a new process for every program.

``python warm_python.py SOCKET`` listens on a socket, and imports the libraries on the first request. A program runs as
with ``python ARGUMENTS`` (see warm_client.py): with its own folder, environment and streams, and it ends as an
interpreter ends. With the variable ``PENSTOCK_WARM_END=quick`` a program that succeeds does not free its objects at the
end, which takes longer than many programs. When the client disconnects, the program and its child processes are killed.
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
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PRELOADED = ("numpy", "PIL.Image", "cv2", "pyarrow.parquet", "pyarrow.compute", "torch._dynamo", "transformers.trainer")
EXECUTABLE = "PENSTOCK_WARM_EXECUTABLE"  # the variable with what a program has as sys.executable


def serve(address: str) -> None:
    """Accept requests until killed; returns only in a process that has run a program."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes that serve requests need no wait
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        warm = False
        while True:
            connection, _ = listener.accept()
            if not warm:
                with warnings.catch_warnings(action="ignore"):
                    for name in PRELOADED:
                        import_module(name)
                gc.freeze()
                warm = True
            if os.fork() == 0:
                listener.close()
                _serve_request(connection)
                return
            connection.close()


def _serve_request(connection: socket.socket) -> None:
    """Run one program in a new process and send its pid and status; returns only in that process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as file:
        request = json.loads(file.read(int.from_bytes(size, "big")))
    pid = os.fork()
    if pid == 0:
        os.setsid()
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run_request(request)
        return
    for stream in streams:
        os.close(stream)
    with suppress(OSError):
        connection.sendall(b"%d\n" % pid)
    status = None
    while status is None:
        ended_pid, wait_status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            status = os.waitstatus_to_exitcode(wait_status)
        elif select.select([connection], [], [], 0.02)[0]:  # a client sends nothing more, so it has disconnected
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    with suppress(OSError):
        connection.sendall(b"%d\n" % status)
    os._exit(0)


def _run_request(request: dict[str, Any]) -> None:
    """Run the program as ``python ARGUMENTS`` would."""
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
    serve(sys.argv[1])
