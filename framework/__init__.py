"""Lockstep TF: training on many devices with a hand-written, visible, checked distributed step.

The public names are loaded at their first use: importing the package starts no device, and loads no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework import optimizers as optimizers
    from framework.config import RunConfig as RunConfig
    from framework.errors import CheckFailed as CheckFailed
    from framework.errors import ConfigError as ConfigError
    from framework.errors import LockstepError as LockstepError
    from framework.errors import PeerLost as PeerLost
    from framework.errors import Preempted as Preempted
    from framework.export import Signature as Signature
    from framework.hooks import AtSteps as AtSteps
    from framework.hooks import EveryNSteps as EveryNSteps
    from framework.hooks import EverySeconds as EverySeconds
    from framework.hooks import EveryStep as EveryStep
    from framework.hooks import Hook as Hook
    from framework.hooks import Scheduled as Scheduled
    from framework.hooks import Trigger as Trigger
    from framework.hooks import When as When
    from framework.loop.feed import BatchPlan as BatchPlan
    from framework.loop.feed import Pipeline as Pipeline
    from framework.loop.trainer import Trainer as Trainer
    from framework.monitor.replicas import assert_replicas_close as assert_replicas_close
    from framework.monitor.replicas import assert_replicas_equal as assert_replicas_equal
    from framework.step.gradients import StepSums as StepSums
    from framework.step.gradients import gradients as gradients
    from framework.step.randomness import step_seed as step_seed
    from framework.step.reduce import Reduction as Reduction
    from framework.step.reduce import all_gather as all_gather
    from framework.step.reduce import reduce as reduce
    from framework.step.update import Update as Update
    from framework.step.update import apply as apply
    from framework.step.values import Derived as Derived
    from framework.step.values import LossOutput as LossOutput
    from framework.step.values import Max as Max
    from framework.step.values import Min as Min
    from framework.step.values import Stat as Stat
    from framework.step.values import Sum as Sum

# Public name -> module that defines it.
_PUBLIC = {
    "AtSteps": "framework.hooks",
    "BatchPlan": "framework.loop.feed",
    "CheckFailed": "framework.errors",
    "ConfigError": "framework.errors",
    "Derived": "framework.step.values",
    "EveryNSteps": "framework.hooks",
    "EverySeconds": "framework.hooks",
    "EveryStep": "framework.hooks",
    "Hook": "framework.hooks",
    "LockstepError": "framework.errors",
    "LossOutput": "framework.step.values",
    "Max": "framework.step.values",
    "Min": "framework.step.values",
    "PeerLost": "framework.errors",
    "Pipeline": "framework.loop.feed",
    "Preempted": "framework.errors",
    "RunConfig": "framework.config",
    "Scheduled": "framework.hooks",
    "Signature": "framework.export",
    "Stat": "framework.step.values",
    "StepSums": "framework.step.gradients",
    "Sum": "framework.step.values",
    "Trainer": "framework.loop.trainer",
    "Trigger": "framework.hooks",
    "Update": "framework.step.update",
    "all_gather": "framework.step.reduce",
    "step_seed": "framework.step.randomness",
    "Reduction": "framework.step.reduce",
    "When": "framework.hooks",
    "apply": "framework.step.update",
    "assert_replicas_close": "framework.monitor.replicas",
    "assert_replicas_equal": "framework.monitor.replicas",
    "gradients": "framework.step.gradients",
    "reduce": "framework.step.reduce",
}

_MODULES = ("metrics", "optimizers")

__all__ = [*_MODULES, *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"framework.{name}")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'framework' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
