"""One pipeline, many consumers over the network: servers that run a plan, and loaders that receive its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.serving.remote_loader import Feed as Feed
    from penstock.serving.remote_loader import connect as connect
    from penstock.serving.server import Server as Server
    from penstock.serving.server import serve as serve
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
