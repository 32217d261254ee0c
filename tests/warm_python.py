"""An interpreter that has imported what takes long to import, and forks a fresh process for every script.

``python warm_python.py SOCKET`` listens there. Nothing is imported before the first request. A process that runs a
script begins as ``python SCRIPT ARGUMENTS`` would: with its own arguments, folder, environment and output, and it ends
as an interpreter ends. When the one who asked goes away, the script and what it started are killed.
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

IMPORTED = ("numpy", "PIL.Image", "cv2", "pyarrow.parquet", "pyarrow.compute", "torch._dynamo", "datasets")


def ask(address: str, script: Path, *arguments: str, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Have a script run; return its exit status and what it wrote to standard output and error together."""
    request = {"script": str(script), "arguments": arguments, "folder": str(folder), "env": env}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as file:
            file.write(json.dumps(request) + "\n")
            file.flush()
            answer = json.loads(file.readline())
    return answer["status"], answer["output"]


def serve(address: str) -> None:
    """Answer requests until killed; returns only in a process that has run a script."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who wait for scripts end by themselves
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        warm = False
        while True:
            connection, _ = listener.accept()
            if not warm:
                with warnings.catch_warnings(action="ignore"):
                    for name in IMPORTED:
                        import_module(name)
                gc.freeze()
                warm = True
            if os.fork() == 0:
                listener.close()
                _answer(connection)
                return
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Run one script in a process of its own and report how it ended; returns only in that process."""
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
        _become(request)
        return
    status = None
    while status is None:
        done, ended = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(ended)
        elif select.select([connection], [], [], 0.02)[0]:  # it says nothing more: it is gone
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    text = os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace")
    with suppress(OSError):
        file.write(json.dumps({"status": status, "output": text}) + "\n")
        file.flush()
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Be what ``python SCRIPT ARGUMENTS`` would be."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(Path(request["script"]).parent)
    warnings.resetwarnings()
    for choice in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(choice)  # type: ignore[arg-type]
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
