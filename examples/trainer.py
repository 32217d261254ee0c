"""Train a small language model with the Trainer of Hugging Face transformers.

    torchrun --nproc-per-node 2 examples/trainer.py

The Trainer reads in one process and distributes the batches among the others: ``shard(0, 1)`` states that one process
reads the whole dataset on purpose.
"""

from __future__ import annotations

import numpy as np
import torch
from toy import arguments
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import penstock as ps

WORDS = 32


def main() -> None:
    args = arguments(__doc__).parse_args()
    training = TrainingArguments(
        output_dir=str(args.folder / "out"),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=10,
        ddp_find_unused_parameters=False,
    )
    texts = ps.from_items(sentences(args.samples)).shuffle(seed=1).map(add_labels).shard(0, 1)
    small = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **small))
    ledger = args.folder / "ledger" if training.process_index == 0 else None  # only this process reads
    trainer = Trainer(model, training, train_dataset=texts.loader(ledger=ledger))
    output = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{output.global_step} steps on {training.world_size} processes, loss {output.training_loss:.3f}")
        print(ps.ledger(args.folder / "ledger").verify())


def sentences(count: int) -> list[dict[str, object]]:
    """Return sentences of consecutive numbers, so that each word follows from the word before."""
    rng = np.random.default_rng(0)
    return [{"words": (rng.integers(WORDS) + np.arange(12)) % WORDS} for _ in range(count)]


def add_labels(sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs of the model: the words, which are also the words to predict."""
    return {"input_ids": sample["words"], "labels": sample["words"]}


if __name__ == "__main__":
    main()
