"""Test kit for engines and storages: their laws as test classes, synthetic shards, a corpus of plans, servers, faults.

``penstock.testing.storages`` has the tests that every storage must pass, ``penstock.testing.servers`` real S3 and HTTP
servers, and ``penstock.testing.proxy`` a proxy that injects faults between a client and such a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.testing.laws import EngineTests as EngineTests
    from penstock.testing.laws import UnorderedEngineTests as UnorderedEngineTests
    from penstock.testing.laws import fingerprint as fingerprint
    from penstock.testing.laws import on_resources as on_resources
    from penstock.testing.laws import one_epoch_loader as one_epoch_loader
    from penstock.testing.laws import outputs as outputs
    from penstock.testing.number_source import LocatedNumbers as LocatedNumbers
    from penstock.testing.number_source import Numbers as Numbers
    from penstock.testing.number_source import NumbersReader as NumbersReader
    from penstock.testing.number_source import numbers as numbers
    from penstock.testing.plans import BASE as BASE
    from penstock.testing.plans import CORPUS as CORPUS
    from penstock.testing.plans import RECUT as RECUT
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
