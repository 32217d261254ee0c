"""Two servers prepare the batches, two ranks train on them, and a server is killed in mid-epoch: no sample is lost.

    python examples/serve.py

The program starts ``penstock serve examples/serve.py:dataset`` twice, and two ranks by torchrun that use both servers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from toy import arguments, make_shards, network, read_shards, train_step

import penstock as ps

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def dataset() -> ps.Dataset:
    """Return what the servers serve; they know the folder and the batch size by the environment."""
    return read_shards(Path(os.environ["FOLDER"])).batched(int(os.environ["BATCH_SIZE"]))


def start_server() -> tuple[subprocess.Popen[str], str]:
    """Start a server; return its process and its address."""
    command = [sys.executable, "-m", "penstock", "serve", f"{__file__}:dataset", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"serving at (\S+),", process.stdout.readline())
    assert found is not None
    return process, found[1]


def train(folder: Path, epochs: int, servers: list[str], victim: int, kill_at: int) -> None:
    """Train one rank; rank 0 kills a server at a step."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    feed = ps.connect(servers, ledger=folder / "ledger")  # rank and world are those of the process group
    step = 0
    while feed.epoch < epochs:
        for batch in feed:
            loss = train_step(model, optimizer, batch)
            step += 1
            if step == kill_at and dist.get_rank() == 0:
                os.kill(victim, signal.SIGKILL)
                print(f"killed one of {len(servers)} servers at step {step}")
        if dist.get_rank() == 0:
            print(f"epoch {feed.epoch} begins after step {step}, loss {loss:.3f}, servers in use: {len(feed.servers)}")
    feed.close()
    dist.barrier()  # now every rank has written its ledger
    if dist.get_rank() == 0:
        print(ps.ledger(folder / "ledger").verify())
    del model  # first: the last one to let go of a process group waits for its threads, and a model holds Python's lock
    dist.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kill-at", type=int, default=5, help="the step at which a server is killed (%(default)s)")
    parser.add_argument("--servers", nargs="+", default=[], help="for the ranks: the addresses of the servers")
    parser.add_argument("--victim", type=int, default=0, help="for the ranks: the process of the server to kill")
    args = parser.parse_args()
    if args.servers:
        train(args.folder, args.epochs, args.servers, args.victim, args.kill_at)
        return
    make_shards(args.folder, args.samples)
    os.environ |= {"FOLDER": str(args.folder.resolve()), "BATCH_SIZE": str(args.batch_size)}
    servers = [start_server() for _ in range(2)]
    try:
        own = ["--folder", str(args.folder), "--epochs", str(args.epochs), "--kill-at", str(args.kill_at)]
        ranks = ["--servers", *(address for _, address in servers), "--victim", str(servers[0][0].pid)]
        subprocess.run([sys.executable, *TORCHRUN, __file__, *own, *ranks], check=True)
    finally:
        for process, _ in servers:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
