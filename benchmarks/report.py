"""Formats results as Markdown: one table per case, its promised figures, and the section of a case in a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from cases import Case, Result
from promises import PROMISES, Target

EXTRA_COLUMNS = (
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

Rounds = list[Result | str]  # the result of a row in each round, or a text that says what went wrong
Saved = dict[str, Any]  # a case as it is stored: machine, when, quick, rounds, rows


def section(name: str, case: Case, saved: Saved, chart: str | None = None) -> str:
    """Return the section of a case: its title, table and promised figures, and the machine with all versions."""
    rows: dict[str, Rounds] = saved["rows"]
    size = ", a tenth of the data" if saved["quick"] else ""
    summary = f"{saved['rounds']} rounds{size}, {saved['when']}, `make bench CASE={name}`."
    lines = [f"### {name}: {case.title}", "", summary, "", *_table(case, rows), ""]
    if name in PROMISES and not saved["quick"]:  # a tenth of the data shows little more than the cost of starting
        lines += [*_target_table(PROMISES[name], rows), ""]
    if chart is not None:
        lines += [f"![{name}]({chart})", ""]
    facts = [f"- {fact}: {value}" for fact, value in saved["machine"].items()]
    return "\n".join([*lines, "<details><summary>Machine and versions</summary>", "", *facts, "", "</details>", ""])


def update_page(page: Path, name: str, text: str) -> None:
    """Replace the section of a case in a page, or append it."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    old = page.read_text() if page.exists() else "# Benchmarks\n"
    new = f"{begin}\n{text}\n{end}"
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    page.write_text(marked.sub(lambda _: new, old) if marked.search(old) else f"{old.rstrip()}\n\n{new}\n")


def successful(rounds: Rounds) -> list[Result]:
    """Return the results of the rounds that did not fail."""
    return [result for result in rounds if isinstance(result, dict)]


def format_number(number: float) -> str:
    """Return a number with three digits, or as a whole number from 100 on."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _table(case: Case, rows: dict[str, Rounds]) -> list[str]:
    """Return a table of the rows that ran, and below it a list of the problems of the others."""
    measured = {row: successful(rounds) for row, rounds in rows.items() if successful(rounds)}
    columns = [(head, cell) for head, cell in _columns(case, measured) if any(cell(row) for row in measured)]
    head = ["row", *(head for head, _ in columns)]
    lines = _markdown(head, [[row, *(cell(row) for _, cell in columns)] for row in measured])
    problems = [(row, problem) for row, rounds in rows.items() for problem in rounds if isinstance(problem, str)]
    return [*lines, *[""] * bool(problems), *(f"- {row}: {problem}" for row, problem in problems)]


def _columns(case: Case, rows: dict[str, list[Result]]) -> Iterable[tuple[str, Callable[[str], str]]]:
    """Yield the head of each column, and a function that returns the cell of a row."""
    main_value = "peak MB" if case.measures_memory else "seconds"
    yield main_value, lambda row: _spread(_all(rows[row], main_value))
    yield "samples/s", lambda row: _median(_rates(rows[row], "samples", 1))
    yield "best", lambda row: _best(_rates(rows[row], "samples", 1))
    yield "MB/s", lambda row: _median(_rates(rows[row], "nbytes", 1e6))
    if case.baseline in rows:
        yield f"x {case.baseline}", lambda row: _spread(_ratios(rows[row], rows[str(case.baseline)]))
    for value in EXTRA_COLUMNS:
        yield value, lambda row, value=value: _median(_all(rows[row], value))  # type: ignore[misc]


def _all(results: list[Result], value: str) -> list[float]:
    return [result[value] for result in results if value in result]


def _median(numbers: list[float]) -> str:
    return format_number(median(numbers)) if numbers else ""


def _best(numbers: list[float]) -> str:
    return format_number(max(numbers)) if numbers else ""


def _spread(numbers: list[float]) -> str:
    return f"{_median(numbers)} [{format_number(max(numbers))} - {format_number(min(numbers))}]" if numbers else ""


def _rates(results: list[Result], value: str, unit: float) -> list[float]:
    return [result[value] / result["seconds"] / unit for result in results if value in result]


def _ratios(results: list[Result], over: list[Result], value: str = "seconds") -> list[float]:
    pairs = zip(results, over, strict=False)
    return [_comparable(b, value, a) / _comparable(a, value, b) for a, b in pairs if value in a and value in b]


def _comparable(result: Result, value: str, other: Result) -> float:
    """Return a value; seconds are per sample if both results count samples, since their numbers may differ."""
    per_sample = value == "seconds" and "samples" in result and "samples" in other
    return result[value] / (result["samples"] if per_sample else 1)


def _target_table(targets: Iterable[Target], rows: dict[str, Rounds]) -> list[str]:
    return _markdown(["promised", "at", "measured", "kept"], [_verdict(target, rows) for target in targets])


def _verdict(target: Target, rows: dict[str, Rounds]) -> list[str]:
    results = successful(rows.get(target.row, []))
    figures = _all(results, target.value)
    if target.over is not None:
        figures = _ratios(results, successful(rows.get(target.over, [])), target.value)
    bound = f"{'at least' if target.at_least else 'at most'} {target.limit:g}"
    if not figures:
        return [target.text, bound, "not measured", ""]
    rounds = f"{sum(map(target.met, figures))} of {len(figures)} rounds"
    return [target.text, bound, _spread(figures), f"{'yes' if target.met(median(figures)) else '**no**'}, {rounds}"]


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    lines: list[list[Any]] = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
