"""The page of a run, live or over: rates, where the time of each stage goes, memory, ranks; and Prometheus text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from penstock.codecs.markup import Markup, size_text, tag
from penstock.engines.run_log import LoggedRun, RunLogReader
from penstock.engines.stats import number, percent, short_name
from penstock.view.layout import data_table, note

_WIDTH, _HEIGHT = 640, 150  # of a chart, in its own units
_MAX_POINTS = 300
_MIN_INTERVAL_S = 0.3  # a rate over less time says little
_SHARES = ("busy", "starved", "blocked")
_STATUS = {
    "running": "running",
    "ended": "ended",
    "lost": "its process is gone: it was killed or it crashed",
    "silent": "no news: it hangs, or its host is gone",
}

Series = tuple[str, list[tuple[float, float]]]


class RunView:
    """Reads the files of a monitor's folder; safe to use from threads."""

    def __init__(self, folder: str) -> None:
        self._reader = RunLogReader(folder)
        self._lock = threading.Lock()

    def latest(self) -> list[LoggedRun]:
        """Return the latest run of every rank: of each process that wrote, the last one."""
        with self._lock:
            runs = self._reader.read()
        by_rank: dict[Any, LoggedRun] = {}
        for run in runs:
            by_rank[run.begin.get("rank"), run.begin.get("world")] = run
        newest = max((run.begin["time"] for run in by_rank.values()), default=0)
        world = next((run.begin.get("world") for run in by_rank.values() if run.begin["time"] == newest), None)
        chosen = [run for run in by_rank.values() if run.begin.get("world") == world]
        return sorted(chosen, key=lambda run: (int(run.begin.get("rank") or 0), float(run.begin["time"])))

    def content(self) -> list[Any]:
        """Return the content of the page."""
        runs, now = self.latest(), time.time()
        if not runs:
            return [tag("h1", "Run"), note("No run has written here yet. The page looks again every two seconds.")]
        begun = min(float(run.begin["time"]) for run in runs)
        statuses = [run.status(now) for run in runs]
        bad = [
            f"Rank {run.begin.get('rank')}: {_STATUS[s]}."
            for run, s in zip(runs, statuses, strict=True)
            if s in ("lost", "silent")
        ]
        return [
            tag(
                "h1", "Run", tag("small", f"{len(runs)} of {runs[0].begin.get('world', 1)} ranks, {_summary(statuses)}")
            ),
            [note(text, kind="error") for text in bad],
            [_sentence(run, len(runs) > 1) for run in runs if run.lines],
            _ranks_table(runs, statuses),
            _charts(runs, begun),
            [_stages(run) for run in runs if run.lines],
            tag("details", tag("summary", "The plan"), tag("pre", runs[0].begin.get("plan", ""))),
        ]

    def metrics(self) -> str:
        """Return the latest statistics of every rank as Prometheus text."""
        return "".join(_metric_lines(self.latest(), time.time()))


def _summary(statuses: Sequence[str]) -> str:
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))


def _sentence(run: LoggedRun, several: bool) -> Markup:
    rank = tag("b", f"Rank {run.begin.get('rank')}: ") if several else None
    return tag("p", rank, str(run.last.get("bottleneck", "")), class_="bottleneck")


def _ranks_table(runs: Sequence[LoggedRun], statuses: Sequence[str]) -> Markup:
    rows = []
    for run, status in zip(runs, statuses, strict=True):
        last = run.last
        rows.append(
            (
                run.begin.get("rank"),
                tag("span", status, class_=f"status {status}"),
                run.begin.get("epoch"),
                f"{int(last.get('items', 0)):,}",
                f"{number(_float(last, 'samples_per_s'))}/s",
                percent(_float(last, "consumer")),
                size_text(_float(last, "memory")),
                f"{_float(last, 'seconds'):.1f} s",
                f"{run.begin.get('host')}, process {run.begin.get('pid')}",
            )
        )
    heads = ("Rank", "State", "Epoch", "Items", "Rate", "Consumer busy", "Memory", "Time", "Where")
    return data_table(heads, rows)


