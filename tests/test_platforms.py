"""The parts of Linux that other systems lack are not needed: a run without them reads, decodes, writes and resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Run by every interpreter at its start, worker processes included: macOS has none of these functions.
WITHOUT_LINUX = """
import os
for name in ("copy_file_range", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
"""

PROGRAM = """
import os
import penstock as ps
assert not hasattr(os, "memfd_create")

def double(sample):
    assert not hasattr(os, "memfd_create")
    return {**sample, "cls": 2 * sample["cls"]}

ps.from_items([{"txt": f"t{i}", "cls": i} for i in range(40)]).write_tar("shards", max_samples=10)
ds = ps.read_tar("shards").shuffle(seed=1).decode().map(double, on="processes", workers=2).batched(5)
loader = ds.loader(ledger="ledger")
first = next(iter(loader))
state = loader.state_dict()
loader.load_state_dict(state)
seen = [*first["cls"], *(number for batch in loader for number in batch["cls"])]
assert sorted(seen) == list(range(0, 80, 2))
print(ps.ledger("ledger").verify())
"""


def test_a_run_without_the_functions_of_linux(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_LINUX)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "exactly once" in done.stdout
