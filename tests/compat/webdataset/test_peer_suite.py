"""WebDataset's own tests pass with Penstock's names but for one, where its test suite lies beside this project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PLACES = [parent / "shared" / "peer-tests" / "webdataset" / "run" for parent in Path(__file__).parents]
SUITE = next((place for place in PLACES if place.is_file()), None)

if os.environ.get("PENSTOCK_FULL") == "1" and SUITE is not None:

    def test_webdatasets_own_tests_pass() -> None:
        done = subprocess.run([sys.executable, str(SUITE)], capture_output=True, text=True, check=False)
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed is not None, done.stdout[-3000:] + done.stderr[-3000:]
        assert int(passed[1]) >= 192, done.stdout[-3000:]  # there is no LMDBCached
