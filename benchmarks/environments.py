"""One virtual environment per peer: their requirements conflict, and the project's own environment needs none of them.

``python environments.py [PEER ...]`` creates environments ahead of a run; a run creates those that it needs. A peer is
a requirements file in ``peers/``. Two kinds of comments in it have a meaning: ``# pip: OPTIONS`` adds options to the
call of pip, and ``# first: REQUIREMENTS`` names requirements to install before the others.
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
    """Return the interpreter of a peer's environment, created if necessary, or a text that says why it has none."""
    requirements = (data.HERE / "peers" / f"{peer}.txt").read_text()
    home = data.ignored_folder(ENVS) / peer
    fingerprint = hashlib.sha256(f"{sys.version}\n{requirements}".encode()).hexdigest()
    python = home / "bin" / "python"
    if _read_stamp(home / ".installed", fingerprint) is not None:
        return python
    # A failed installation is tried again when the requirements change.
    if (problem := _read_stamp(home / ".failed", fingerprint)) is not None:
        return problem
    sys.stderr.write(f"installing {peer} (once)\n")
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    problem = _install(python, peer, requirements)
    (home / (".failed" if problem else ".installed")).write_text(f"{fingerprint}\n{problem or ''}")
    return problem or python


def _read_stamp(stamp: Path, fingerprint: str) -> str | None:
    """Return the text of a stamp below its first line, or None if the first line is not the fingerprint."""
    first, _, rest = (stamp.read_text() if stamp.is_file() else "").partition("\n")
    return rest if first == fingerprint else None


def _install(python: Path, peer: str, requirements: str) -> str | None:
    """Install a peer; return what went wrong, or None."""
    options, first = (_comment(requirements, name) for name in ("pip", "first"))
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
    match = re.search(rf"^# {name}: (.*)$", text, re.MULTILINE)
    return match[1].split() if match else []


def _cause(text: str) -> str:
    """Return the most informative line of pip's output: the last exception inside a build, or pip's last error."""
    lines = [line.strip(" |╰─>│") for line in text.strip().splitlines()]
    raised = [line for line in lines if re.match(r"\w*(Error|Exception)\b.*: ", line)]
    return last_line("\n".join(raised or lines))


def last_line(text: str) -> str:
    """Return the last line of a process's output, shortened."""
    return (text.strip().splitlines() or ["no output"])[-1][:200]


def installed_packages(python: Path) -> str:
    """Return every package of an environment with its version."""
    done = subprocess.run([python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True)
    return ", ".join(line for line in done.stdout.split() if not line.startswith(("pip==", "setuptools==")))


if __name__ == "__main__":
    for name in sys.argv[1:] or PEERS:
        sys.stdout.write(f"{name}: {environment(name)}\n")
        sys.stdout.flush()
