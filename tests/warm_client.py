"""Runs a Python program in a process that is forked from an interpreter of warm_python.py.

``python warm_client.py SOCKET ARGUMENTS`` behaves as ``python ARGUMENTS`` does: with its folder, environment, standard
streams and exit status. Signals are passed on, and SIGRTMIN as SIGKILL: this process ends after the program then.
Options other than ``-u``, ``-W``, ``-c`` and ``-m`` start a new interpreter.

A program that names a large library is forked from an interpreter that has imported these libraries, and any other
from one that takes a tenth of the time to fork and to end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

LARGE = ("torch", "transformers", "lightning", "accelerate", "keras", "jax", "webdataset", "datasets")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN)


def run(address: str, arguments: Sequence[str], folder: str, env: dict[str, str], streams: Sequence[int]) -> int:
    """Run ``python ARGUMENTS`` with three streams; return its exit status, or the negative number of a signal.

    The program is killed when this process is.
    """
    request = json.dumps({"arguments": arguments, "folder": folder, "env": env}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address + "-large" * _names_large_library(arguments, folder))
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], list(streams))
        connection.sendall(request)
        with connection.makefile() as answers:
            pid = json.loads(answers.readline())
            if __name__ == "__main__":
                _pass_signals_on(pid)
            return int(answers.readline() or -signal.SIGKILL)


def _names_large_library(arguments: Sequence[str], folder: str) -> bool:
    """Whether a program, or its command line, has the name of a large library."""
    texts = list(arguments)
    for path in (argument.partition(":")[0] for argument in arguments):
        if path.endswith(".py"):
            with suppress(OSError), open(os.path.join(folder, path), encoding="utf-8") as script:
                texts.append(script.read())
    return any(name in text for name in LARGE for text in texts)


def _pass_signals_on(pid: int) -> None:
    def send(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if number == signal.SIGRTMIN else number)

    for number in PASSED_ON:
        signal.signal(number, send)


def _is_known(arguments: Sequence[str]) -> bool:
    """Whether the interpreter of warm_python.py understands the options before the program."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "-W":
            next(rest, None)
        elif argument != "-u":
            return argument in ("-c", "-m") or not argument.startswith("-")
    return False


def main() -> None:
    """Run the program of the command line, and end as it ends."""
    address, arguments = sys.argv[1], sys.argv[2:]
    if not _is_known(arguments):
        executable = os.environ["PENSTOCK_COLD_PYTHON"]
        os.execv(executable, [executable, *arguments])
    status = run(address, arguments, os.getcwd(), dict(os.environ), (0, 1, 2))
    if status < 0:
        with suppress(OSError):  # SIGKILL needs none
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
