"""The examples in the README and the docs run, and their links lead to existing files.

A page becomes one script, line for line: its ``python`` blocks unchanged, and each ``$ penstock`` line of its
``console`` blocks, or ``penstock`` line of its ``sh`` blocks, as a call of the command. The script runs in a folder
with the shards and photos of ``photo_shards``; those of README and the first steps, which make their own data, in an
empty folder.
A block that cannot run has ``<!-- not run: the reason -->`` on the line before its fence.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.blobs import prefetch
from penstock.engines import flow
from penstock.engines.local import engine

RunScript = Callable[..., tuple[int, str]]

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
RUN_BY_TORCHRUN = {"from-webdataset-ddp.md"}  # here with one process
PAGES_WITH_CODE = [page for page in PAGES if re.search(r"(`{3}|~{3})\s*(python|console|sh)\b", page.read_text())]
PAGES_WITH_LINKS = sorted({*PAGES, *ROOT.glob("*.md")})

FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*([\w+-]*)")
NOT_RUN = re.compile(r"\s*<!--\s*not run\b:?\s*(.*?)\s*-->\s*$")
LINK = re.compile(r"\]\(<?([^)\s>]+)>?[^)]*\)|(?:href|src)=\"([^\"]+)\"")
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|#", re.IGNORECASE)
PROMPTS = {"console": "$ ", "sh": ""}  # before each command; blocks that are meant to be pasted have none
OTHER_NAMES_OF_PYTHON = {"py", "python3", "pycon", "ipython"}

# On the first line of the script, since the first line of a page is never code.
PREAMBLE = "import subprocess as _subprocess; _shell = ['bash', '-e', '-o', 'pipefail', '-c']"
CALL = "_subprocess.run([*_shell, {command!r}], check=True)"


@dataclass(frozen=True, slots=True)
class Fenced:
    """A fenced block: the number of its first line (from 0), and whether and why it is not run."""

    language: str
    start: int
    lines: tuple[str, ...]
    marked: bool
    reason: str


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_page_run(
    page: Path, photo_shards: Path, tmp_path: Path, run_script: RunScript, warm_python: str
) -> None:
    folder = tmp_path / "work"
    if page.name in ("README.md", "first-steps.md"):  # they make their own data
        folder.mkdir()
    else:
        shutil.copytree(photo_shards, folder)
    script = tmp_path / f"the-page-{page.stem}.py"  # a script named torch.py would hide the library
    script.write_text(_script(page.read_text()))
    environment = _environment(tmp_path / "bin", warm_python)
    if page.name in RUN_BY_TORCHRUN:
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    status, output = run_script(script, folder=folder, env=environment)
    assert status == 0, f"line numbers of the script are those of {page.name}:\n{output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_block_that_is_not_run_has_a_reason(page: Path) -> None:
    assert not _wrongly_marked(page.read_text())


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_links_of_a_page_lead_to_existing_files(page: Path) -> None:
    missing = [link for link in _links(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def test_the_guide_lists_every_extra_with_its_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name not in ("all", "dev")}
    section = (ROOT / "docs" / "guide" / "decoding.md").read_text().partition("## Extras")[2]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| `")]
    listed = {name: row[-1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert listed.keys() == {*extras, "all"}
    for name, needs in extras.items():
        packages = {re.split(r"[\[>=;]", need)[0] for need in needs} - {"penstock"}
        assert packages <= {*re.findall(r"[\w-]+", listed[name])}, name


def test_sizes_in_the_guide_are_those_of_the_code() -> None:
    engines, storage = ((ROOT / "docs" / "guide" / name).read_text() for name in ("engines.md", "storage.md"))
    rows, megabytes = flow.COLUMN_BLOCK_ROWS, engine.BLOCK_BYTES // 1_000_000
    assert f"up to {flow.MAX_SAMPLES} samples ({rows:,} rows of a table) or {megabytes} MB of stored bytes" in engines
    sequential, chunk = prefetch.SEQUENTIAL_BYTES >> 20, prefetch.CHUNK >> 20
    assert f"It buffers at most {sequential} MiB" in storage
    assert f"a buffer of up to {2 * sequential} MiB" in storage
    assert f"up to {prefetch.CONNECTIONS} requests open, of at most {chunk} MiB" in storage
    assert f"Ranges less than {prefetch.MAX_GAP >> 10} KiB apart are joined" in storage


def test_a_line_of_code_has_the_same_number_in_the_script() -> None:
    page = _page("# Title", "```python", "a = 1", "```", "```console", "$ penstock \\", " info", "out", "```")
    lines = _script(page).splitlines()
    assert lines[2] == "a = 1"
    assert lines[5] == CALL.format(command="penstock   info")
    assert not any(lines[6:])


def test_blocks_that_are_to_be_pasted_have_no_prompt() -> None:
    assert CALL.format(command="penstock info") in _script(_page("Text", "```sh", "penstock info", "```"))
    assert "```console" not in README.read_text()


def test_an_indented_block_is_run() -> None:
    assert "a = 1" in _script(_page("- item", "  ```python", "  a = 1", "  ```")).splitlines()


def test_a_marked_block_and_other_languages_are_not_run() -> None:
    page = _page("Text", "<!-- not run: needs a GPU -->", "```python", "a = 1", "```", "```toml", "b = 2", "```")
    assert not any(_script(page).splitlines()[1:])
    assert not _wrongly_marked(page)


@pytest.mark.parametrize(
    "page",
    [
        "Text\n<!-- not run -->\n```python\na\n```",
        "Text\n<!-- not run: -->\n```python\na\n```",
        "Text\n<!-- not run: no block below -->\n\n```python\na\n```",
        "Text\n```pycon\n>>> a\n```",
    ],
)
def test_a_mark_without_a_reason_or_a_block_is_refused(page: str) -> None:
    assert _wrongly_marked(page)


def test_links_are_read_from_prose_only() -> None:
    page = '[a](b/c.md#part "t") [w](https://x.y) [h](#h) ![i](p.png) <img src="q.svg">\n```\n[n](gone)\n```'
    assert list(_links(page)) == ["b/c.md", "p.png", "q.svg"]


def _page(*lines: str) -> str:
    return "\n".join(lines)


def _fenced(text: str) -> Iterator[Fenced]:
    """Yield the fenced blocks of a page in order."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        if fence := FENCE.match(lines[number]):
            end = _end_of_block(lines, number + 1, fence[1])
            mark = NOT_RUN.match(lines[number - 1]) if number else None
            body = textwrap.dedent("\n".join(lines[number + 1 : end])).split("\n")
            yield Fenced(fence[2], number + 1, tuple(body), mark is not None, mark[1] if mark else "")
            number = end
        number += 1


