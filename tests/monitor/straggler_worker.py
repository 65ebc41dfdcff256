"""A run of one worker, or of several with TF_CONFIG, whose replica 1 has extra work in its backward pass alone.

``python tests/monitor/straggler_worker.py FOLDER REPLICAS``
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from framework import LossOutput, RunConfig
from tests.helpers import Toy

MATRIX = np.random.RandomState(0).randn(300, 300).astype(np.float32) / 20.0


class SlowBackward(Toy):
    """Replica 1's gradient goes through matrix products that change it by nothing that matters."""

    slow: ClassVar[int] = 1

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        loss = model.w * batch
        return LossOutput(loss=extra_backward(loss) if replica == self.slow else loss)


@tf.custom_gradient
def extra_backward(x: tf.Tensor) -> Any:
    """``x``, with a slow gradient."""

    def backward(gradient: tf.Tensor) -> tf.Tensor:
        product = MATRIX + x[0]  # of the batch, so that it is no constant
        for _ in range(6):
            product = tf.tanh(product @ product)
        return gradient + 1e-9 * tf.reduce_sum(product)

    return tf.identity(x), backward


def main(folder: str, replicas: int) -> None:
    """Trains 60 steps."""
    config = RunConfig(
        run_dir=folder,
        train_steps=60,
        global_batch_size=4,
        device="cpu",
        num_replicas=replicas,
        straggler_every=30,
        steps_per_loop=3,
        check_replicas_every=0,
        log_every=0,
        progress="lines",
        tensorboard=False,
    )
    SlowBackward(config).train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
