"""The reference page of all commands, generated from their parsers.

Regenerate it with ``python -m penstock.cli.reference > docs/commands.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from penstock.cli import COMMANDS, parser_of, split_epilog
from penstock.cli.tools import OLD_NAMES, TOOLS

_INTRODUCTION = """# The commands

This page is generated from the commands by `python -m penstock.cli.reference`, and a test keeps it up to date;
`penstock COMMAND --help` prints the same. Default values are in parentheses. Every command exits with 0 on success,
with 1 on a failure, with 2 on a usage error and with 130 after Ctrl-C. An error is one line on standard error.
[The tools](guide/tools.md) explains the tar tools by examples.
"""


def reference_page() -> str:
    """Return the page in Markdown."""
    return _INTRODUCTION + "".join(_section(name) for name in sorted(COMMANDS | TOOLS))


def _section(name: str) -> str:
    parser = parser_of(name)
    old_names = sorted(old for old, command in OLD_NAMES.items() if command == name)
    aliases = f" Also installed as {', '.join(f'`{old}`' for old in old_names)}." if old_names else ""
    summary = (COMMANDS | TOOLS)[name]
    lines = [f"\n## penstock {name}\n", f"{summary[0].upper()}{summary[1:]}.{aliases}\n", "| | |", "|---|---|"]
    lines += [f"| {_usage(action)} | {_help(action)} |" for action in _visible_actions(parser)]
    return "\n".join([*lines, *_epilog(parser.epilog or "")]) + "\n"


def _visible_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse.SUPPRESS, None)
    return [action for action in parser._actions if action.help not in hidden and action.dest != "help"]


def _usage(action: argparse.Action) -> str:
    value = (
        action.metavar
        if action.metavar is not None
        else ("|".join(map(str, action.choices or ())) or action.dest.upper())
    )
    if action.option_strings:
        flags = ", ".join(action.option_strings)
        usage = flags if action.nargs == 0 else f"{flags} {value}"
    else:
        usage = f"{value}{' ...' if action.nargs in ('*', '+') else ''}"
    return f"`{usage}`".replace("|", "\\|")


def _help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%").replace("|", "\\|")
    return text.replace("<", "&lt;").replace("_", "\\_")


def _epilog(text: str) -> Iterator[str]:
    """Yield the prose as Markdown, and the examples as a code block."""
    prose, examples = split_epilog(text.replace("%%", "%"))
    if prose:
        yield "\n" + prose.replace("_", "\\_").replace("*", "\\*")
    if examples:
        yield "\n```text\n" + "\n".join(line.strip() for line in examples.strip().splitlines()) + "\n```"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
