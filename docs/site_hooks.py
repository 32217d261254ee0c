"""Hooks of the site: README is its first page, and files of the repository that pages link to are part of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\(|src=\"|href=\")([^)\s#\"]+)")
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
ALWAYS = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")


def on_files(files: Files, config: Any) -> Files:
    """Add README as the first page, and the files outside of ``docs/`` that pages link to."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    pending = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / name for name in ALWAYS)]
    added: set[Path] = set()
    while pending:
        page = pending.pop()
        if page.suffix == ".md":
            pending += [path for path in _outside(page) if path not in added]
        if not page.is_relative_to(DOCS) and page != ROOT / "README.md" and page not in added:
            added.add(page)
            files.append(File.generated(config, _place(page), content=page.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make the links of a page lead to where their files are in the site."""
    source = _source(page.file.src_uri)
    here = os.path.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if EXTERNAL.match(match[2]) or not target.exists() or not target.is_relative_to(ROOT):
            return match[0]
        return match[1] + os.path.relpath(_place(target), here or ".")

    return LINK.sub(moved, markdown)


def _outside(page: Path) -> Iterator[Path]:
    """Yield the files of the repository, but not of ``docs/``, that a page links to."""
    for _, link in LINK.findall(page.read_text()):
        target = (page.parent / link).resolve()
        ours = not EXTERNAL.match(link) and target.is_file() and target.is_relative_to(ROOT)
        if ours and not target.is_relative_to(DOCS) and target != ROOT / "README.md":
            yield target


def _place(path: Path) -> str:
    """Return the place of a file in the site."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}"


def _source(place: str) -> Path:
    """Return the file of a page."""
    if place == "index.md":
        return ROOT / "README.md"
    if place.startswith("repository/"):
        return ROOT / place.removeprefix("repository/")
    return DOCS / place
