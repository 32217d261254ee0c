"""The page about all commands, made from their parsers: ``python -m penstock.cli.reference > docs/commands.md``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from penstock.cli import COMMANDS, parser_of
from penstock.cli.tools import OLD_NAMES, TOOLS

_TOP = """# The commands

Made from the commands themselves by `python -m penstock.cli.reference`, and checked by a test;
`penstock COMMAND --help` says the same. Every command exits with 0 when all is well, with 1 when something is not, and
with 2 when it was called wrongly; after Ctrl-C with 130. What is wrong is said on standard error, in one line.
[The tools](guide/tools.md) shows the tar tools at work.
"""


def page() -> str:
    """Give the page."""
    return _TOP + "".join(_about(name) for name in sorted(COMMANDS | TOOLS))


def _about(name: str) -> str:
    parser = parser_of(name)
    old = sorted(word for word, command in OLD_NAMES.items() if command == name)
    also = f" Also installed as {', '.join(f'`{word}`' for word in old)}." if old else ""
    about = (COMMANDS | TOOLS)[name]
    lines = [f"\n## penstock {name}\n", f"{about[0].upper()}{about[1:]}.{also}\n", "| | |", "|---|---|"]
    lines += [f"| {_shown(action)} | {_help(action)} |" for action in _actions(parser)]
    return "\n".join([*lines, *_epilog(parser.epilog or "")]) + "\n"


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse.SUPPRESS, None)
    return [action for action in parser._actions if action.help not in hidden and action.dest != "help"]


def _shown(action: argparse.Action) -> str:
    value = (
        action.metavar
        if action.metavar is not None
        else ("|".join(map(str, action.choices or ())) or action.dest.upper())
    )
    if not action.option_strings:
        return f"`{value}{' ...' if action.nargs in ('*', '+') else ''}`"
    words = ", ".join(action.option_strings)
    return f"`{words}`" if action.nargs == 0 else f"`{words} {value}`".replace("|", "\\|")


def _help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%").replace("|", "\\|")
    return text.replace("<", "&lt;").replace("_", "\\_")


def _epilog(text: str) -> Iterator[str]:
    """Prose as prose, examples as a block."""
    plain = text.replace("%%", "%")
    before, mark, after = plain.partition("examples:")
    if not mark:
        before, mark, after = plain.partition("example:")
    if before.strip():
        yield "\n" + before.strip().replace("_", "\\_").replace("*", "\\*")
    if after.strip():
        yield "\n```text\n" + "\n".join(line.strip() for line in after.strip().splitlines()) + "\n```"


if __name__ == "__main__":
    sys.stdout.write(page())
