"""HTML that previews of fields are built from, for ``penstock view`` and notebooks; text from data is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

# Control characters, directions of text that hide what is written, and bytes that are not UTF-8.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "source"})


class Markup(str):
    """HTML that is safe to include as it is; ``tag`` and ``escaped`` create it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)


def escaped(text: Any) -> Markup:
    """Return text as HTML; characters that cannot be seen are written as their numbers.

    >>> escaped("<script>\x1b")
    '&lt;script&gt;\\\\x1b'
    """
    if isinstance(text, Markup):
        return text
    visible = _INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], str(text))
    return Markup(html.escape(visible, quote=True))


def joined_markup(parts: Iterable[Any]) -> Markup:
    """Return several parts, one after the other; text is escaped, None is left out, and lists are flattened."""
    out: list[str] = []
    for part in parts:
        if isinstance(part, list | tuple):
            out.append(joined_markup(part))
        elif part is not None and part is not False:
            out.append(escaped(part))
    return Markup("".join(out))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Return an element; ``class_`` is the attribute ``class``, and ``aria_label`` is ``aria-label``.

    An attribute that is None or False is left out, and one that is True has no value.

    >>> tag("a", "x < y", href="?a=1&b=2", class_="link", hidden=None)
    '<a href="?a=1&amp;b=2" class="link">x &lt; y</a>'
    """
    shown = [
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    opening = f"<{name}{''.join(shown)}>"
    return Markup(opening if name in _VOID else f"{opening}{joined_markup(children)}</{name}>")


def size_text(nbytes: float) -> str:
    """Return a size with its unit, as people write it.

    >>> size_text(532), size_text(45_300), size_text(2_100_000_000)
    ('532 B', '45.3 kB', '2.1 GB')
    """
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
