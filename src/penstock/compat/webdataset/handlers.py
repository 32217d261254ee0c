"""What a stage does with an exception: each handler raises it, returns True to continue, or False to stop the stage."""

import warnings
from collections.abc import Callable

Handler = Callable[[Exception], bool]


def reraise_exception(exn: Exception) -> bool:
    raise exn


def ignore_and_continue(exn: Exception) -> bool:
    return True


def ignore_and_stop(exn: Exception) -> bool:
    return False


def warn_and_continue(exn: Exception) -> bool:
    warnings.warn(repr(exn), stacklevel=2)
    return True


def warn_and_stop(exn: Exception) -> bool:
    return not warn_and_continue(exn)
