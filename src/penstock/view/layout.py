"""The frame of every page, and the elements that pages share: fields, bars, notes, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlencode

from penstock.codecs.markup import Markup, joined_markup, size_text, tag
from penstock.codecs.previews import Preview

_BAR_WIDTH = 100


def link(path: str, **parameters: Any) -> str:
    """Return the address of a page; parameters that are None or empty are left out."""
    given = {name: value for name, value in parameters.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def page(title: str, *content: Any, here: str, sections: Iterable[tuple[str, str]], live: str | None = None) -> str:
    """Return a whole page.

    Args:
        title: The title.
        content: The content of ``main``.
        here: The path of the section that the page belongs to.
        sections: The path and name of every section.
        live: The address from which the content is fetched again, every two seconds.
    """
    items = [tag("a", name, href=path, aria_current="page" if path == here else None) for path, name in sections]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} - penstock view"),
        tag("link", rel="stylesheet", href="/static/view.css"),
        tag("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
        tag("script", src="/static/view.js", defer=True),
    )
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", tag("span", "penstock", class_="brand"), tag("nav", *items, aria_label="Sections")),
        tag("main", *content, id="content", tabindex="-1", data_live=live),
        tag("p", KEYS, class_="keys", id="keys"),
    )
    return "<!doctype html>" + tag("html", head, body, lang="en")


KEYS = "Keys: left and right or j and k for pages, arrows and Enter inside a grid, / to search, ? for this list"


def note(*content: Any, kind: str = "note") -> Markup:
    """Return a remark: a "note", a "warning" or an "error"."""
    return tag("p", *content, class_=kind, role="alert" if kind == "error" else None)


def data_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], caption: str | None = None) -> Markup:
    """Return a table that scrolls inside its own box on a narrow screen."""
    head = tag("thead", tag("tr", [tag("th", heading, scope="col") for heading in headings]))
    body = tag("tbody", [tag("tr", [tag("td", cell) for cell in row]) for row in rows])
    named = tag("caption", caption) if caption else None
    return tag("div", tag("table", named, head, body), class_="scroll", tabindex="0")


def bars(rows: Sequence[tuple[Any, float, str, str | None]], label: str) -> Markup:
    """Return horizontal bars: (name, value, text, address of the samples behind it)."""
    most = max((value for _, value, _, _ in rows), default=0) or 1
    items = []
    for name, value, text, href in rows:
        shown = tag("a", name, href=href) if href else tag("span", name)
        bar = tag("rect", width=f"{_BAR_WIDTH * value / most:.2f}", height="10", class_="bar")
        drawn = tag("svg", bar, viewBox=f"0 0 {_BAR_WIDTH} 10", preserveAspectRatio="none", aria_hidden="true")
        items.append(tag("li", tag("span", shown, class_="name"), drawn, tag("span", text, class_="value")))
    return tag("ul", items, class_="bars", aria_label=label)


def waveform(wave: Sequence[float]) -> Markup:
    """Return the drawing of a sound."""
    lines = [f"M{x} {20 - 19 * height:.1f}V{20 + 19 * height:.1f}" for x, height in enumerate(wave)]
    drawn = tag("path", d="".join(lines), class_="wave")
    return tag(
        "svg",
        drawn,
        viewBox=f"0 0 {max(1, len(wave))} 40",
        preserveAspectRatio="none",
        class_="waveform",
        role="img",
        aria_label="waveform",
    )


def field_view(name: str, shown: Preview, source: str, *, large: bool = False) -> Markup:
    """Return one field of a sample: a picture, a player, or text; ``source`` is the address of its picture or sound."""
    parts: list[Any] = [tag("span", shown.summary, class_="summary")] if large else []
    if shown.problem is not None:
        parts.append(note(shown.problem, kind="error"))
    parts.append(_content(name, shown, source, large))
    return joined_markup(parts)


def _content(name: str, shown: Preview, source: str, large: bool) -> Markup | None:
    if shown.drawable:
        width, height = shown.shape or (1, 1)
        side = 1024 if large else 320
        kind = "picture" if shown.kind == "image" else "picture heat"
        # Width and height reserve the place, so that nothing moves when the picture arrives.
        image = tag(
            "img",
            src=f"{source}?side={side}",
            alt=f"{name}: {shown.summary}",
            width=width,
            height=height,
            loading="lazy",
            decoding="async",
        )
        return tag("div", image, class_=kind)
    if shown.kind == "audio":
        player = tag("audio", src=source, controls=True, preload="none", aria_label=f"{name}: {shown.summary}")
        summary = None if large else tag("span", shown.summary, class_="summary")
        return tag("div", waveform(shown.wave), player, summary, class_="sound")
    if not shown.text:
        return None
    more = " (the beginning)" if shown.cut else ""
    if shown.kind == "json" and large:
        return tag(
            "details", tag("summary", f"{shown.summary}{more}"), tag("pre", shown.text), open=len(shown.text) < 2000
        )
    text = shown.text if large else shown.text[:300]
    return tag("pre", text + ("..." if shown.cut or len(text) < len(shown.text) else ""), class_=shown.kind)


def large_note(sizes: dict[str, int]) -> Markup | None:
    """Return a remark on fields that are too large to be read for a page."""
    if not sizes:
        return None
    named = ", ".join(f"{name} ({size_text(size)})" for name, size in sizes.items())
    return note(f"Too large for this page: {named}", kind="warning")
