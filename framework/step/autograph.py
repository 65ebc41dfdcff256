"""AutoGraph for what users wrote and nothing else: converting the framework's own code took 10 s of a first step.

The compiled loop is traced without AutoGraph; what a user wrote is converted when it is called (``users``); and the
framework's functions that user code calls are left alone again (``own``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., Any])

_convert = tf.__internal__.autograph.tf_convert
_status = tf.__internal__.autograph.control_status_ctx


def users(function: F) -> F:
    """``function`` with AutoGraph, so that ``if`` and ``for`` may depend on tensors; the framework's own as it is."""
    inner = function.func if isinstance(function, functools.partial) else function
    if (getattr(inner, "__module__", None) or "").partition(".")[0] == "framework":
        return function
    return cast(F, _convert(function, _UNSPECIFIED))


def own(function: F) -> F:
    """Marks a function of the framework that user code calls: neither it nor what it calls is converted."""
    return cast(F, _convert(function, _UNSPECIFIED, convert_by_default=False))


def _outside() -> Any:
    """The status outside of any conversion, also if this module is imported while user code is traced."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_status()))  # the status is one of the thread
    thread.start()
    thread.join()
    return found[0]


_UNSPECIFIED = _outside()
