"""The optimizer that a configuration names."""

from __future__ import annotations

from typing import Any

from framework.config import OPTIMIZERS, RunConfig
from framework.errors import ConfigError
from framework.optimizers import schedules
from framework.optimizers.adafactor import Adafactor
from framework.optimizers.adam import Adam, AdamW
from framework.optimizers.base import Optimizer
from framework.optimizers.lion import Lion
from framework.optimizers.muon import Muon
from framework.optimizers.sgd import SGD
from framework.optimizers.trust_ratio import LAMB, LARS
from framework.parse import parse_multipliers, parse_patterns


def from_config(config: RunConfig, total_updates: int | None) -> Optimizer:
    """The configured optimizer with the configured schedule, not yet built.

    Args:
      config: the settings of the group ``optimizer``; clipping is the step's, not the optimizer's.
      total_updates: updates in the whole run, counted from 0, also after a resume; None when not known.

    Raises:
      ConfigError: as ``schedules.from_config``.
    """
    rate = schedules.from_config(config, total_updates)
    by_name: dict[str, Any] = {"rate_multipliers": parse_multipliers(config.learning_rate_multipliers)}
    moments = given(config, "beta_1", "beta_2", "epsilon")
    momentum = given(config, "momentum")
    if config.optimizer == "sgd":
        return SGD(learning_rate=rate, nesterov=config.nesterov, **{"momentum": 0.9, **momentum}, **by_name)
    if config.optimizer == "adam":
        return Adam(learning_rate=rate, **moments, **by_name)
    by_name |= {"weight_decay": config.weight_decay, "exclude": parse_patterns("decay_exclude", config.decay_exclude)}
    if config.optimizer == "adamw":
        return AdamW(learning_rate=rate, **moments, **by_name)
    if config.optimizer == "lamb":
        return LAMB(learning_rate=rate, **moments, **by_name)
    if config.optimizer == "lars":
        return LARS(learning_rate=rate, **momentum, **by_name)
    if config.optimizer == "lion":
        return Lion(learning_rate=rate, **given(config, "beta_1", "beta_2"), **by_name)
    if config.optimizer == "adafactor":
        return Adafactor(learning_rate=rate, **by_name)
    if config.optimizer == "muon":
        adamw = parse_patterns("muon_exclude", config.muon_exclude) or None
        return Muon(learning_rate=rate, adamw=adamw, **momentum, **moments, **by_name)
    raise ConfigError(f"optimizer={config.optimizer!r} but it must be one of {', '.join(OPTIMIZERS)}")


def given(config: RunConfig, *names: str) -> dict[str, Any]:
    """The options of these names that are not None: those that are have no value but the optimizer's own."""
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
