"""Groups, sorting, distinct values and joins of 2,000,000 rows: seconds of wall time and of processor time.

``python benchmarks/relations.py [VERB ...]`` prints a row for each verb, the best of three rounds. The table is in one
Parquet file that is written once: a key of 10 values, one of 1,000,000, one of text, and a number. With
``--source FOLDER`` the package is imported from another source tree, for a comparison of two versions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROWS = 2_000_000
FILE = Path(tempfile.gettempdir()) / f"penstock-relations-{ROWS}.parquet"

VERBS: dict[str, Callable[[Any], Any]] = {
    "read": lambda ds: ds.select("label", "many", "x"),
    "count, 10 groups": lambda ds: ds.groupby("label").count(),
    "sum, 10 groups": lambda ds: ds.groupby("label").sum("x"),
    "mean of two, 10 groups": lambda ds: ds.groupby("label").mean("x", "many"),
    "std, 10 groups": lambda ds: ds.groupby("label").std("x"),
    "count, 1,000,000 groups": lambda ds: ds.groupby("many").count(),
    "sum, 1,000,000 groups": lambda ds: ds.groupby("many").sum("x"),
    "std, 1,000,000 groups": lambda ds: ds.groupby("many").std("x"),
    "max, 1,000,000 groups": lambda ds: ds.groupby("many").max("x"),
    "list, 1,000,000 groups": lambda ds: ds.groupby("many").list("x"),
    "count, 1,000,000 texts": lambda ds: ds.groupby("text").count(),
    "count, pairs of two fields": lambda ds: ds.groupby("label", "many").count(),
    "value_counts, 1,000,000": lambda ds: ds.value_counts("many"),
    "sort": lambda ds: ds.sort("many"),
    "sort by text": lambda ds: ds.sort("text"),
    "distinct, 10 values": lambda ds: ds.distinct("label"),
    "distinct, 1,000,000 values": lambda ds: ds.distinct("many"),
    "unique, 1,000,000 values": lambda ds: ds.unique("many"),
    "describe": lambda ds: ds.describe(),
    "join, 10 values": lambda ds: ds.join(_labels(ds), "label"),
    "join, 1,000,000 values": lambda ds: ds.join(_numbers(ds), "many"),
    "join, 1,000,000 texts": lambda ds: ds.join(_texts(ds), "text"),
}


def _labels(ds: Any) -> Any:
    return ds.select("label").distinct("label").with_columns(y=1)


def _numbers(ds: Any) -> Any:
    import penstock as ps

    return ps.from_arrow(_right_side().select(["many", "y"]))


def _texts(ds: Any) -> Any:
    import penstock as ps

    return ps.from_arrow(_right_side().select(["text", "y"]))


@cache
def _right_side() -> Any:
    import numpy as np
    import pyarrow as pa

    keys = np.random.default_rng(1).permutation(1_000_000)
    return pa.table({"many": keys, "text": [f"key {key:012d}" for key in keys.tolist()], "y": keys * 2})


def _write() -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    many = rng.integers(0, 1_000_000, ROWS)
    text = pa.array([f"key {key:012d}" for key in many.tolist()])
    table = pa.table({"label": rng.integers(0, 10, ROWS), "many": many, "text": text, "x": rng.normal(size=ROWS)})
    draft = FILE.with_suffix(".draft")
    pq.write_table(table, draft, row_group_size=1 << 17)
    draft.rename(FILE)


def main() -> None:
    """Measure the verbs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verbs", nargs="*", choices=[[], *VERBS], metavar="VERB")
    parser.add_argument("--source", help="the folder of another source tree, such as ../other/src")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.source:
        sys.path.insert(0, args.source)
    import penstock as ps

    if not FILE.exists():
        _write()
    _right_side()  # built before the clock starts
    for verb in args.verbs or VERBS:
        times = []
        for _ in range(args.rounds):
            begun, cpu = time.perf_counter(), time.process_time()
            result = VERBS[verb](ps.read_parquet(str(FILE)))
            rows = len(result) if isinstance(result, list) else sum(map(len, result._run(0).runs()))
            times.append((time.perf_counter() - begun, time.process_time() - cpu))
        wall, cpu = min(times)
        print(f"{verb:28} {wall:8.3f} s {cpu:8.3f} s of processor time  {rows:9,} rows", flush=True)


if __name__ == "__main__":
    main()
