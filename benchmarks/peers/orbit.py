"""Orbit, the loop of TensorFlow's model garden: ``orbit.Controller`` with 20 steps in each loop of the graph.

The garden's models are on ``tf_keras``, so this one is: the same layers, with the weights of the common start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orbit
import tensorflow as tf
import tf_keras
from absl import logging

from benchmarks import networks, start
from benchmarks.bare import batches
from benchmarks.contender import Reporter
from benchmarks.workload import Workload, set_threads


class Garden(orbit.StandardTrainer):
    """A step as in the garden's own trainers: ``strategy.run``, gradients, ``apply_gradients``, a metric."""

    def __init__(self, workload: Workload, model: Any, optimizer: Any, strategy: tf.distribute.Strategy):
        super().__init__(strategy.experimental_distribute_dataset(batches(workload, parts=1)))
        self._model, self._optimizer, self._strategy = model, optimizer, strategy
        self._loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        self.mean = tf_keras.metrics.Mean("loss")

    def train_step(self, iterator: Any) -> None:
        """One step."""

        def step(batch: Any) -> None:
            inputs, labels = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self._loss(labels, self._model(inputs, training=True)))
            variables = self._model.trainable_variables
            self._optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            self.mean.update_state(loss)

        self._strategy.run(step, args=(next(iterator),))
        self._optimizer.global_step.assign_add(1)


def train(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """A contender, see ``benchmarks.contender``."""
    tf.config.set_visible_devices([], "GPU")
    set_threads(workload)
    logging.set_verbosity(logging.ERROR)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        model = networks.BUILDERS[workload.network](tf_keras, workload.features, workload.hidden)
        optimizer = tf_keras.optimizers.AdamW(workload.learning_rate, weight_decay=workload.weight_decay, epsilon=1e-7)
        optimizer.build(model.trainable_variables)
        optimizer.global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        values, _ = start.weights(workload.start)
        for variable in model.trainable_variables:
            variable.assign(values[start.weight_name(variable.name)])
        task = Garden(workload, model, optimizer, strategy)
    report.facts(parameters=sum(v.shape.num_elements() for v in model.trainable_variables), settings={})
    controller = orbit.Controller(trainer=task, strategy=strategy, global_step=optimizer.global_step, steps_per_loop=20)
    for end in ends:
        task.mean.reset_state()
        controller.train(end, checkpoint_at_completion=False)
        report(end, task.mean.result())
