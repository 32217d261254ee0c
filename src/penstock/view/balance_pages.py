"""The page of the balance: samples per label, and the distribution of sizes of images, texts, sounds and fields."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from keyword import iskeyword
from typing import Any

import numpy as np

from penstock.codecs.markup import Markup, size_text, tag
from penstock.codecs.previews import preview
from penstock.errors import PenstockError
from penstock.formats.tar.index import Index
from penstock.formats.tar.reader import TarReader
from penstock.plan.expression_text import decode_field
from penstock.view.browser import Browser
from penstock.view.layout import bars, data_table, link, note
from penstock.view.sample_pages import label_text

_MAX_SHARDS = 64  # whose indexes are read
_SECONDS = 2.0  # for the indexes, and again for the samples
_MAX_SAMPLES = 256
_RUNS = 32  # places in the data from which the samples are taken
_MAX_LABELS = 40  # bars of one field
_MAX_DISTINCT = 1000  # values of a field that is taken for a label
_BINS = 8


@dataclass(slots=True)
class Balance:
    """What was found, and in how much of the data.

    Attributes:
        labels: The counts of each label, by field.
        indexed: How many samples the label counts cover, by field; fields from the sample have its size.
        sizes: The lengths or sides that were measured, by what was measured.
        field_bytes: The bytes of each field, from the indexes.
        shards: How many shards' indexes were read.
        samples: How many samples were read.
    """

    labels: dict[str, Counter[Any]] = field(default_factory=dict)
    indexed: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, list[float]] = field(default_factory=dict)
    field_bytes: Counter[str] = field(default_factory=Counter)
    shards: int = 0
    samples: int = 0


def measure_balance(browser: Browser) -> Balance:
    """Measure the balance from the indexes of some shards and from some samples, within a few seconds."""
    balance = Balance()
    _read_indexes(browser, balance)
    _read_samples(browser, balance)
    return balance


def _read_indexes(browser: Browser, balance: Balance) -> None:
    deadline = time.monotonic() + _SECONDS
    shards = browser.shards
    chosen = [shards[n] for n in np.unique(np.linspace(0, len(shards) - 1, _MAX_SHARDS).astype(int)).tolist()]
    for leaf, shard in chosen if shards else []:
        reader = browser.readers[leaf]
        if not isinstance(reader, TarReader) or time.monotonic() > deadline:
            return
        try:
            index = reader.index(shard)
        except PenstockError:
            continue
        balance.shards += 1
        _add_index(index, balance)


def _add_index(index: Index, balance: Balance) -> None:
    for kind, names in enumerate(index.kinds):
        first = index.first[index.kind == kind]
        for number, name in enumerate(names):
            balance.field_bytes[name] += int(index.size[first + number].sum())
    for name, values in index.values.items():
        counts = values.counts()
        labels = balance.labels.setdefault(name, Counter())
        for value, count in counts.items():
            labels[_label(name, value)] += count
        balance.indexed[name] = balance.indexed.get(name, 0) + counts.total()


def _label(name: str, value: Any) -> Any:
    """Return a value as a condition compares it: a number or text."""
    try:
        label = decode_field(name, value)
    except ValueError:
        label = value
    label = label.item() if isinstance(label, np.generic) else label
    return label if isinstance(label, int | float | str) else repr(label)


def _read_samples(browser: Browser, balance: Balance) -> None:
    deadline = time.monotonic() + _SECONDS
    if browser.total is None:
        with suppress(PenstockError):  # a shard that cannot be read is reported where its samples are
            browser.count_shards(None if browser.indexed else range(1))
    total = browser.total if browser.total is not None else browser.counted
    length = max(1, _MAX_SAMPLES // _RUNS)
    stop = 0  # of the run before: runs over a small dataset overlap
    for start in dict.fromkeys(np.linspace(0, max(0, total - length), _RUNS).astype(int).tolist()):
        if time.monotonic() > deadline or not total:
            break
        positions = list(range(max(start, stop), min(start + length, total)))
        stop = start + length
        for sample in browser.page(positions):
            balance.samples += 1
            for name, value in sample.fields.items():
                _add_field(balance, name, value)


def _add_field(balance: Balance, name: str, value: Any) -> None:
    shown = preview(name, value)
    if shown.kind == "image" and shown.shape:
        balance.sizes.setdefault(f"{name}: longer side, pixels", []).append(max(shown.shape))
    elif shown.kind == "audio":
        balance.sizes.setdefault(f"{name}: seconds", []).append(float(shown.summary.partition(" ")[0]))
    elif shown.kind == "text":
        text = value if isinstance(value, str | bytes) else shown.text
        balance.sizes.setdefault(f"{name}: characters", []).append(len(text))
    if name not in balance.indexed and shown.kind in ("number", "text") and len(shown.text) <= 64:
        balance.labels.setdefault(name, Counter())[_label(name, value)] += 1


def balance_page(browser: Browser, balance: Balance) -> list[Any]:
    """Return the content of the page."""
    total = browser.total
    shards = f"{balance.shards:,} of {len(browser.shards):,} shards' indexes and " if balance.shards else ""
    samples = f"{balance.samples:,} of {total:,} samples" if total is not None else f"{balance.samples:,} samples"
    return [
        tag("h1", "Balance", tag("small", f"from {shards}{samples}")),
        [_labels(browser, name, counts, balance) for name, counts in balance.labels.items()],
        [_histogram(name, values) for name, values in balance.sizes.items() if values],
        _bytes(balance),
        note("Nothing was measured: there are no samples.") if not balance.samples else None,
    ]


def _labels(browser: Browser, name: str, counts: Counter[Any], balance: Balance) -> Markup | None:
    if not counts or len(counts) > _MAX_DISTINCT or len(counts) == counts.total() > 1:
        return None
    rows = []
    for label, count in counts.most_common(_MAX_LABELS):
        shown = label_text(browser, name, str(label))
        rows.append((shown, float(count), f"{count:,}", link("/samples", where=_condition(name, label))))
    more = len(counts) - len(rows)
    covered = balance.indexed.get(name, balance.samples)
    return tag(
        "section",
        tag("h2", name, tag("small", f"{len(counts):,} values in {covered:,} samples")),
        bars(rows, f"Samples of each {name}"),
        note(f"and {more:,} more values") if more else None,
        class_="field",
    )


def _condition(name: str, label: Any) -> str:
    plain = name.isidentifier() and not iskeyword(name) and name not in ("_", "key", "shard")
    return f"{name if plain else f'_[{name!r}]'} == {label!r}"


def _histogram(name: str, values: Sequence[float]) -> Markup:
    array = np.array(values, float)
    low, high = float(array.min()), float(array.max())
    if low == high:
        rows = [(f"{low:g}", float(len(values)), f"{len(values):,}", None)]
    else:
        counts, edges = np.histogram(array, _BINS)
        spans = [f"{start:.4g} to {stop:.4g}" for start, stop in pairwise(edges.tolist())]
        rows = [(span, float(count), f"{count:,}", None) for span, count in zip(spans, counts.tolist(), strict=True)]
    middle = f"median {np.median(array):.4g}, in {len(values):,} samples"
    return tag("section", tag("h2", name, tag("small", middle)), bars(rows, name), class_="field")


def _bytes(balance: Balance) -> Markup | None:
    if not balance.field_bytes:
        return None
    rows = [(name, size_text(count)) for name, count in balance.field_bytes.most_common()]
    heading = tag("h2", "Bytes per field", tag("small", f"in {balance.shards:,} shards"))
    return tag("section", heading, data_table(("Field", "Bytes"), rows), class_="field")
