"""Tries the wheel and the sdist of a folder, each in an empty environment: ``python tests/try_dist.py dist``.

The environment has what the package itself requires, taken from the environment that runs this script, and nothing
else: no extra, and not the source tree.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

REQUIRED = ("cloudpickle", "numpy")  # and the folder of numpy's libraries
PROGRAM = """
import penstock as ps
ps.from_items([{"txt": f"t{i}", "cls": i % 3} for i in range(30)]).write_tar("shards", max_samples=10)
ds = ps.read_tar("shards").shuffle(seed=1).decode().batched(7)
loader = ds.loader(ledger="ledger")
assert sum(len(batch["txt"]) for batch in loader) == 30
assert "exactly once" in str(ps.ledger("ledger").verify())
print(ps.__file__, ps.__version__)
"""


def main(folder: Path) -> None:
    """Install each file into an environment of its own and run a program with it."""
    files = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    if len(files) != 2:
        raise SystemExit(f"{folder} has {len(files)} files to try, not a wheel and an sdist")
    for file in files:
        with tempfile.TemporaryDirectory() as place:
            print(f"{file.name}: {_try(file.resolve(), Path(place))}")


def _try(file: Path, place: Path) -> str:
    venv.create(place / "env", with_pip=False)
    python = place / "env" / "bin" / "python"
    packages = Path(_run(place, str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    installed = Path(sysconfig.get_path("purelib"))
    for pattern in REQUIRED:
        for found in [*installed.glob(pattern), *installed.glob(f"{pattern}.libs"), *installed.glob(f"{pattern}-*")]:
            (packages / found.name).symlink_to(found)
    # pip of this environment installs into the other: an sdist is built with the build system that is here.
    options = ["--quiet", "--no-compile", "--no-deps", "--no-index", "--no-build-isolation"]
    _run(
        place,
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        *options,
        "--target",
        str(packages),
        str(file),
    )
    (place / "work").mkdir()
    printed = _run(place / "work", str(python), "-I", "-c", PROGRAM)
    module, version = printed.split()
    if not Path(module).is_relative_to(place):
        raise SystemExit(f"{module} was imported, not {file.name}")
    help_text = _run(place / "work", str(python), "-I", "-m", "penstock", "--help")
    return f"{version} reads, writes and resumes; {len(help_text.splitlines())} lines of help"


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:200]}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
