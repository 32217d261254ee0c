"""The site: built strictly, with nothing from the network, an example of every public name, and current signatures."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "ways").glob("*.md")),
]
EXTERNAL = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*\"|url\((?:https?:)?//")

RAY_WORDS = {"concurrency", "num_cpus", "num_gpus", "fn_constructor_args", "fn_constructor_kwargs", "compute"}
VARIADIC = {"self", "unknown", "ray_words", "mapping"}

# A call with a parameter list, as in `shuffle(window=None, *, shards=16)`: it names a default or a star.
SIGNATURE = re.compile(r"`(?:ps\.|ds\.|\.)?([a-z_]+)\(([^`()]*(?:\([^`()]*\)[^`()]*)*)\)`")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; warnings are errors, which ``--quiet`` would hide."""
    folder = tmp_path_factory.mktemp("site")
    program = "import gc, runpy; gc.disable(); runpy.run_module('mkdocs', run_name='__main__')"  # its objects stay
    command = [sys.executable, "-c", program, "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 50
    loaded = {match for page in pages for match in EXTERNAL.findall(page.read_text())}
    assert not loaded


def test_the_site_has_every_page_a_search_and_signatures(site: Path) -> None:
    for page in [*(ROOT / "docs").rglob("*.md")]:
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists() or page.name == "README.md", page
    assert '"location"' in (site / "search" / "search_index.json").read_text()
    assert "stratify" in (site / "api" / "dataset.html").read_text()


def test_the_list_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "decisions"
    titles = {path.name: path.read_text().partition("\n")[0].removeprefix("# ") for path in folder.glob("[0-9]*.md")}
    assert all(title.startswith(f"{name[:4]}: ") for name, title in titles.items())
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert listed == [(title, name) for name, title in sorted(titles.items())]


@pytest.mark.parametrize("name", dir(ps))
def test_a_public_name_is_in_the_reference_with_an_example(name: str) -> None:
    _check_example(f"penstock.{name}", name)


@pytest.mark.parametrize("name", [name for name in dir(ps.Dataset) if not name.startswith("_") and name != "plan"])
def test_a_method_is_in_the_reference_with_an_example(name: str) -> None:
    _check_example(f"penstock.Dataset.{name}", name)


def _check_example(path: str, name: str) -> None:
    found = re.search(rf"^::: {re.escape(path)}\n\n```python\n(.*?)```", REFERENCE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/api has no example of {path}"
    assert name.lower() in found[1].lower() or name in ("Dataset", "Loader", "Packed"), found[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_signatures_on_a_page_are_those_of_the_code(page: Path) -> None:
    wrong = []
    for name, arguments in SIGNATURE.findall(_our_prose(page)):
        functions = [getattr(place, name, None) for place in (ps, ps.Dataset, ps.Loader)]
        known = next((_parameters(function) for function in functions if callable(function)), None)
        if known is None or "**" in known:
            continue
        flat = re.sub(r"\([^()]*\)", "", arguments)
        named = re.findall(r"(?:^|, )([a-z_]+)=", flat)
        wrong += [f"{name}({arguments}): there is no {argument}" for argument in named if argument not in known]
        if re.search(r"(^|, )\*, ", flat):  # a complete signature
            listed = {part.partition("=")[0].strip() for part in flat.split(",")} - {"*", "**options"}
            wrong += [f"{name}({arguments}): {missing} is missing" for missing in {*known} - listed - RAY_WORDS]
    assert not wrong, "\n".join(wrong)


def _our_prose(page: Path) -> str:
    """Return the text of a page without its code, and without the columns of tables that show other libraries."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    lines, theirs = [], 0
    for line in prose.splitlines():
        cells = line.split("|")
        if not line.startswith("|"):
            theirs = 0
        elif "Penstock" in [cell.strip() for cell in cells]:
            theirs = [cell.strip() for cell in cells].index("Penstock")
        lines.append(cells[theirs] if theirs else line)
    return "\n".join(lines)


def _parameters(function: object) -> list[str]:
    """Return the names of the parameters; ``**`` if any name is accepted."""
    found = []
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        open_ended = parameter.kind is parameter.VAR_KEYWORD and "Never" not in str(parameter.annotation)
        found.append("**" if open_ended and "RayWords" not in str(parameter.annotation) else parameter.name)
    return [name for name in [*found, *(RAY_WORDS if "ray_words" in found else ())] if name not in VARIADIC]


def test_the_guide_names_every_reader() -> None:
    guide = "\n".join(page.read_text() for page in (ROOT / "docs" / "guide").glob("*.md"))
    sources = (ROOT / "docs" / "guide" / "stages.md").read_text().partition("## Sources")[2].partition("\n## ")[0]
    for name in dir(ps):
        if name.startswith(("read_", "from_")):
            assert f"ps.{name}(" in guide, name
            assert f"{name}(" in sources, name
