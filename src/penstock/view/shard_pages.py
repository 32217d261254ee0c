"""The page of shards: counts, bytes and checksums, and a background task that verifies them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.codecs.markup import Markup, size_text, tag
from penstock.dataset.conversion import format_to_inspect
from penstock.errors import PenstockError, message_of
from penstock.formats.tar.reader import TarReader
from penstock.inspection.verify import (
    FileToVerify,
    Problem,
    shards_to_verify,
    tables_to_verify,
    verify_shard,
    verify_table,
)
from penstock.storage import redacted, url_patterns
from penstock.view.browser import Browser
from penstock.view.layout import data_table, link, note

_MAX_ROWS = 500  # shards on a page
_WORKERS = 2
_MAX_PROBLEMS = 1000  # that are kept


class VerifyTask:
    """Verifies all shards in the background, once."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.total: int | None = None
        self.done = 0
        self.problems: list[Problem] = []
        self.failure: str | None = None
        self.states: dict[str, bool] = {}

    @property
    def possible(self) -> bool:
        """Whether there are files that can be verified."""
        return bool(self._urls)

    @property
    def begun(self) -> bool:
        """Whether the task was started."""
        return self._thread is not None

    @property
    def running(self) -> bool:
        """Whether the task is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the task; while it runs, a second call does nothing."""
        with self._lock:
            if self.running or self._stop.is_set():
                return
            self.total, self.done, self.problems, self.failure, self.states = None, 0, [], None, {}
            self._thread = threading.Thread(target=self._run, name="penstock view verify", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the task after the shards that it is reading."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            patterns = url_patterns(list(self._urls))
            tar = format_to_inspect(patterns[0]) == "tar"
            files = shards_to_verify(patterns) if tar else tables_to_verify(patterns)
            self.total = len(files)
            with ThreadPoolExecutor(_WORKERS, "penstock view verify") as pool:
                list(pool.map(lambda file: self._verify(file, tar), files))
        except Exception as exc:
            self.failure = str(exc) if isinstance(exc, PenstockError) else message_of(exc)

    def _verify(self, file: FileToVerify, tar: bool) -> None:
        if self._stop.is_set():
            return
        problems = verify_shard(file) if tar else verify_table(file)
        with self._lock:
            self.problems += problems[: max(0, _MAX_PROBLEMS - len(self.problems))]
            self.states[redacted(file.url)] = not problems
            self.done += 1


def shards_page(browser: Browser, task: VerifyTask, start: int) -> list[Any]:
    """Return the content of the page, from shard ``start`` on."""
    rows = []
    known = _checksums(browser)
    chosen = browser.shards[start : start + _MAX_ROWS]
    for number, (leaf, shard) in enumerate(chosen, start):
        url = browser.readers[leaf].url(shard)
        first = browser.begin_of(number) if browser.total is not None or number <= start + 8 else None
        samples = f"{browser.count(number):,}" if first is not None else "not counted yet"
        size = known.get((leaf, shard))
        name = tag("a", url.rpartition("/")[2] or url, href=link("/samples", at=first)) if first is not None else url
        rows.append((name, samples, size_text(size) if size is not None else "", _state(task, url)))
    total = sum(size for size in known.values())
    whole = f", {size_text(total)}" if total else ""
    more = start + _MAX_ROWS < len(browser.shards)
    return [
        tag("h1", "Shards", tag("small", f"{len(browser.shards):,}{whole}")),
        verify_panel(task),
        data_table(("Shard", "Samples", "Bytes", "Checksum"), rows),
        tag("p", tag("a", "More shards", href=link("/shards", at=start + _MAX_ROWS), rel="next")) if more else None,
    ]


def _checksums(browser: Browser) -> dict[tuple[int, int], int]:
    """Return the sizes of shards, where they are known without a request for each of them."""
    found: dict[tuple[int, int], int] = {}
    for leaf, reader in enumerate(browser.readers):
        if reader.traits.remote and not (isinstance(reader, TarReader) and reader.counts(scan=False) is not None):
            continue
        try:
            found |= {(leaf, shard): size for shard, size in enumerate(reader.sizes()) if size >= 0}
        except PenstockError:
            continue
    return found


def _state(task: VerifyTask, url: str) -> Any:
    state = task.states.get(url)
    if state is None:
        return "not verified"
    return "good" if state else tag("strong", "damaged")


def verify_panel(task: VerifyTask) -> Markup:
    """Return the state of the verification, with the button that starts it."""
    if not task.possible:
        return tag("section", id="verify")
    parts: list[Any] = []
    if task.total is not None:
        label = f"{task.done:,} of {task.total:,} verified"
        parts.append(tag("label", label, tag("progress", value=task.done, max=max(1, task.total))))
    if task.failure:
        parts.append(note(task.failure, kind="error"))
    if task.problems:
        items = [
            tag("li", tag("b", problem.shard.rpartition("/")[2]), f": {problem.problem}") for problem in task.problems
        ]
        parts.append(tag("ul", items, class_="problems"))
    elif task.begun and task.done == task.total:
        parts.append(note("No problems found."))
    if not task.running:
        button = tag("button", "Verify again" if task.begun else "Verify all shards")
        parts.append(tag("form", button, method="post", action="/verify"))
    return tag("section", parts, id="verify", data_live="/verify" if task.running else None, aria_live="polite")
