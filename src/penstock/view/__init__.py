"""``penstock view``: a page on this machine that shows samples, stages, balance, shards, a ledger and a live run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.view.app import View as View
    from penstock.view.app import serve_view as serve_view
    from penstock.view.app import view_app as view_app
    from penstock.view.target import open_target as open_target
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
