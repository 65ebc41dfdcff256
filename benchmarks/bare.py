"""The bare loop: the least code that trains the same model on the same data with the same update.

What "bare" means. There is the same Keras model, a ``tf.function`` with a ``while`` loop in the graph, a gradient tape,
and the same fused Adam op. The input is a ``tf.data.Dataset`` that gathers rows of the same arrays in the same seeded
order, computed by the same function, in one ``map`` and a plain iterator. There is no test for non-finite values, no
norm, no metric but the loss, no clock, no schedule, no hook and no file. With several replicas it is the shortest
``MirroredStrategy`` loop: one all-reduce call on the list of gradients, added on one device, then the local update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from benchmarks.contender import Reporter
from benchmarks.workload import Workload, arrays, build_model, set_threads
from input_pipelines.order import example_indices

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7


def train(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """Trains to each of the steps ``ends`` in turn and reports the mean loss since the one before."""
    tf.config.set_visible_devices([], "GPU")
    set_threads(workload)
    if workload.eval_every or workload.checkpoint_every:
        raise ValueError("the bare loop neither evaluates nor saves")
    keras.utils.set_random_seed(workload.seed)
    run_steps, iterator, variables = (_mirrored if workload.replicas > 1 else _one_device)(workload)
    report.facts(parameters=sum(v.shape.num_elements() for v in variables), settings={})
    done = 0
    for end in ends:
        report(end, run_steps(iterator, tf.constant(end - done)))
        done = end


# --- one replica -------------------------------------------------------------------------------------------------


def _one_device(workload: Workload) -> tuple[Any, Any, list[tf.Variable]]:
    """The compiled loop, its iterator, and the variables."""
    model = build_model(workload)
    variables = [v.value for v in model.trainable_variables]
    update = AdamW(variables, workload)

    @tf.function
    def run_steps(iterator: Any, steps: tf.Tensor) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(steps):
            inputs, labels = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(losses(model, inputs, labels))
            update(tape.gradient(loss, variables))
            total += loss
        return total / tf.cast(steps, tf.float32)

    return run_steps, iter(batches(workload)), variables


# --- several replicas --------------------------------------------------------------------------------------------


def _mirrored(workload: Workload) -> tuple[Any, Any, list[tf.Variable]]:
    """The same for several replicas on logical CPU devices."""
    replicas = workload.replicas
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        model = build_model(workload)
        variables = [v.value for v in model.trainable_variables]
        update = AdamW(variables, workload)

    def step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(model, *batch)) / replicas  # replicas have equally many examples
        gradients = tape.gradient(loss, variables)
        update(tf.distribute.get_replica_context().all_reduce("SUM", gradients))
        return loss

    @tf.function
    def run_steps(iterator: Any, steps: tf.Tensor) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(steps):
            total += strategy.reduce("SUM", strategy.run(step, args=(next(iterator),)), axis=None)
        return total / tf.cast(steps, tf.float32)

    distributed = strategy.distribute_datasets_from_function(lambda _: batches(workload))
    return run_steps, iter(distributed), variables


# --- what both share ---------------------------------------------------------------------------------------------


def losses(model: keras.Model, inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Cross-entropy per example."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(inputs, training=True))


def batches(workload: Workload, *, first: int = 0, parts: int = 0) -> tf.data.Dataset:
    """One batch for each replica in turn, each step; every epoch is another permutation, with no gap between epochs.

    Args:
      workload: what is trained.
      first: the part to begin with.
      parts: of a global batch; 0: one for each replica.
    """
    inputs, labels = (tf.constant(a) for a in arrays(workload))
    share = workload.batch // (parts or workload.replicas)

    def fetch(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        positions = tf.ensure_shape(tf.range(i * share, (i + 1) * share), [share])
        rows = example_indices(positions, inputs.shape[0], workload.seed, True)
        return tf.gather(inputs, rows), tf.gather(labels, rows)

    return tf.data.Dataset.counter(first).map(fetch, num_parallel_calls=2, deterministic=True).prefetch(4)


class AdamW:
    """Adam and decoupled weight decay in two fused ops a variable, on the replica's own copies."""

    def __init__(self, variables: list[tf.Variable], workload: Workload):
        self._variables = variables
        self._moments = [(tf.Variable(tf.zeros(v.shape)), tf.Variable(tf.zeros(v.shape))) for v in variables]
        self._powers = tf.Variable([1.0, 1.0])  # BETA_1 ** t, BETA_2 ** t
        self._rate, self._decay = workload.learning_rate, workload.learning_rate * workload.weight_decay

    def __call__(self, gradients: Sequence[tf.Tensor]) -> None:
        """Updates every variable; call it in replica context, where ``handle`` is the replica's own copy."""
        powers = self._powers * tf.constant([BETA_1, BETA_2])
        self._powers.assign(powers)
        for variable, (m, v), gradient in zip(self._variables, self._moments, gradients, strict=True):
            tf.raw_ops.ResourceApplyGradientDescent(
                var=variable.handle, alpha=self._decay, delta=tf.convert_to_tensor(variable)
            )
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=powers[0],
                beta2_power=powers[1],
                lr=self._rate,
                beta1=BETA_1,
                beta2=BETA_2,
                epsilon=EPSILON,
                grad=gradient,
            )
