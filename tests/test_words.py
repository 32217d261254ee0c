"""Words that must not come back: private metaphors, and turns of phrase that a native reader stumbles over."""

from __future__ import annotations

import functools
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "examples", "benchmarks")
HERE = Path(__file__)

# As a part of a name: `away_hand`, `AwayHand`, `hand`; the word to use instead.
NAMES = {
    "afar": "remote",
    "arriving": "prefetch",
    "board": "heartbeat",
    "cargo": "payload",
    "crew": "pool_spec",
    "crews": "pool_specs",
    "deal": "share",
    "dealing": "worker_split",
    "dealt": "share",
    "hand": "worker_proxy",
    "hands": "worker_proxies",
    "heard": "decode",
    "ink": "write_thread",
    "nursery": "fork_server",
    "offer": "torch_isinstance",
    "outlet": "stream_writer",
    "outstanding": "delivered",
    "parcel": "block_codec",
    "press": "publish_thread",
    "settling": "commit_outputs",
    "shelf": "cache_folder",
    "spool": "spill",
    "spot": "span",
    "spots": "located",
    "telling": "origin_codec",
    "turn": "folder_lock",
}

# In src, as the whole name of a module, class or function; in a longer name or a sentence they are ordinary words.
DEFINITIONS = {
    "book": "LedgerWriter",
    "but": "without",
    "also": "with_",
    "kept": "cached_object",
    "later": "lazy",
    "marks": "row_offsets",
    "mine": "what it is",
    "named": "external_files",
    "pace": "BlockSizer, StallDetector, bench",
    "settle": "commit, resolve, finish",
    "sums": "hash_thread",
    "theirs": "what it is",
    "told": "reported",
    "wire": "transport",
    "witness": "DeliveryCallback",
}

# In prose and messages too, where these words have no other use.
PROSE = re.compile(
    r"\b(afar|cargo|crews?|how-manieth|ink|nursery|outlets?|parcels?|settling|shelf|spool(ed|s)?|spots|telling)\b",
    re.IGNORECASE,
)

# Turns of phrase that a native reader stumbles over, and what they stood for.
PHRASES = {
    r"\bon where (it|they|one) (was|were|is|stood|stands)\b": "resumes where it was interrupted",
    r"\bgo(es|ing)? on (where|with|from)\b": "resumes, continues",
    r"\btaken? up again\b": "resumed",
    r"\bat hand\b": "current, available",
    r"\b(whoever|somebody|nobody)\b": "the caller, the worker, no process",
    r"\bwhere (it|they) st(ands?|ood)\b": "its position, its progress",
    r"\bmakes? no sense\b": "is not valid",
    r"\bMade by ``": "Use ``...`` to create one",
    r"\bof the kind\b": "name the thing",
    r"\b(Read|Covered) are\b": "Supported formats:, It covers",
    r"\bthat which\b": "what",
    r"\bthose\b[^.;:]* aside\b": "except those",
    r"\bhands? (it |both |them )?on\b": "passes on",
    r"\bDo as ``": "Read as ``...`` does",
}

# "is no number" for "is not a number"; "there is no index" and "is no longer" are English.
_COMPARISONS = "longer|more|less|fewer|better|worse|larger|smaller|faster|slower|different|such"
IS_NO = re.compile(rf"(?<![Tt]here )(?<!there may )\b(?:is|are|was|were|be) no (?!(?:{_COMPARISONS})\b)\w+")


def _python(*folders: str) -> Iterator[Path]:
    for folder in folders or FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != HERE and not any(part.startswith(".") for part in path.relative_to(ROOT).parts):
                yield path


def _pages() -> Iterator[Path]:
    yield from sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"})


@functools.cache
def _parts(name: str) -> frozenset[str]:
    """The words of a name: of ``AwayHand`` and ``away_hand``, ``away`` and ``hand``."""
    return frozenset(part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name))


def _definitions(path: Path) -> list[str]:
    """The names of a module, and of its classes and functions."""
    return [path.stem, *re.findall(r"^ *(?:class|(?:async )?def) (\w+)", path.read_text(), re.MULTILINE)]


def _tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a module, if its text has one of the words: cutting a text into tokens takes long."""
    text = path.read_text()
    if any(_parts(name) & NAMES.keys() for name in {*re.findall(r"[A-Za-z_]+", text)}):
        yield from tokenize.generate_tokens(io.StringIO(text).readline)


def _lines(pattern: re.Pattern[str]) -> list[str]:
    """The lines of all sources and pages that match."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in _texts()
        if pattern.search(text)
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


@functools.cache
def _texts() -> list[tuple[Path, str]]:
    return [(path, path.read_text()) for path in (*_python(), *_pages())]


def test_no_name_is_a_private_metaphor() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}, write {NAMES[word]}"
        for path in _python()
        for token in _tokens(path)
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string)
        for word in _parts(token.string) & NAMES.keys()
    ]
    found += [str(path.relative_to(ROOT)) for path in _python() if _parts(path.stem) & NAMES.keys()]
    assert not found, "\n".join(found)


def test_no_module_class_or_function_has_a_private_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}, write {DEFINITIONS[word]}"
        for path in _python("src")
        for name in _definitions(path)
        if (word := name.strip("_").lower()) in DEFINITIONS
    ]
    assert not found, "\n".join(found)


def test_no_text_has_a_phrase_to_stumble_over() -> None:
    found = [
        f"{line}, write {instead}"
        for line in _lines(re.compile("|".join(PHRASES)))
        for phrase, instead in PHRASES.items()
        if re.search(phrase, line)
    ]
    assert not found, "\n".join(found)


def test_no_text_has_a_private_word() -> None:
    found = _lines(PROSE)
    assert not found, "\n".join(found)


def test_what_is_not_a_thing_is_not_no_thing() -> None:
    found = _lines(IS_NO)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("is no number of bytes", True),
        ("they are no names", True),
        ("there is no index", False),
        ("it is no longer there", False),
        ("no sample is lost", False),
    ],
)
def test_the_phrase_is_told_from_its_english_neighbours(text: str, wrong: bool) -> None:
    assert bool(IS_NO.search(text)) is wrong


def test_a_name_is_taken_apart_at_its_words() -> None:
    assert _parts("RemoteWorkerProxy") == {"remote", "worker", "proxy"}
    assert _parts("_HTTPServer_name2") == {"http", "server", "name"}
