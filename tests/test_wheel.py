"""The wheel has all files of the package, and works without the source tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import penstock

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a source archive of a copy of the tree, as a release would upload it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree))
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    package = ROOT / "src"
    expected = {
        str(path.relative_to(package))
        for path in (package / "penstock").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packaged == expected
    assert "penstock/py.typed" in packaged


def test_the_wheel_has_its_license(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
    assert archive.read(name) == (ROOT / "LICENSE").read_bytes()
    assert _metadata(wheel)["License-Expression"] == "Apache-2.0"


def test_the_wheel_has_every_extra(wheel: Path) -> None:
    extras = _metadata(wheel).get_all("Provides-Extra", [])
    assert set(extras) == set(PROJECT["optional-dependencies"])


def test_the_wheel_without_extras_requires_two_packages(wheel: Path) -> None:
    requirements = _metadata(wheel).get_all("Requires-Dist", [])
    assert [line for line in requirements if "extra ==" not in line] == ["cloudpickle>=3", "numpy>=1.26"]


def test_the_extra_all_has_every_other_extra_but_dev() -> None:
    extras = PROJECT["optional-dependencies"]
    (requirement,) = extras["all"]
    listed = requirement.removeprefix("penstock[").removesuffix("]").split(",")
    assert set(listed) == set(extras) - {"all", "dev"}


def test_the_wheel_and_the_sdist_work_in_an_empty_environment(wheel: Path) -> None:
    printed = _run(sys.executable, str(ROOT / "tests" / "try_dist.py"), str(wheel.parent))
    assert printed.count(f"{PROJECT['version']} reads, writes and resumes") == 2


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["version"]
    assert penstock.__version__ == version
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_says_where_it_runs(wheel: Path) -> None:
    classifiers = _metadata(wheel).get_all("Classifier", [])
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= {*classifiers}
    assert "Operating System :: POSIX :: Linux" in classifiers
    assert not any("Windows" in line for line in classifiers)  # fork, shared memory and locks are POSIX's


def _metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode())


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
