"""Which sample went where: written by loaders step by step, read to prove that each came exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.feed.ledger.proof import Epoch as Epoch
    from penstock.feed.ledger.proof import Missing as Missing
    from penstock.feed.ledger.proof import Proof as Proof
    from penstock.feed.ledger.proof import Repeated as Repeated
    from penstock.feed.ledger.proof import Sample as Sample
    from penstock.feed.ledger.proof import Seen as Seen
    from penstock.feed.ledger.reader import Ledger as Ledger
    from penstock.feed.ledger.reader import Step as Step
    from penstock.feed.ledger.reader import ledger as ledger
    from penstock.feed.ledger.writer import Book as Book
    from penstock.feed.ledger.writer import Lineage as Lineage
    from penstock.feed.ledger.writer import lineage as lineage
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
