"""Which sample went where: written by loaders step by step, read to prove that each came exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.later import later

if TYPE_CHECKING:
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

__getattr__ = later(
    __name__,
    {
        "Book": "book",
        "Epoch": "proof",
        "Ledger": "reading",
        "Lineage": "book",
        "Missing": "proof",
        "Proof": "proof",
        "Repeated": "proof",
        "Sample": "proof",
        "Seen": "proof",
        "Step": "reading",
        "ledger": "reading",
        "lineage": "book",
    },
)
