"""Rules for single variables by name: regular expressions, looked for with ``re.search``."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from framework.errors import ConfigError

NAMES_SHOWN = 40  # in a message; more of them hide the rule and the cure


def patterns(argument: str, values: Sequence[str]) -> tuple[str, ...]:
    """``values`` as a tuple; ConfigError if it is a string or one of them is no regular expression."""
    if isinstance(values, str):
        raise ConfigError(f"{argument}={values!r} but it must be a sequence; write {argument}=({values!r},)")
    for pattern in values:
        _compile(argument, pattern)
    return tuple(values)


def multipliers(values: Mapping[str, float]) -> dict[str, float]:
    """``values`` as a dictionary in the same order; ConfigError for what is no pattern or no factor."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"rate_multipliers={values!r} but it must be a mapping; for example rate_multipliers={{'backbone': 0.1}}"
        )
    for pattern, factor in values.items():
        _compile("rate_multipliers", pattern)
        if not isinstance(factor, numbers.Real) or isinstance(factor, bool) or not 0.0 <= factor < math.inf:
            raise ConfigError(
                f"rate_multipliers={{{pattern!r}: {factor!r}}} but a multiplier must be a finite number of at least 0; "
                f"for example {{{pattern!r}: 0.1}}"
            )
    return {pattern: float(factor) for pattern, factor in values.items()}


def fits(values: Iterable[str], name: str) -> bool:
    """Whether one of the patterns is found in ``name``."""
    return any(re.search(pattern, name) for pattern in values)


def multiplier(values: Mapping[str, float], name: str) -> float:
    """The factor of the first pattern found in ``name``; 1 if there is none."""
    return next((factor for pattern, factor in values.items() if re.search(pattern, name)), 1.0)


def check_used(argument: str, values: Iterable[str], names: Sequence[str]) -> None:
    """Raises ConfigError for a pattern that is found in no name: a misspelt rule would be silent."""
    for pattern in values:
        if not any(re.search(pattern, name) for name in names):
            shown = ", ".join(names[:NAMES_SHOWN])
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            raise ConfigError(
                f"{argument}: the pattern {pattern!r} is found in none of the variables {shown}{more}; correct it or "
                "leave it out"
            )


def _compile(argument: str, pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"{argument}={pattern!r} but it must be a regular expression ({error}); for example 'bias'"
        ) from error
