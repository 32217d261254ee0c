"""One environment a peer: they cannot live together, and none of them belongs into the project's own.

``python environments.py [PEER ...]`` makes them ahead of a run; a run makes those it needs. A peer is a file of
requirements under ``peers/``. Two of its comments are read: ``# pip: OPTIONS`` are added to the call of pip, and
``# first: REQUIREMENTS`` are installed before the others.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import data

PEERS = sorted(path.stem for path in (data.HERE / "peers").glob("*.txt"))
ENVS = data.HERE / ".envs"
INSTALL_S = 1800  # the largest wheel has 430 MB


def environment(peer: str) -> str | Path:
    """The interpreter of a peer's own environment, made if need be; a text says why there is none."""
    wanted = (data.HERE / "peers" / f"{peer}.txt").read_text()
    home = data.private(ENVS) / peer
    mark = hashlib.sha256(f"{sys.version}\n{wanted}".encode()).hexdigest()
    python = home / "bin" / "python"
    if _said(home / ".installed", mark) is not None:
        return python
    if (problem := _said(home / ".failed", mark)) is not None:  # not tried again until the file changes
        return problem
    sys.stderr.write(f"installing {peer} (once)\n")
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    problem = _installed(python, peer, wanted)
    (home / (".failed" if problem else ".installed")).write_text(f"{mark}\n{problem or ''}")
    return problem or python


def _said(stamp: Path, mark: str) -> str | None:
    """What a stamp says below its first line, if that is the mark."""
    first, _, rest = (stamp.read_text() if stamp.is_file() else "").partition("\n")
    return rest if first == mark else None


def _installed(python: Path, peer: str, wanted: str) -> str | None:
    """Install a peer; say what went wrong."""
    options, first = (_comment(wanted, name) for name in ("pip", "first"))
    calls = [first] if first else []
    for arguments in [*calls, [*options, "-r", str(data.HERE / "peers" / f"{peer}.txt")]]:
        call = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        try:
            done = subprocess.run(call, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            return f"does not install within {INSTALL_S} s"
        if done.returncode:
            return f"does not install: {_cause(done.stderr)}"
    return None


def _comment(text: str, name: str) -> list[str]:
    found = re.search(rf"^# {name}: (.*)$", text, re.MULTILINE)
    return found[1].split() if found else []


def _cause(text: str) -> str:
    """The line that says most: the last exception inside a build, or pip's last error."""
    lines = [line.strip(" |╰─>│") for line in text.strip().splitlines()]
    raised = [line for line in lines if re.match(r"\w*(Error|Exception)\b.*: ", line)]
    return last_line("\n".join(raised or lines))


def last_line(text: str) -> str:
    """The end of what a process said."""
    return (text.strip().splitlines() or ["no output"])[-1][:200]


def frozen(python: Path) -> str:
    """Every package of an environment with its version."""
    done = subprocess.run([python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True)
    return ", ".join(line for line in done.stdout.split() if not line.startswith(("pip==", "setuptools==")))


if __name__ == "__main__":
    for name in sys.argv[1:] or PEERS:
        sys.stdout.write(f"{name}: {environment(name)}\n")
        sys.stdout.flush()