def _end_of_block(lines: list[str], start: int, fence: str) -> int:
    for number in range(start, len(lines)):
        if lines[number].strip().startswith(fence):
            return number
    raise ValueError(f"the block before line {start + 1} is not closed")


def _script(text: str) -> str:
    """Return a script whose line n is line n of the page if that is code, and otherwise empty."""
    script = [""] * (len(text.splitlines()) + 1)
    script[0] = PREAMBLE
    for block in _fenced(text):
        if block.marked:
            continue
        if block.language == "python":
            script[block.start : block.start + len(block.lines)] = block.lines
        elif block.language in PROMPTS:
            for offset, command in _commands(block.lines, PROMPTS[block.language]):
                script[block.start + offset] = CALL.format(command=command)
    return "\n".join(script) + "\n"


def _commands(lines: tuple[str, ...], prompt: str) -> Iterator[tuple[int, str]]:
    """Yield the calls of penstock in a block of a shell, each with the number of its first line."""
    for number, line in enumerate(lines):
        if line.startswith(f"{prompt}penstock"):
            command, following = line.removeprefix(prompt), iter(lines[number + 1 :])
            while command.endswith("\\"):
                command = command.removesuffix("\\") + " " + next(following, "")
            yield number, command


def _wrongly_marked(text: str) -> list[str]:
    """Return the marks without a reason or a block, and the Python blocks whose language has another name."""
    blocks = list(_fenced(text))
    wrong = [f"line {block.start}: no reason" for block in blocks if block.marked and not block.reason]
    wrong += [f"line {b.start}: write python" for b in blocks if b.language in OTHER_NAMES_OF_PYTHON]
    marks = sum(1 for _, line in _prose(text) if NOT_RUN.match(line))
    if marks != sum(block.marked for block in blocks):
        wrong.append("a mark is not followed by a block")
    return wrong


def _links(text: str) -> Iterator[str]:
    """Yield the links of a page that lead to files, without the part after ``#``."""
    for _, line in _prose(text):
        for markdown, html in LINK.findall(line):
            link = markdown or html
            if not EXTERNAL.match(link):
                yield link.partition("#")[0]


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines outside of fenced blocks with their numbers."""
    inside = {block.start + offset for block in _fenced(text) for offset in range(len(block.lines))}
    for number, line in enumerate(text.splitlines()):
        if number not in inside:
            yield number, line


def _environment(folder: Path, python: str) -> dict[str, str]:
    """Return the environment with a ``penstock`` command first in the path that uses an interpreter."""
    folder.mkdir()
    command = folder / "penstock"
    command.write_text(f'#!/bin/sh\nexec "{python}" -m penstock "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, "PYTHONWARNINGS": "error", "PENSTOCK_WARM_END": "quick"}
