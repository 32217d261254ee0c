"""Train with Hugging Face accelerate, which reads in one process and distributes the batches among the others.

    torchrun --nproc-per-node 2 examples/accelerated.py

``shard(0, 1)`` states that one process reads the whole dataset on purpose.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from toy import arguments, make_shards, network, read_shards

import penstock as ps


def main() -> None:
    args = arguments(__doc__).parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    with accelerator.main_process_first():
        make_shards(args.folder, args.samples)

    samples = read_shards(args.folder).map(numbered).shard(0, 1)
    ledger = args.folder / "ledger" if accelerator.is_main_process else None  # only this process reads
    data = DataLoader(samples.loader(ledger=ledger), batch_size=args.batch_size)
    model = network()
    model, optimizer, data = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), data)
    for epoch in range(args.epochs):
        seen = []
        for batch in data:
            loss = torch.nn.functional.cross_entropy(model(batch["npy"]), batch["cls"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            seen += accelerator.gather_for_metrics(batch["number"]).tolist()
        if sorted(seen) != list(range(args.samples)):
            raise SystemExit(f"epoch {epoch}: trained on {len(seen)} samples, {len(set(seen))} of them distinct")
        accelerator.print(
            f"epoch {epoch}: every sample once, by {accelerator.num_processes} processes, loss {loss:.3f}"
        )
    if accelerator.is_main_process:
        print(ps.ledger(args.folder / "ledger").verify())
    model, optimizer = accelerator.free_memory(model, optimizer)  # before its process group: see ddp.py
    accelerator.end_training()  # closes the process group: one that is still open can abort the exit of a process


def numbered(sample: dict[str, object]) -> dict[str, object]:
    """Return the sample with its key as a number."""
    return {"npy": sample["npy"], "cls": sample["cls"], "number": int(str(sample["__key__"]))}


if __name__ == "__main__":
    main()
