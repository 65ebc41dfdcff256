"""Optimizers that update each replica's own copies, learning-rate schedules, and the adapter for Keras optimizers."""

from framework.optimizers.adafactor import Adafactor
from framework.optimizers.adam import Adam, AdamW
from framework.optimizers.base import Optimizer, Schedule
from framework.optimizers.factory import from_config
from framework.optimizers.keras_adapter import KerasOptimizer, as_optimizer
from framework.optimizers.lion import Lion
from framework.optimizers.local import LocalOptimizer
from framework.optimizers.muon import Muon
from framework.optimizers.schedules import Constant, Cosine, Polynomial, Step, WarmUp
from framework.optimizers.sgd import SGD
from framework.optimizers.trust_ratio import LAMB, LARS

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "KerasOptimizer",
    "Lion",
    "LocalOptimizer",
    "Muon",
    "Optimizer",
    "Polynomial",
    "Schedule",
    "Step",
    "WarmUp",
    "as_optimizer",
    "from_config",
]
