"""Records which sample went into which step, and proves that each came exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.feed.ledger.proof import EpochProof as EpochProof
    from penstock.feed.ledger.proof import MissingSample as MissingSample
    from penstock.feed.ledger.proof import Proof as Proof
    from penstock.feed.ledger.proof import RankStep as RankStep
    from penstock.feed.ledger.proof import RepeatedSample as RepeatedSample
    from penstock.feed.ledger.proof import Sample as Sample
    from penstock.feed.ledger.reader import Ledger as Ledger
    from penstock.feed.ledger.reader import Step as Step
    from penstock.feed.ledger.reader import ledger as ledger
    from penstock.feed.ledger.writer import LedgerWriter as LedgerWriter
    from penstock.feed.ledger.writer import ResumePoint as ResumePoint
    from penstock.feed.ledger.writer import SessionDataset as SessionDataset
    from penstock.feed.ledger.writer import dropped_rows as dropped_rows
    from penstock.feed.ledger.writer import resume_point as resume_point
    from penstock.feed.ledger.writer import session_dataset as session_dataset
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
