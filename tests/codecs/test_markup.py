"""HTML as values: nothing from data becomes markup."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs.markup import Markup, escaped, joined_markup, size_text, tag


class _Seen(HTMLParser):
    """Collects the elements and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text())
def test_text_never_becomes_an_element_or_an_attribute(text: str) -> None:
    seen = _Seen()
    seen.feed(tag("p", text, title=text))
    assert [(name, list(attributes)) for name, attributes in seen.elements] == [("p", ["title"])]


def test_characters_that_cannot_be_seen_are_written_as_numbers() -> None:
    assert escaped("a\x00b\x1b[2J\u202ec\udcff") == "a\\x00b\\x1b[2J\\u202ec\\udcff"
    assert escaped("line\nother\ttab") == "line\nother\ttab"
    assert escaped("\udcff").encode()


def test_attributes_that_are_none_or_false_are_left_out() -> None:
    assert tag("input", type="text", disabled=True, hidden=False, value=None) == '<input type="text" disabled>'
    assert tag("div", aria_label="x", class_="y") == '<div aria-label="x" class="y"></div>'


def test_children_are_flattened_and_markup_is_kept() -> None:
    assert joined_markup(["<", None, [tag("b", "x"), False], Markup("<i>")]) == "&lt;<b>x</b><i>"


def test_sizes_have_units() -> None:
    assert [size_text(size) for size in (0, 999, 1000, 1_500_000, 5e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "5000.0 TB",
    ]
