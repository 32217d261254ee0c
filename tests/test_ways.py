"""The pages for those who come from other libraries, and the figures and pictures of README."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[1]
WAYS = sorted((ROOT / "docs" / "ways").glob("*.md"))
BLOCK = re.compile(r"(<!-- not run:[^>]*-->\n)?```python\n(.*?)```", re.DOTALL)
FULL = os.environ.get("PENSTOCK_FULL") == "1"


def _blocks(page: Path) -> list[str]:
    return [code for _, code in BLOCK.findall(page.read_text())]


@pytest.mark.parametrize("page", WAYS, ids=lambda page: page.stem)
def test_blocks_that_are_not_run_are_python(page: Path) -> None:
    for code in _blocks(page):
        compile(code, page.name, "exec")


@pytest.mark.parametrize("page", [page for page in WAYS if page.name.startswith("from-")], ids=lambda page: page.stem)
def test_a_program_gets_shorter(page: Path) -> None:
    *before, after = [len([line for line in code.splitlines() if line.strip()]) for code in _blocks(page)]
    assert before
    assert after < min(before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # Ray's own
@pytest.mark.usefixtures("shared_ray")
def test_the_program_for_ray_data_runs(photo_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(photo_shards / "photos", tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    before, after = _blocks(ROOT / "docs" / "ways" / "from-ray-data.md")
    # Workers of the tests' Ray began in another folder.
    before = before.replace('"photos"', repr(str(tmp_path / "photos"))).replace("predictions-ray", f"{tmp_path}/ray")
    predictions: list[dict[str, int]] = []
    for code, folder in ((before, "ray"), (after, "predictions")):
        exec(compile(code, "from-ray-data.md", "exec"), {"__name__": "__main__"})
        rows = pq.read_table(tmp_path / folder).to_pylist()
        predictions.append({Path(row["path"]).name + Path(row["path"]).parent.name: row["prediction"] for row in rows})
    assert predictions[0] == predictions[1]


# torchvision, which Mosaic imports, may be compiled for another build of torch: its operators are then only declared.
DECLARED = "".join(
    f"library.define('{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n" for name in ("nms", "qnms")
)
# A peer of the benchmarks: the page, its program before ours, lines before it, and the labels that it delivers.
PROGRAMS_OF_PEERS = {
    "tensorflow": ("from-tf-data.md", 0, "", "label for _, labels in data for label in labels"),
    "mosaic": (
        "from-mosaic-litdata.md",
        0,
        f"import torch\nlibrary = torch.library.Library('torchvision', 'DEF')\n{DECLARED}",
        "label for batch in loader for label in batch['label']",
    ),
    "litdata": ("from-mosaic-litdata.md", 1, "", "label for batch in loader for label in batch['label']"),
}

if FULL:  # each peer is installed into an environment of its own

    @pytest.mark.parametrize("peer", PROGRAMS_OF_PEERS)
    def test_the_program_of_a_peer_delivers_the_same_samples(peer: str, photo_shards: Path, tmp_path: Path) -> None:
        name, number, preamble, labels = PROGRAMS_OF_PEERS[peer]
        blocks = _blocks(ROOT / "docs" / "ways" / name)
        shutil.copytree(photo_shards / "photos", tmp_path / "photos")
        ours = "label for batch in loader for label in (batch['cls'] if isinstance(batch, dict) else batch[1])"
        # Ours first: it writes the records that the program for tf.data reads.
        expected = _printed_labels(sys.executable, tmp_path, blocks[-1], ours)
        installed = [sys.executable, str(ROOT / "benchmarks" / "environments.py"), peer]
        python = subprocess.run(installed, capture_output=True, text=True, check=True).stdout.strip()
        python = python.removeprefix(f"{peer}: ")
        assert python.endswith("/bin/python"), python
        assert _printed_labels(python, tmp_path, preamble + blocks[number], labels) == expected


def _printed_labels(python: str, folder: Path, code: str, labels: str) -> str:
    """Run a program, and return the sorted labels of another epoch of it."""
    program = folder / "program.py"
    indent = " " * 4 * ("__main__" in code)
    program.write_text(f"{code}\n{indent}print('labels', sorted(int(label) for label in [{labels}]))\n")
    done = subprocess.run([python, program.name], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("labels "))


def test_the_speed_table_is_short_and_its_figures_are_measured() -> None:
    readme, measured = (ROOT / "README.md").read_text(), (ROOT / "docs" / "benchmarks.md").read_text()
    table = readme.partition("## Speed")[2].partition("\n## ")[0]
    rows = [line.split("|")[2:5] for line in table.splitlines() if line.startswith("|")][2:]
    assert 1 <= len(rows) <= 8
    for ours, other, ratio in rows:
        (figure,), (theirs,) = (re.findall(r"[\d,]*\d(?= \w+/s)", cell) for cell in (ours, other))
        assert figure in measured, figure
        assert theirs in measured, theirs
        quotient = int(figure.replace(",", "")) / int(theirs.replace(",", ""))
        assert abs(float(ratio.strip().removesuffix("x")) / quotient - 1) < 0.07, (ours, other, ratio)


def _terminal() -> ModuleType:
    spec = spec_from_file_location("terminal", ROOT / "docs" / "pictures" / "terminal.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_the_terminal_shows_what_the_commands_print(
    warm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python)
    terminal = _terminal()
    drawn = (ROOT / "docs" / "pictures" / "terminal.svg").read_text()
    without_figures = re.compile(r"[\d,]{4,}")  # sizes of JPEGs differ between versions of libjpeg
    expected = terminal.draw(terminal.transcript())
    assert re.findall(r">([^<]+)</text>", without_figures.sub("#", drawn)) == re.findall(
        r">([^<]+)</text>", without_figures.sub("#", expected)
    )
