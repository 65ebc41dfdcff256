"""Options whose value is a text with a form of its own: patterns, factors by name, a metric with a direction."""

from __future__ import annotations

import math
import re

from framework.errors import ConfigError

EXPORT_FORMATS = ("saved_model", "keras", "tflite")


def parse_formats(text: str) -> tuple[str, ...]:
    """``"saved_model,keras"`` -> ``("saved_model", "keras")``; each once, or ConfigError."""
    formats = tuple(part.strip() for part in text.split(","))
    if len(set(formats)) != len(formats) or not set(formats) <= set(EXPORT_FORMATS):
        raise ConfigError(
            f"export_formats={text!r} but it must be some of {','.join(EXPORT_FORMATS)}; "
            "for example --export_formats=saved_model"
        )
    return formats


def parse_boundaries(text: str) -> list[int]:
    """``"30,60"`` -> ``[30, 60]``; rising positive integers, or ConfigError."""
    try:
        steps = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        steps = [-1]
    if any(s <= 0 for s in steps) or steps != sorted(set(steps)):
        raise ConfigError(
            f"schedule_boundaries={text!r} but it must be rising whole numbers; for example --schedule_boundaries=30,60"
        )
    return steps


def parse_patterns(option: str, text: str) -> tuple[str, ...]:
    """``"bias,gamma"`` -> ``("bias", "gamma")``; each a regular expression without a comma, or ConfigError."""
    patterns = tuple(part.strip() for part in text.split(",")) if text else ()
    for pattern in patterns:
        try:
            if not pattern:
                raise re.error("it is empty and would fit everything")
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{option}={text!r} but {pattern!r} is no regular expression ({error}); for example "
                f"--{option}=bias,gamma,beta"
            ) from error
    return patterns


def parse_multipliers(text: str) -> dict[str, float]:
    """``"backbone=0.1,head=1.0"`` -> ``{"backbone": 0.1, "head": 1.0}``, in this order, or ConfigError."""
    multipliers: dict[str, float] = {}
    for part in text.split(",") if text else ():
        pattern, _, factor = part.rpartition("=")
        try:
            value = float(factor)
        except ValueError:
            value = -1.0
        if not pattern.strip() or not 0.0 <= value < math.inf:
            raise ConfigError(
                f"learning_rate_multipliers={text!r} but {part!r} is not PATTERN=NUMBER with a number of at least 0; "
                "for example --learning_rate_multipliers=backbone=0.1,head=1.0"
            )
        multipliers[pattern.strip()] = value
    parse_patterns("learning_rate_multipliers", ",".join(multipliers))
    return multipliers


def parse_best(text: str) -> tuple[str, str] | None:
    """``"accuracy:max"`` -> ``("accuracy", "max")``; None for the empty text; else ConfigError."""
    if not text:
        return None
    name, colon, direction = text.rpartition(":")
    if not colon or not name or direction not in ("max", "min"):
        raise ConfigError(f"keep_best={text!r} but it must be METRIC:max or METRIC:min; for example accuracy:max")
    return name, direction


def parse_condition(text: str) -> tuple[str, str, float] | None:
    """``"loss<0.1"`` -> ``("loss", "<", 0.1)``; None for the empty text; else ConfigError."""
    if not text:
        return None
    for sign in ("<", ">"):
        name, found, limit = text.partition(sign)
        if found and name.strip():
            try:
                value = float(limit)
            except ValueError:
                break
            if math.isfinite(value):
                return name.strip(), sign, value
    raise ConfigError(f"stop_when={text!r} but it must be METRIC<NUMBER or METRIC>NUMBER; for example loss<0.1")


# Steps of one profile: each is some MB.
_PROFILED = 1000


def parse_profile(text: str) -> range | None:
    """The steps of ``START:STOP``, both included; None for an empty text.

    Raises:
      ConfigError: no such text; the first step, which traces, is among them; or too many.
    """
    if not text:
        return None
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise ConfigError(
            f"profile={text} but it must be START:STOP, the first and the last step; e.g. --profile=20:25"
        )
    first, last = map(int, parts)
    if not 2 <= first <= last or last - first >= _PROFILED:
        raise ConfigError(
            f"profile={text} but START must be at least 2 (the first step traces), STOP not below it, and at most "
            f"{_PROFILED} steps fit; e.g. --profile=20:25"
        )
    return range(first, last + 1)
