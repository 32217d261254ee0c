from __future__ import annotations

from pathlib import Path

from penstock.cli import COMMANDS, parser_of
from penstock.cli.reference import reference_page
from penstock.cli.tools import TOOLS

ROOT = Path(__file__).resolve().parents[2]


def test_the_stored_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == reference_page(), (
        "python -m penstock.cli.reference > docs/commands.md"
    )


def test_the_page_has_every_option() -> None:
    page = reference_page()
    for name in sorted(COMMANDS | TOOLS):
        section = page.partition(f"\n## penstock {name}\n")[2].partition("\n## ")[0]
        for action in parser_of(name)._actions:
            if action.help != "==SUPPRESS==" and action.dest != "help":
                assert all(flag in section for flag in action.option_strings), (name, action)


def test_every_row_of_a_table_has_two_cells() -> None:
    rows = [line for line in reference_page().splitlines() if line.startswith("| ")]
    assert [row for row in rows if row.replace("\\|", "").count("|") != 3] == []
