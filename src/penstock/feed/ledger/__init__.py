"""Which sample went where: written by loaders step by step, read to prove that each came exactly once."""

from penstock.feed.ledger.book import Book, Lineage, lineage
from penstock.feed.ledger.proof import Epoch, Missing, Proof, Repeated, Sample, Seen
from penstock.feed.ledger.reading import Ledger, Step, ledger

__all__ = [
    "Book",
    "Epoch",
    "Ledger",
    "Lineage",
    "Missing",
    "Proof",
    "Repeated",
    "Sample",
    "Seen",
    "Step",
    "ledger",
    "lineage",
]