def _charts(runs: Sequence[LoggedRun], begun: float) -> Markup:
    names = [f"rank {run.begin.get('rank')}" for run in runs]
    rates = [(name, _rates(run, begun)) for name, run in zip(names, runs, strict=True)]
    memory = [
        (name, _points(run, begun, lambda line: _float(line, "memory") / 1e6))
        for name, run in zip(names, runs, strict=True)
    ]
    queue = [
        (name, _points(run, begun, lambda line: sum(_float(s, "queue_fill") for s in line["segments"])))
        for name, run in zip(names, runs, strict=True)
    ]
    workers = [
        (name, _points(run, begun, lambda line: sum(_float(s, "workers") for s in line["segments"])))
        for name, run in zip(names, runs, strict=True)
    ]
    charts = [
        line_chart("Items per second", rates),
        line_chart("Memory, MB", memory),
        line_chart("Blocks in flight", queue),
        line_chart("Workers", workers),
    ]
    busiest = [(f"{name}", series) for name, series in _busy_series(runs[0], begun)]
    charts.append(line_chart(f"Busy share of each stage, rank {runs[0].begin.get('rank')}", busiest, top=1.0))
    return tag("div", charts, class_="charts")


def _points(run: LoggedRun, begun: float, value: Any) -> list[tuple[float, float]]:
    return [(float(line["time"]) - begun, float(value(line))) for line in _thinned(run.lines)]


def _rates(run: LoggedRun, begun: float) -> list[tuple[float, float]]:
    """Return the rate between each two lines."""
    lines = [run.begin, *_thinned(run.lines)]
    points = []
    for before, after in pairwise(lines):
        seconds = float(after["time"]) - float(before["time"])
        if seconds > _MIN_INTERVAL_S:
            items = _float(after, "items") - _float(before, "items")
            points.append((float(after["time"]) - begun, items / seconds))
    return points


