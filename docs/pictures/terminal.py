"""Draws the terminal of README: runs the commands of its first block in an empty folder and draws what they print.

``python docs/pictures/terminal.py`` writes ``terminal.svg`` beside this file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINE, LETTER, MARGIN, BAR = 19, 8.43, 18, 30  # heights of a line, widths of a letter, the margin, the title bar
BACKGROUND, TITLE, TEXT, PROMPT = "#1d232b", "#2b333d", "#d5dbe2", "#7cc68d"


def commands() -> list[str]:
    """Return the commands of the first block of README that runs."""
    blocks = re.findall(r"(?<!-->\n)```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return blocks[0].splitlines()


def transcript() -> list[str]:
    """Run the commands in an empty folder; return the lines of the terminal."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for command in commands():
            words = [sys.executable, "-m", *command.split()]
            done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder)
            lines += [f"$ {command}", *done.stdout.rstrip("\n").split("\n")]
    return lines


def draw(lines: list[str]) -> str:
    """Return the terminal as an SVG."""
    width = round(2 * MARGIN + LETTER * max(map(len, lines)))
    height = BAR + 2 * MARGIN + LINE * len(lines) - 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
        f'<path d="M0 {BAR} V8 Q0 0 8 0 H{width - 8} Q{width} 0 {width} 8 V{BAR} Z" fill="{TITLE}"/>',
        *(
            f'<circle cx="{MARGIN + 18 * number}" cy="{BAR / 2:g}" r="5.5" fill="{colour}"/>'
            for number, colour in enumerate(("#e0685a", "#e0b45a", "#7cc68d"))
        ),
    ]
    for number, line in enumerate(lines):
        y = BAR + MARGIN + LINE * number + 10
        colour = PROMPT if line.startswith("$ ") else TEXT
        parts.append(f'<text x="{MARGIN}" y="{y}" fill="{colour}" xml:space="preserve">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("terminal.svg").write_text(draw(transcript()))
