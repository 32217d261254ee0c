"""Lose a rank in the middle of an epoch, and go on with those that are left.

    python examples/elastic.py

Starts ``ddp.py`` with four ranks, one of which is killed by ``kill -9``; torchrun then ends the others. It is started
again with three ranks, which take up the states of the four that were saved last. The ledger proves that every sample
came exactly once.
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
    same = [
        f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("folder", "samples", "batch-size", "epochs")
    ]

    ended = start(4, *same, "--kill", "2", str(args.kill_at))
    print(f"four ranks, one of them killed: torchrun ended with {ended}")
    if ended == 0 or start(3, *same) != 0:
        sys.exit("the ranks did not end as they should")
    proof = ps.ledger(args.folder / "ledger").verify()
    sys.exit(0 if proof.ok and proof.finished else 1)


def start(ranks: int, *more: str) -> int:
    """Run ``ddp.py`` with so many ranks; gives how it ended."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*torchrun, str(Path(__file__).with_name("ddp.py")), *more]).returncode


if __name__ == "__main__":
    main()
