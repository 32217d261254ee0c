"""Jobs that turn files into files and rows: a function is called on each input file exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.jobs.output import Out as Out
    from penstock.jobs.runner import Processed as Processed
    from penstock.jobs.runner import process as process
    from penstock.landing.output_sink import Failure as Failure
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
