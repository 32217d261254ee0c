"""Results as Markdown: a table a case, what was promised, and the same put into a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from cases import Case, Result
from promises import PROMISES, Target

SHOWN = (
    "CPU ms a sample",
    "CPU s",
    "bytes a sample",
    "files opened",
    "first s",
    "numpy imported",
    "own MB",
    "private MB",
    "processes, at the end",
    "shards touched",
    "slowest pool busy",
    "threads, at the end",
    "us a sample",
    "us over a loop",
    "with start, samples/s",
)

Rounds = list[Result | str]  # what a row gave in each round; a text is what went wrong
Saved = dict[str, Any]  # of a case: machine, when, quick, rounds, rows


def section(name: str, case: Case, saved: Saved, picture: str | None = None) -> str:
    """One case: its title, its table, its promises, the machine and the versions it was measured with."""
    rows: dict[str, Rounds] = saved["rows"]
    less = ", a tenth of the data" if saved["quick"] else ""
    about = f"{saved['rounds']} rounds{less}, {saved['when']}, `make bench CASE={name}`."
    lines = [f"### {name}: {case.title}", "", about, "", *_table(case, rows), ""]
    if name in PROMISES and not saved["quick"]:  # a tenth of the data shows little but the cost of starting
        lines += [*_targets(PROMISES[name], rows), ""]
    if picture is not None:
        lines += [f"![{name}]({picture})", ""]
    facts = [f"- {what}: {told}" for what, told in saved["machine"].items()]
    return "\n".join([*lines, "<details><summary>Machine and versions</summary>", "", *facts, "", "</details>", ""])


def put(page: Path, name: str, text: str) -> None:
    """Put the section of a case into a page: in the place it had, or at the end."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    old = page.read_text() if page.exists() else "# Benchmarks\n"
    new = f"{begin}\n{text}\n{end}"
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    page.write_text(marked.sub(lambda _: new, old) if marked.search(old) else f"{old.rstrip()}\n\n{new}\n")


def numbers(rounds: Rounds) -> list[Result]:
    """The rounds that went well."""
    return [told for told in rounds if isinstance(told, dict)]


def _table(case: Case, rows: dict[str, Rounds]) -> list[str]:
    """A table of the rows that ran; below it, why others did not."""
    good = {row: numbers(rounds) for row, rounds in rows.items() if numbers(rounds)}
    columns = [(head, tell) for head, tell in _columns(case, good) if any(tell(row) for row in good)]
    lines = _markdown(["row", *(head for head, _ in columns)], [[row, *(t(row) for _, t in columns)] for row in good])
    problems = [(row, told) for row, rounds in rows.items() for told in rounds if isinstance(told, str)]
    return [*lines, *[""] * bool(problems), *(f"- {row}: {told}" for row, told in problems)]


def _columns(case: Case, rows: dict[str, list[Result]]) -> Iterable[tuple[str, Callable[[str], str]]]:
    main_value = "peak MB" if case.peak else "seconds"
    yield main_value, lambda row: _spread(_all(rows[row], main_value))
    yield "samples/s", lambda row: _middle(_rates(rows[row], "samples", 1))
    yield "best", lambda row: _short(max(_rates(rows[row], "samples", 1), default=None))
    yield "MB/s", lambda row: _middle(_rates(rows[row], "nbytes", 1e6))
    if case.baseline in rows:
        yield f"x {case.baseline}", lambda row: _spread(_ratios(rows[row], rows[str(case.baseline)]))
    for value in SHOWN:
        yield value, lambda row, value=value: _middle(_all(rows[row], value))  # type: ignore[misc]


def _all(rounds: list[Result], value: str) -> list[float]:
    return [told[value] for told in rounds if value in told]


def _short(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _middle(found: list[float]) -> str:
    return _short(median(found)) if found else ""


def _spread(found: list[float]) -> str:
    return f"{_middle(found)} [{_short(max(found))} - {_short(min(found))}]" if found else ""


def _rates(rounds: list[Result], value: str, unit: float) -> list[float]:
    return [told[value] / told["seconds"] / unit for told in rounds if value in told]


def _ratios(rounds: list[Result], over: list[Result], value: str = "seconds") -> list[float]:
    pairs = zip(rounds, over, strict=False)
    return [_each(b, value, a) / _each(a, value, b) for a, b in pairs if value in a and value in b]


def _each(told: Result, value: str, other: Result) -> float:
    """Seconds by sample where both rows say how many: one may have done more of them."""
    return told[value] / (told["samples"] if value == "seconds" and "samples" in told and "samples" in other else 1)


def _targets(targets: Iterable[Target], rows: dict[str, Rounds]) -> list[str]:
    return _markdown(["promised", "at", "measured", "kept"], [_verdict(target, rows) for target in targets])


def _verdict(target: Target, rows: dict[str, Rounds]) -> list[str]:
    own = numbers(rows.get(target.row, []))
    figures = _all(own, target.value)
    if target.over is not None:
        figures = _ratios(own, numbers(rows.get(target.over, [])), target.value)
    bound = f"{'at least' if target.at_least else 'at most'} {target.limit:g}"
    if not figures:
        return [target.text, bound, "not measured", ""]
    often = f"{sum(map(target.met, figures))} of {len(figures)} rounds"
    return [target.text, bound, _spread(figures), f"{'yes' if target.met(median(figures)) else '**no**'}, {often}"]


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    lines: list[list[Any]] = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
