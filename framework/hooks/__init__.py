"""Hooks: what happens beside training, and when."""

from framework.hooks.early_stop import EarlyStop
from framework.hooks.hook import Hook, Scheduled, Values
from framework.hooks.metrics_log import MetricsLog, read_metrics
from framework.hooks.progress import Progress
from framework.hooks.tensorboard import TensorBoard
from framework.hooks.triggers import AtSteps, EveryNSteps, EverySeconds, EveryStep, Never, Trigger, When

__all__ = [
    "AtSteps",
    "EarlyStop",
    "EveryNSteps",
    "EverySeconds",
    "EveryStep",
    "Hook",
    "MetricsLog",
    "Never",
    "Progress",
    "Scheduled",
    "TensorBoard",
    "Trigger",
    "Values",
    "When",
    "read_metrics",
]
