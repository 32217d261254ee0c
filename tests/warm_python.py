"""An interpreter that has imported libraries that are slow to import, and forks a new process for every script.

``python warm_python.py SOCKET`` listens on a socket, and imports the libraries on the first request. A script runs as
with ``python SCRIPT ARGUMENTS``: with its own arguments, folder, environment and output, and it ends as an interpreter
ends. When the client disconnects, the script and its child processes are killed.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

PRELOADED = ("numpy", "PIL.Image", "cv2", "pyarrow.parquet", "pyarrow.compute", "torch._dynamo", "datasets")


def run_script(address: str, script: Path, *arguments: str, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Let the interpreter at ``address`` run a script; return the exit status, and output and errors in one text."""
    request = {"script": str(script), "arguments": arguments, "folder": str(folder), "env": env}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as file:
            file.write(json.dumps(request) + "\n")
            file.flush()
            response = json.loads(file.readline())
    return response["status"], response["output"]


def serve(address: str) -> None:
    """Accept requests until killed; returns only in a process that has run a script."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes that serve requests need no wait
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
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
    """Run one script in a new process and send its status and output; returns only in that process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    file = connection.makefile("rw")
    request = json.loads(file.readline())
    output = os.memfd_create("output")
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        connection.close()
        file.close()
        os.close(output)
        _run_request(request)
        return
    status = None
    while status is None:
        ended_pid, wait_status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            status = os.waitstatus_to_exitcode(wait_status)
        elif select.select([connection], [], [], 0.02)[0]:  # a client sends nothing more, so it has disconnected
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    text = os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace")
    with suppress(OSError):
        file.write(json.dumps({"status": status, "output": text}) + "\n")
        file.flush()
    os._exit(0)


def _run_request(request: dict[str, Any]) -> None:
    """Run the script as ``python SCRIPT ARGUMENTS`` would."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(Path(request["script"]).parent)
    warnings.resetwarnings()
    for action in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
