"""The tutorials run in a real kernel, and what they display there is what a notebook shows."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NBFORMAT: Any = nbformat  # its functions have no types
TUTORIALS = sorted((Path(__file__).resolve().parents[1] / "docs" / "tutorials").glob("*.ipynb"))

SHOWN = {
    "shards-in-ten-minutes": ["<b>Dataset</b>", "data:image/jpeg;base64,", "400 items", "<th", "the same epoch"],
    "why-is-my-loader-slow": ["would give about", "segment</th>", "times the rate", "<pre>engine local", "in inverse"],
}

PROBE = """
import penstock as ps
from penstock.engines.progress import Progress

with Progress("packing", 3, "samples") as bar:
    for _ in range(3):
        bar.add()

loader = ps.from_items([{"x": 1}, {"x": 2}]).batched(1).loader(rank=0, world=1)
display(loader)

def user_function(sample):
    raise KeyError("<b>no such thing</b>")

ps.from_items([{"x": 1}]).map(user_function).take(1)
"""


@pytest.fixture
def kernel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the files of the kernel, outside of the user's."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    scripts = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return tmp_path


def _run(notebook: Any, folder: Path, *, allow_errors: bool = False) -> str:
    """Execute a notebook and return everything that it shows, as text and HTML."""
    client = NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(folder)}}, allow_errors=allow_errors
    )
    client.execute()
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            shown.append(output.get("text", ""))
            shown += output.get("data", {}).values()
            shown += output.get("traceback", ())
    return "\n".join(map(str, shown))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # of the client's event loop
def test_a_tutorial_runs_and_shows_what_it_promises(path: Path, kernel_folder: Path) -> None:
    shown = _run(NBFORMAT.read(path, as_version=4), kernel_folder)
    missing = [text for text in SHOWN[path.stem] if text not in shown]
    assert not missing, shown[-3000:]


def test_every_tutorial_is_tested() -> None:
    assert {path.stem for path in TUTORIALS} == SHOWN.keys()


@pytest.mark.filterwarnings("ignore")  # of the client's event loop
def test_a_notebook_shows_progress_loaders_and_short_tracebacks(kernel_folder: Path) -> None:
    notebook = NBFORMAT.v4.new_notebook(cells=[NBFORMAT.v4.new_code_cell(PROBE)])
    shown = _run(notebook, kernel_folder, allow_errors=True)
    assert '<progress value="3" max="3"' in shown
    assert "rank 0 of 1, epoch 0, 2 items per epoch" in shown
    outputs = notebook.cells[0].outputs
    (lines,) = [output["traceback"] for output in outputs if output["output_type"] == "error"]
    assert lines[-1].startswith("StageError: KeyError")
    assert any("in user_function" in line for line in lines)
    assert not any("penstock/engines" in line for line in lines)
    assert len(lines) <= 5
