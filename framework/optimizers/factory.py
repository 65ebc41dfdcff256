"""The optimizer that a configuration names."""

from __future__ import annotations

from framework.config import OPTIMIZERS, RunConfig
from framework.errors import ConfigError
from framework.optimizers import schedules
from framework.optimizers.adam import Adam, AdamW
from framework.optimizers.base import Optimizer
from framework.optimizers.sgd import SGD


def from_config(config: RunConfig, total_updates: int | None) -> Optimizer:
    """The configured optimizer with the configured schedule, not yet built.

    Args:
      config: the settings of the group ``optimizer``; clipping is the step's, not the optimizer's.
      total_updates: updates in the whole run, counted from 0, also after a resume; None when not known.

    Raises:
      ConfigError: as ``schedules.from_config``.
    """
    rate = schedules.from_config(config, total_updates)
    if config.optimizer == "sgd":
        return SGD(learning_rate=rate, momentum=config.momentum, nesterov=config.nesterov)
    if config.optimizer == "adam":
        return Adam(learning_rate=rate, beta_1=config.beta_1, beta_2=config.beta_2, epsilon=config.epsilon)
    if config.optimizer == "adamw":
        return AdamW(
            learning_rate=rate,
            weight_decay=config.weight_decay,
            beta_1=config.beta_1,
            beta_2=config.beta_2,
            epsilon=config.epsilon,
        )
    raise ConfigError(f"optimizer={config.optimizer!r} but it must be one of {', '.join(OPTIMIZERS)}")
