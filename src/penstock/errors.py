"""The errors Penstock raises.

    PenstockError
    |-- PlanError(ValueError)      the description cannot mean anything, or not here
    |-- DataError(ValueError)      a shard or a sample is damaged, hostile or not what was asked for
    |-- StageError(RuntimeError)   a function of the user's failed on a sample
    |-- StorageError(OSError)      bytes could not be found, read or written
    |-- StateError(ValueError)     a saved state does not belong here
    |-- MissingExtra(ImportError)  an optional dependency is not installed
    `-- EngineError(RuntimeError)  an engine cannot run this, or broke

Facts stand in ``args``, the text is made by ``__str__``: every error crosses processes by pickle unchanged.
"""

from __future__ import annotations


class PenstockError(Exception):
    """The root of the tree: catch this to catch everything Penstock raises on purpose."""


class PlanError(PenstockError, ValueError):
    """The plan is wrong where it is written: a bad argument, or stages that do not go together."""


class StateError(PenstockError, ValueError):
    """A saved state is damaged, incomplete, or belongs to another dataset or plan."""


class EngineError(PenstockError, RuntimeError):
    """An engine cannot give what the plan asks for, or was closed under the reader."""


class DataError(PenstockError, ValueError):
    """A shard or sample is damaged or refused; ``shard`` and ``key`` say which (``None`` where there is none)."""

    def __init__(self, problem: str, shard: str | None = None, key: str | None = None) -> None:
        super().__init__(problem, shard, key)
        self.problem, self.shard, self.key = problem, shard, key

    def __str__(self) -> str:
        return _located(self.problem, shard=self.shard, key=self.key)


class StageError(PenstockError, RuntimeError):
    """A stage failed on a sample; the user's own exception is its ``__cause__``."""

    def __init__(
        self, problem: str, stage: str | None = None, key: str | None = None, shard: str | None = None
    ) -> None:
        super().__init__(problem, stage, key, shard)
        self.problem, self.stage, self.key, self.shard = problem, stage, key, shard

    def __str__(self) -> str:
        return _located(self.problem, stage=self.stage, shard=self.shard, key=self.key)


class StorageError(PenstockError, OSError):
    """Bytes at ``url`` could not be found, read or written."""

    def __init__(self, problem: str, url: str | None = None) -> None:
        super().__init__(problem, url)
        self.problem, self.url = problem, url

    def __str__(self) -> str:
        return _located(self.problem, url=self.url)


class MissingExtra(PenstockError, ImportError):
    """``what`` needs a package that the extra named ``extra`` installs."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(what, extra)
        self.what, self.extra = what, extra

    def __str__(self) -> str:
        return f"{self.what} needs an extra that is not installed: pip install 'penstock[{self.extra}]'"


def _located(problem: str, **places: str | None) -> str:
    """Append the places that are known: ``bad header (shard: a.tar, key: 0001)``."""
    known = ", ".join(f"{name}: {value}" for name, value in places.items() if value is not None)
    return f"{problem} ({known})" if known else problem