def _busy_series(run: LoggedRun, begun: float) -> Iterable[Series]:
    """Yield the busy share of each stage between each two lines."""
    for place in range(len(run.last.get("segments", ()))):
        points = []
        for before, after in pairwise([{"segments": [], "seconds": 0.0}, *_thinned(run.lines)]):
            seconds = _float(after, "seconds") - _float(before, "seconds")
            if seconds > _MIN_INTERVAL_S and place < len(after["segments"]):
                then = _float(before["segments"][place], "busy") if place < len(before["segments"]) else 0.0
                busy = _float(after["segments"][place], "busy") * _float(after, "seconds") - then * _float(
                    before, "seconds"
                )
                points.append((float(after["time"]) - begun, min(1.0, max(0.0, busy / seconds))))
        yield short_name(str(run.last["segments"][place].get("name", ""))), points


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    step = -(-len(lines) // _MAX_POINTS) if lines else 1
    return lines[::-step][::-1] if step > 1 else lines


def _float(record: dict[str, Any], name: str) -> float:
    value = record.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _stages(run: LoggedRun) -> Markup:
    rows = []
    for segment in run.last["segments"]:
        faults = [
            f"{name} {segment[name]:,}" for name in ("retries", "skips", "deaths", "timeouts") if segment.get(name)
        ]
        rows.append(
            (
                str(segment.get("name", "")),
                str(segment.get("on", "")),
                f"{int(_float(segment, 'workers'))}",
                number(_float(segment, "samples_per_s")),
                number(_float(segment, "mb_per_s")),
                _share_bar(segment),
                f"{int(_float(segment, 'queue_fill'))}",
                ", ".join(faults),
            )
        )
    heads = ("Stage", "On", "Workers", "Items/s", "MB/s", "Busy, starved, blocked", "Queue", "Faults")
    return data_table(heads, rows, f"Rank {run.begin.get('rank')}: where the time goes")


def _share_bar(segment: dict[str, Any]) -> Markup:
    shares = [min(1.0, _float(segment, name)) for name in _SHARES]
    parts, at = [], 0.0
    for name, share in zip(_SHARES, shares, strict=True):
        parts.append(tag("rect", x=f"{100 * at:.1f}", width=f"{100 * share:.1f}", height="10", class_=name))
        at += share
    label = ", ".join(f"{name} {percent(share)}" for name, share in zip(_SHARES, shares, strict=True))
    drawn = tag(
        "svg", parts, viewBox="0 0 100 10", preserveAspectRatio="none", class_="shares", role="img", aria_label=label
    )
    return tag("span", drawn, tag("span", " ".join(percent(share) for share in shares), class_="summary"))


def line_chart(title: str, series: Sequence[Series], top: float | None = None) -> Markup:
    """Return a chart of lines over time, as a figure that says its last values in words too."""
    points = [point for _, line in series for point in line]
    last = max((x for x, _ in points), default=1.0) or 1.0
    most = top or max((y for _, y in points), default=1.0) or 1.0
    lines = []
    for place, (_, line) in enumerate(series):
        path = " ".join(f"{_WIDTH * x / last:.1f},{_HEIGHT - (_HEIGHT - 6) * min(1.0, y / most):.1f}" for x, y in line)
        if len(line) == 1:
            path = f"0,{path.split(',')[1]} {path}"
        lines.append(tag("polyline", points=path, class_=f"line c{place % 8}"))
    values = [f"{name} {number(line[-1][1])}" for name, line in series if line]
    legend = [tag("li", name, class_=f"c{place % 8}") for place, (name, _) in enumerate(series)]
    grid = [tag("line", x1=0, x2=_WIDTH, y1=y, y2=y, class_="rule") for y in (6, _HEIGHT // 2 + 3, _HEIGHT)]
    drawn = tag(
        "svg",
        grid,
        lines,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT + 2}",
        preserveAspectRatio="none",
        class_="chart",
        role="img",
        aria_label=f"{title}; now {', '.join(values) or 'no values yet'}",
    )
    scale = tag("span", f"0 to {number(most)}, over {last:.0f} s", class_="summary")
    return tag("figure", tag("figcaption", title, " ", scale), drawn, tag("ul", legend, class_="legend"))


def _metric_lines(runs: Sequence[LoggedRun], now: float) -> Iterable[str]:
    gauges: dict[str, tuple[str, str, Callable[[LoggedRun], float]]] = {
        "penstock_items_total": ("counter", "Items delivered in this epoch", lambda run: _float(run.last, "items")),
        "penstock_items_per_second": (
            "gauge",
            "Items delivered per second",
            lambda run: _float(run.last, "samples_per_s"),
        ),
        "penstock_consumer_busy_ratio": (
            "gauge",
            "Share of time the consumer worked",
            lambda run: _float(run.last, "consumer"),
        ),
        "penstock_memory_bytes": ("gauge", "Resident memory", lambda run: _float(run.last, "memory")),
        "penstock_up": ("gauge", "1 while the rank runs", lambda run: float(run.status(now) == "running")),
    }
    for name, (kind, text, value) in gauges.items():
        yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        for run in runs:
            yield f"{name}{{{_labels(run)}}} {value(run):.15g}\n"
    for share in (*_SHARES, "queue_fill", "workers"):
        name = f"penstock_stage_{share}"
        yield f"# HELP {name} {share} of a stage\n# TYPE {name} gauge\n"
        for run in runs:
            for place, segment in enumerate(run.last.get("segments", ())):  # several may have one name
                stage = f'segment="{place}",stage="{_quoted(short_name(str(segment.get("name", ""))))}"'
                yield f"{name}{{{_labels(run)},{stage}}} {_float(segment, share):.15g}\n"


def _labels(run: LoggedRun) -> str:
    names = ("rank", "world", "epoch", "host")
    return ",".join(f'{name}="{_quoted(str(run.begin.get(name, "")))}"' for name in names)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
