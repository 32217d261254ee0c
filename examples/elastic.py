"""Lose a rank in the middle of an epoch, and resume with the remaining ranks.

    python examples/elastic.py

Starts ``ddp.py`` with four ranks, one of which is killed by ``kill -9``; torchrun then ends the other ranks. Starts it
again with three ranks, which load the last saved states of all four. The ledger proves that every sample was delivered
exactly once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from toy import arguments

import penstock as ps


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kill-at", type=int, default=7, help="the step at which rank 2 is killed")
    args = parser.parse_args()
    shared = [
        f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("folder", "samples", "batch-size", "epochs")
    ]

    exit_code = run_ddp(4, *shared, "--kill", "2", str(args.kill_at))
    print(f"four ranks, one of them killed: exit code {exit_code} of torchrun")
    if exit_code == 0:
        sys.exit("the first run should have failed")
    if run_ddp(3, *shared) != 0:
        sys.exit("the second run failed")
    proof = ps.ledger(args.folder / "ledger").verify()
    sys.exit(0 if proof.ok and proof.finished else 1)


def run_ddp(ranks: int, *arguments: str) -> int:
    """Run ``ddp.py`` with this number of ranks; return the exit code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*torchrun, str(Path(__file__).with_name("ddp.py")), *arguments]).returncode


if __name__ == "__main__":
    main()
