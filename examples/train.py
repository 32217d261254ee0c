"""Train in one process, on a GPU if there is one; an interrupted run resumes exactly at its last checkpoint.

python examples/train.py --stop-at 20      # interrupted in the first epoch
python examples/train.py                   # resumes
"""

from __future__ import annotations

import sys

import torch
from toy import arguments, make_shards, network, read_shards, save, train_step

import penstock as ps


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--save-every", type=int, default=8, help="steps between checkpoints")
    parser.add_argument("--stop-at", type=int, help="end the process after this step, as a crash would")
    args = parser.parse_args()
    make_shards(args.folder, args.samples)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = read_shards(args.folder).batched(args.batch_size).loader(ledger=args.folder / "ledger")
    path, step = args.folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
        print(f"resuming after step {step}, in epoch {loader.epoch}")

    while loader.epoch < args.epochs:
        for batch in loader:
            batch = {name: torch.as_tensor(batch[name]).to(device) for name in ("npy", "cls")}
            loss = train_step(model, optimizer, batch)
            step += 1
            if step % args.save_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                save({**state, "loader": loader.state_dict()}, path)
            if step == args.stop_at:
                print(f"stopped at step {step}")
                sys.exit(1)
        print(f"epoch {loader.epoch} begins after step {step}, loss {loss:.3f}")
    print(ps.ledger(args.folder / "ledger").verify())


if __name__ == "__main__":
    main()
