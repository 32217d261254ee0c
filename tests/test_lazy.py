from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from penstock.lazy import cached_property

ROOT = Path(__file__).resolve().parents[1] / "src" / "penstock"
PACKAGES = [
    ".".join(["penstock", *path.parent.relative_to(ROOT).parts])
    for path in sorted(ROOT.rglob("__init__.py"))
    if "lazy(__name__)" in path.read_text()
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_loads(package: str) -> None:
    module = import_module(package)
    assert module.__all__ == dir(module) == sorted(set(module.__all__))
    assert all(getattr(module, name) is not None for name in module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_name_is_reported_with_the_existing_ones(package: str) -> None:
    module = import_module(package)
    names = ", ".join(module.__all__)
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'no_such_name'; it has {names}$"):
        _ = module.no_such_name


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package with two submodules, which are loaded on first use."""
    folder = tmp_path / "lazily"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from __future__ import annotations\n\n"
        "from typing import TYPE_CHECKING\n\n"
        "from penstock.lazy import lazy\n\n"
        "if TYPE_CHECKING:\n"
        "    from lazily import second as second\n"
        "    from lazily.first import ONE as ONE\n"
        "else:\n"
        "    __getattr__, __dir__, __all__ = lazy(__name__)\n"
    )
    (folder / "first.py").write_text("ONE = object()\n")
    (folder / "second.py").write_text("TWO = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("lazily")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazily"]:
        del sys.modules[name]


def test_only_the_module_of_a_used_name_is_imported(package: ModuleType) -> None:
    assert dir(package) == package.__all__ == ["ONE", "second"]
    assert "lazily.first" not in sys.modules
    assert package.ONE is sys.modules["lazily.first"].ONE
    assert "lazily.second" not in sys.modules


def test_a_name_is_looked_up_once(package: ModuleType) -> None:
    assert "ONE" not in vars(package)
    assert package.ONE is vars(package)["ONE"]


def test_a_submodule_can_be_a_public_name(package: ModuleType) -> None:
    assert package.second.TWO == 2


def test_a_name_that_is_also_a_submodule_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "clashing"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from penstock.lazy import lazy\n\n"
        "if TYPE_CHECKING:\n"
        "    from clashing.load import load as load\n"
        "else:\n"
        "    __getattr__, __dir__, __all__ = lazy(__name__)\n"
    )
    (folder / "load.py").write_text("load = 1\n")
    done = subprocess.run(
        [sys.executable, "-c", "import clashing"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "clashing: {'load'} are also modules of the package" in done.stderr


def test_a_property_may_wait_for_a_thread_that_computes_that_of_another_object() -> None:
    """Python 3.11's own waits forever: it has one lock for all objects."""

    class Node:
        def __init__(self, below: Node | None) -> None:
            self.below = below

        @cached_property
        def depth(self) -> int:
            if self.below is None:
                return 0
            below = self.below
            with ThreadPoolExecutor(1) as pool:
                below_depth: int = pool.submit(lambda: below.depth).result(60)
                return below_depth + 1

    top = Node(Node(None))
    assert top.depth == 1
    assert vars(top)["depth"] == 1
