"""Clocks in the graph: when a replica's own work of a step was done and it came to the reduction.

A whole step takes all replicas the same time, because they wait for each other in the reduction; and one replica's
gradients are the same whether they came late or not. Only the time of its own arrival tells who is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer


def possible(trainer: Trainer) -> str:
    """Why the replicas of a trainer are not timed; empty: they are."""
    if not trainer.config.straggler_every:
        return "off"
    if trainer.strategy.num_replicas_in_sync == 1:
        return "one replica: nothing to compare"
    if trainer.config.deterministic:
        return "not measured: deterministic=True allows no clock in the graph"
    if trainer.choice.device == "tpu":
        return "not measured: a TPU has no clock in the graph"
    return ""


class Stamps:
    """The clocks of one replica's step; made while it is traced, in its graph."""

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._arrival: tf.Tensor | None = None
        self._reduced: Sequence[tf.Tensor] = ()

    def note(self, what: str, tensors: Sequence[tf.Tensor]) -> None:
        """Takes the time at which ``tensors`` are there; see ``Reduction.watch``.

        A reduction in a branch or loop of the graph is left out: its clock cannot be read from outside.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            return
        if what == "reduced":  # the loop takes the time of the last one
            self._reduced = tensors
            return
        now = _clock(tensors)
        if self._arrival is not None:
            now -= _clock(self._reduced) - self._arrival
        self._arrival = now

    def arrival(self) -> tf.Tensor:
        """float64 scalar, seconds: when this replica's own work was done and the reduction began.

        With several reductions in a step the time spent in the earlier ones is taken off, so that what lies between the
        step's start and the arrival is the replica's own work. NaN where the step did not call the trainer's
        ``reduce``.
        """
        return tf.constant(float("nan"), tf.float64) if self._arrival is None else self._arrival


def _clock(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Seconds, float64, at which ``tensors`` are computed.

    An accelerator runs behind the host: there an op counts as done when it was only asked for. So the first tensor's
    first number is brought to the host, and the time waits for it. (Never run on a GPU.)
    """
    first = tensors[0]
    if "CPU" in first.device:
        with tf.control_dependencies(tensors):
            return tf.timestamp()
    with tf.device("/CPU:0"):
        arrived = tf.identity(tf.reshape(tf.cast(first, tf.float32), [-1])[0])
        with tf.control_dependencies([*tensors, arrived]):
            now = tf.timestamp()
        # A copy that nobody reads would be taken out of the graph; of this one no bit is used.
        nothing = tf.bitwise.bitwise_and(tf.bitcast(arrived, tf.int32), 0)
        return now + tf.cast(nothing, tf.float64)
