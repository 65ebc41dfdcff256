"""The training that Lockstep TF does, written out without it: read it top to bottom in five minutes.

Digits, SGD with momentum, any number of replicas on logical CPU devices. A test holds its losses against the trainer's:
they are equal to the last bit.

    python examples/plain_loop.py --replicas=2 --steps=200
"""

from __future__ import annotations

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

DATA = pathlib.Path(__file__).parents[1] / "input_pipelines" / "data" / "digits.npz"


def word(value: int) -> tf.Tensor:
    """32 bits as TensorFlow wants them."""
    return tf.constant(value, tf.uint32)


def mix(value: tf.Tensor) -> tf.Tensor:
    """Spreads 32 bits over 32 bits (MurmurHash3's finaliser): the shuffle below hardly mixes its key itself."""
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        value = tf.bitwise.bitwise_xor(value, tf.bitwise.right_shift(value, word(16))) * word(factor)
    return tf.bitwise.bitwise_xor(value, tf.bitwise.right_shift(value, word(16)))


def main() -> list[float]:
    """Trains, prints the loss now and then, and returns the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=96, help="examples per step, over all replicas")
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    if flags.replicas < 1 or flags.batch % flags.replicas:
        parser.error(f"--batch={flags.batch} must be divisible by --replicas={flags.replicas} in this plain loop")

    # 1. Devices and strategy. Logical devices must be made before TensorFlow's first op.
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * flags.replicas)
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(flags.replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )

    # 2. Model, momentum slots: built in the scope, so that every replica has a copy of each variable.
    keras.utils.set_random_seed(flags.seed)
    with strategy.scope():
        dense = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(256, activation="relu")]
        model = keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), *dense, keras.layers.Dense(10)])
        weights = [v.value for v in model.trainable_variables]
        velocities = [tf.Variable(tf.zeros(w.shape), trainable=False) for w in weights]

    # 3. Data. Step t takes positions [tB, (t + 1)B) of an endless stream; epoch e of the stream is a permutation of the
    # examples keyed by (seed, e), computed for each position alone: to go on at step t costs nothing.
    with np.load(DATA, allow_pickle=False) as arrays:
        images, labels = arrays["train_images"].astype(np.float32) / 16.0, arrays["train_labels"].astype(np.int32)
    size, share = len(images), flags.batch // flags.replicas

    def replica_batch(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Element i is what replica i % N gets at step i // N; the strategy deals them out in turn."""
        positions = tf.range(share, dtype=tf.int64) + i * share
        epoch = tf.cast(positions // size, tf.uint32)
        key = mix(epoch * word(0x9E3779B9) + mix(word(flags.seed) + word(0x6F726465)))  # of seed and epoch
        key = tf.stack([key, mix(key + word(1)), mix(key + word(2))], 1)
        index = tf.raw_ops.RandomIndexShuffle(index=positions % size, seed=key, max_index=size - 1, rounds=8)
        return tf.gather(images, index), tf.gather(labels, index)

    dataset = tf.data.Dataset.counter().map(replica_batch, num_parallel_calls=2).prefetch(4)
    batches = iter(strategy.distribute_datasets_from_function(lambda context: dataset))

    # 4. The step, on each replica: sums over its examples, one all-reduce, one division, one local update.
    def step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        x, y = batch
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            total = tf.reduce_sum(losses)  # a sum: only sums may cross replicas
        count = tf.cast(tf.size(losses), tf.float32)
        sums = [*tape.gradient(total, weights), total, count]
        context = tf.distribute.get_replica_context()
        *gradients, total, count = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
        scale = 1.0 / count  # the one division
        for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
            # On this replica's own copies; they stay equal because the gradients are.
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight.handle,
                accum=velocity.handle,
                lr=flags.learning_rate,
                grad=gradient * scale,
                momentum=0.9,
            )
        return tf.stack([total, count])

    # 5. The loop, in the graph: the host is told once per call.
    @tf.function
    def steps(batches: tf.distribute.DistributedIterator, n: tf.Tensor) -> tf.Tensor:
        sums = tf.TensorArray(tf.float32, n)
        for i in tf.range(n):
            reduced = strategy.run(step, args=(next(batches),))  # the same on every replica
            sums = sums.write(i, strategy.experimental_local_results(reduced)[0])
        return sums.stack()

    history: list[float] = []
    while len(history) < flags.steps:
        sums = steps(batches, tf.constant(min(20, flags.steps - len(history)))).numpy().astype(np.float64)
        history += (sums[:, 0] / sums[:, 1]).tolist()
        print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
