"""What a stage does with an exception: each handler raises it, returns True to continue, or False to stop the stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable

Handler = Callable[[Exception], bool]


def reraise_exception(exn: Exception) -> bool:
    """Raise the exception.

    Raises:
        Exception: Always ``exn``.
    """
    raise exn


def ignore_and_continue(exn: Exception) -> bool:
    """Skip what failed."""
    return True


def warn_and_continue(exn: Exception) -> bool:
    """Warn, and skip what failed."""
    warnings.warn(repr(exn), stacklevel=2)
    return True


def ignore_and_stop(exn: Exception) -> bool:
    """End the stage."""
    return False


def warn_and_stop(exn: Exception) -> bool:
    """Warn, and end the stage."""
    warnings.warn(repr(exn), stacklevel=2)
    return False
