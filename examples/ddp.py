"""Train with DistributedDataParallel: every rank has a share of the samples and the same number of batches.

    torchrun --nproc-per-node 2 examples/ddp.py

A checkpoint has the states of all ranks, so an interrupted run can resume with any number of ranks.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from toy import arguments, make_shards, network, read_shards, save, train_step

import penstock as ps


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--kill", type=int, nargs=2, metavar=("RANK", "STEP"), help="kill -9 this rank at this step")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        make_shards(args.folder, args.samples)
    dist.barrier()

    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = read_shards(args.folder).batched(args.batch_size).loader(ledger=args.folder / "ledger")
    path, step = args.folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(states=saved["loaders"])  # of all ranks of the earlier run
        step = saved["step"]
        if rank == 0:
            print(f"{world} ranks resume after step {step} of {len(saved['loaders'])} ranks, in epoch {loader.epoch}")

    while loader.epoch < args.epochs:
        for batch in loader:
            loss = train_step(model, optimizer, batch)
            step += 1
            if args.kill == [rank, step]:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % args.save_every == 0:
                states: list[Any] = [None] * world
                dist.all_gather_object(states, loader.state_dict())
                if rank == 0:
                    trained = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                    save({**trained, "loaders": states, "step": step}, path)
        if rank == 0:
            print(f"epoch {loader.epoch} begins after step {step}, loss {loss:.3f}")
    loader.close()
    dist.barrier()  # now every rank has written its ledger
    if rank == 0:
        print(ps.ledger(args.folder / "ledger").verify())
    del model  # first: the last one to let go of a process group waits for its threads, and a model holds Python's lock
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
