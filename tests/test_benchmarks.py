"""The report of the benchmarks: saved results become tables, verdicts, a chart and a page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"

LIMIT = "limit: libjpeg-turbo alone, full decode, 2 threads"
OURS = "penstock, antialias=False"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, BENCHMARKS / "run.py", *arguments]
    return subprocess.run(call, capture_output=True, text=True, check=False)


def save(folder: Path, rows: dict[str, list[Any]], rounds: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    metadata = {"quick": False, "rounds": rounds, "when": "2000-01-01", "machine": {"cpu": "two cores"}}
    (folder / "images.json").write_text(json.dumps({**metadata, "rows": rows}))


def timed(*seconds: float, samples: int = 100) -> list[Any]:
    return [{"seconds": each, "samples": samples} for each in seconds]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    failed: list[Any] = ["does not install: x"]
    save(folder, {LIMIT: timed(1.0, 1.0, 2.0), OURS: timed(1.1, 1.25, 2.2), "FFCV (its own, by areas)": failed})
    return folder


def test_saved_results_become_a_table_with_median_spread_best_and_verdicts(results: Path) -> None:
    done = run("images", "--report", "--results", results)
    assert done.returncode == 0, done.stderr
    assert f"| {OURS} | 1.25 [2.2 - 1.1] | 80 | 90.9 | 0.909 [0.909 - 0.8] |" in done.stdout
    assert "- FFCV (its own, by areas): does not install: x" in done.stdout
    assert "to libjpeg-turbo alone | at least 0.85 | 0.909 [0.909 - 0.8] | yes, 2 of 3 rounds |" in done.stdout
    assert "| not measured |" in done.stdout
    assert "- cpu: two cores" in done.stdout
    with Image.open(results / "images.png") as chart:
        assert chart.width == 1000


def test_a_ratio_is_per_sample_if_one_row_processed_more(results: Path) -> None:
    save(results, {LIMIT: timed(1.0), OURS: timed(4.0, samples=200)}, 1)
    done = run("images", "--report", "--results", results)
    assert f"| {OURS} | 4 [4 - 4] | 50 | 50 | 0.5 [0.5 - 0.5] |" in done.stdout


def test_a_page_keeps_everything_but_the_section_of_the_case(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Mine\n\n<!-- bench:images -->\nold\n<!-- /bench:images -->\n\nThe end.\n")
    assert run("images", "--report", "--results", results, "--write", page).returncode == 0
    text = page.read_text()
    assert text.startswith("# Mine\n\n<!-- bench:images -->\n### images: ")
    assert text.endswith("<!-- /bench:images -->\n\nThe end.\n")
    assert "old" not in text
    assert "![images](pictures/bench-images.png)" in text
    assert (tmp_path / "pictures" / "bench-images.png").is_file()
    assert run("images", "--report", "--results", results, "--write", page).returncode == 0
    assert page.read_text() == text
    page.write_text("# Mine\n")
    assert run("images", "--report", "--results", results, "--write", page).returncode == 0
    assert page.read_text().startswith("# Mine\n\n<!-- bench:images -->")


def test_a_complete_case_is_not_measured_again(results: Path) -> None:
    done = run("images", "--resume", "--rounds", "3", "--results", results)
    assert done.returncode == 0, done.stderr
    assert "checked all rows" not in done.stderr
    assert "| 1.25 [2.2 - 1.1] |" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown case nothing"),
        (["images", "--peers", "torch,other"], "unknown peer other"),
        (["images", "--rounds", "0"], "--rounds must be at least 1, not 0"),
    ],
    ids=str,
)
def test_unknown_names_and_zero_rounds_are_usage_errors(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_every_peer_has_requirements_and_every_promise_names_rows() -> None:
    code = """
import promises, run
peers = {row.peer for case in run.CASES.values() for row in case.rows if row.peer}
print(sorted(peers - set(run.PEERS)), sorted(set(run.PEERS) - peers))
rows = {name: {row.name for row in case.rows} for name, case in run.CASES.items()}
named = [(case, row) for case, all in promises.PROMISES.items() for t in all for row in (t.row, t.over) if row]
print([(case, row) for case, row in named if row not in rows[case]])
print([name for name, all in rows.items() if len(all) != len(run.CASES[name].rows)])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[] []\n[]\n[]\n", 0), done.stderr
