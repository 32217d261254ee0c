"""The pages of samples: a grid by position, key, condition or chance, and one sample with every field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.codecs.markup import Markup, size_text, tag
from penstock.codecs.previews import Preview, hex_dump, preview
from penstock.codecs.registry import codec_of
from penstock.errors import PlanError
from penstock.formats.tar.reader import TarReader
from penstock.view.browser import Browser, ShownSample, field_spans, parse_position
from penstock.view.layout import data_table, field_view, large_note, link, note

DEFAULT_COUNT, MAX_COUNT = 40, 200
_CARD_KINDS = ("image", "audio", "array", "text", "json", "bytes")  # what a card shows, the first of these
_NO_INDEX = "These remote shards have no index: each is fetched whole when it is shown. Run `penstock index` on them."
_MAX_CHIP = 60  # characters of a value that is shown as a label


@dataclass(frozen=True, slots=True)
class Query:
    """What a page of samples shows, as its address says.

    Attributes:
        at: The first position, in the stored or random order.
        count: Samples on the page.
        where: The condition; empty for all samples.
        seed: The seed of a random order; None for the stored order.
        find: A position or a key to go to.
    """

    at: int = 0
    count: int = DEFAULT_COUNT
    where: str = ""
    seed: int | None = None
    find: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Query:
        """Return the query of an address.

        Raises:
            PlanError: A number is not valid.
        """
        count = parse_position(parameters.get("n") or str(DEFAULT_COUNT), None)
        seed = parameters.get("seed", "").strip()
        at = parse_position(parameters.get("at") or "0", None)
        if page := parameters.get("page", "").strip():
            at = max(0, parse_position(page, None) - 1) * count
        return cls(
            at=at,
            count=min(max(1, count), MAX_COUNT),
            where=parameters.get("where", "").strip(),
            seed=parse_position(seed, None) if seed else None,
            find=parameters.get("find", "").strip(),
        )

    def address(self, at: int | None) -> str:
        """Return the address of the page that begins at ``at``."""
        return link("/samples", at=at, n=self.count, where=self.where, seed=self.seed)


def samples_page(browser: Browser, query: Query) -> list[Any]:
    """Return the content of a page of samples.

    Raises:
        PlanError: The condition is not valid.
    """
    remark: Markup | None = None
    following: int | None = None
    if query.where:
        found = browser.search(query.where, query.at, query.count)
        positions, following = found.positions, found.after
        source = "the indexes" if found.from_index else "the fields"
        end = "to the end" if found.after is None else f"up to sample {found.after - 1:,}"
        remark = note(f"{len(positions):,} found; {found.searched:,} samples searched by {source}, {end}.")
    elif query.seed is not None:
        positions = browser.random_positions(query.seed, query.at, query.count)
    else:
        positions = _positions(browser, query)
    if not query.where and len(positions) == query.count:
        following = query.at + query.count
        following = None if browser.total is not None and following >= browser.total else following
    shown = browser.page(positions)
    cards = [card(browser, sample) for sample in shown]
    grid = tag("ol", cards, class_="grid", id="grid", aria_label="Samples")
    empty = note("No sample here.") if not cards else None
    slow = None if browser.indexed else note(_NO_INDEX, kind="warning")
    return [_heading(browser), _controls(query), slow, remark, empty, grid, _pages(query, following, browser.total)]


def _positions(browser: Browser, query: Query) -> list[int]:
    try:
        browser.place(query.at)
    except IndexError:
        return []
    total = browser.total
    if total is not None:
        return list(range(query.at, min(query.at + query.count, total)))
    try:
        browser.place(query.at + query.count - 1)
    except IndexError:
        return list(range(query.at, browser.counted))
    return list(range(query.at, query.at + query.count))


def _heading(browser: Browser) -> Markup:
    total = browser.total
    count = f"{total:,} samples" if total is not None else f"{browser.counted:,} samples counted so far"
    shards = len(browser.shards)
    return tag("h1", "Samples", tag("small", f"{count} in {shards:,} {'shard' if shards == 1 else 'shards'}"))


def _controls(query: Query) -> Markup:
    keep = tag("input", type="hidden", name="n", value=query.count)

    def control(name: str, label: str, value: Any, hint: str, **more: Any) -> Markup:
        field = tag("input", name=name, value=value, placeholder=hint, autocomplete="off", spellcheck="false", **more)
        return tag("form", tag("label", tag("span", label), field), keep, action="/samples", class_="control")

    return tag(
        "div",
        control("where", "Condition", query.where, 'cls == 3 and "dog" in txt', id="search", class_="wide"),
        control("find", "Position or key", query.find, "12345"),
        control("page", "Page", "", "1", inputmode="numeric"),
        control("seed", "Random, by seed", "" if query.seed is None else query.seed, "0", inputmode="numeric"),
        class_="controls",
    )


def _pages(query: Query, following: int | None, total: int | None) -> Markup:
    before = None if query.where or query.at == 0 else max(0, query.at - query.count)
    number = query.at // query.count + 1
    pages = "" if total is None else f" of {max(1, -(-total // query.count)):,}"
    where = f"Page {number:,}{pages}" if not query.where else f"From sample {query.at:,}"
    return tag(
        "nav",
        tag("a", "Previous", href=query.address(before), rel="prev") if before is not None else tag("span", "Previous"),
        tag("span", where),
        tag("a", "Next", href=query.address(following), rel="next") if following is not None else tag("span", "Next"),
        class_="pages",
        aria_label="Pages",
    )


def card(browser: Browser, sample: ShownSample) -> Markup:
    """Return a sample in a grid: its best picture, sound or text, and its small values."""
    name = f"{sample.position:,}" if sample.key is None else sample.key
    title = tag("a", name, href=f"/sample/{sample.position}", class_="key")
    if sample.problem is not None:
        return tag("li", title, note(sample.problem, kind="error"), class_="card")
    shown = {field: preview(field, value) for field, value in sample.fields.items()}
    names = [field for field in shown if shown[field].kind in _CARD_KINDS]
    chosen = min(names, key=lambda field: _CARD_KINDS.index(shown[field].kind), default=None)
    others = {field: value for field, value in shown.items() if field != chosen}
    main = None
    if chosen is not None:
        main = field_view(chosen, shown[chosen], f"/media/{sample.position}/{list(shown).index(chosen)}")
    return tag("li", title, main, large_note(sample.large), _chips(browser, others), class_="card")


def _chips(browser: Browser, shown: Mapping[str, Preview]) -> Markup:
    chips = []
    for name, value in shown.items():
        if value.kind == "number" or (value.kind == "text" and 0 < len(value.text) <= _MAX_CHIP):
            chips.append(tag("li", tag("b", name), " ", label_text(browser, name, value.text)))
    return tag("ul", chips[:6], class_="chips")


def label_text(browser: Browser, name: str, text: str) -> str:
    """Return a value with the name of its class, if it is the number of one."""
    names = browser.class_names(name)
    if names and text.strip().isdigit() and int(text) < len(names):
        return f"{text.strip()} {names[int(text)]}"
    return text.strip()


def sample_page(browser: Browser, position: int, *, stages: bool) -> list[Any]:
    """Return the content of the page of one sample.

    Raises:
        PlanError: There is no such sample.
    """
    try:
        sample = browser.sample(position)
    except IndexError as exc:
        raise PlanError(str(exc)) from exc
    name = f"Sample {position:,}" if sample.key is None else sample.key
    fields = [_field(browser, sample, number) for number in range(len(sample.fields))]
    before = f"/sample/{position - 1}" if position else None
    last = browser.total is not None and position + 1 >= browser.total
    return [
        tag("h1", name, tag("small", f"sample {position:,}")),
        tag("p", tag("a", "Through the stages", href=f"/stages?at={position}&order=stored")) if stages else None,
        note(sample.problem, kind="error") if sample.problem is not None else None,
        large_note(sample.large),
        fields,
        _where(browser, sample),
        tag(
            "nav",
            tag("a", "Previous", href=before, rel="prev") if before else tag("span", "Previous"),
            tag("a", "All samples", href=link("/samples", at=position - position % DEFAULT_COUNT), rel="up"),
            tag("a", "Next", href=f"/sample/{position + 1}", rel="next") if not last else tag("span", "Next"),
            class_="pages",
            aria_label="Samples",
        ),
    ]


def _field(browser: Browser, sample: ShownSample, number: int) -> Markup:
    name, value = list(sample.fields.items())[number]
    shown = preview(name, value)
    label = label_text(browser, name, shown.text) if shown.kind == "number" else None
    raw = value.get("bytes") if isinstance(value, dict) else value
    stored = (
        tag("details", tag("summary", "Bytes"), tag("pre", hex_dump(raw), class_="bytes"))
        if isinstance(raw, bytes) and shown.kind != "bytes"
        else None
    )
    codec = codec_of(name) if isinstance(value, bytes) else None
    how = f"decoded as {codec}" if codec and shown.problem is None else None
    return tag(
        "section",
        tag("h2", name, tag("small", how) if how else None),
        tag("p", label, class_="label") if label and label != shown.text else None,
        field_view(name, shown, f"/media/{sample.position}/{number}", large=True),
        stored,
        class_="field",
    )


def _where(browser: Browser, sample: ShownSample) -> Markup:
    reader = browser.readers[sample.place.leaf]
    rows: list[tuple[Any, Any, Any]] = []
    if isinstance(reader, TarReader):
        spans = field_spans(reader.index(sample.place.shard), sample.place.row)
        rows = [(name, f"{start:,}", size_text(size)) for name, (start, size) in spans.items()]
    facts = tag(
        "dl",
        tag("dt", "Shard"),
        tag("dd", sample.shard),
        tag("dt", "Number in the shard"),
        tag("dd", f"{sample.place.row:,}"),
    )
    return tag(
        "section",
        tag("h2", "Where it is stored"),
        facts,
        data_table(("Field", "Offset", "Size"), rows) if rows else None,
        class_="field",
    )
