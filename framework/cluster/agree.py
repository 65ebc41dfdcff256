"""Tells every worker what each of them has to say: one all-reduce of short texts, or of arrays of each replica."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from framework.cluster.cluster import Cluster

# Bytes of a worker's text; what is longer is cut. A text crosses as a float32 a byte: 64 workers send 1 MB.
LENGTH = 4096


def exchange(strategy: Any, cluster: Cluster, text: str) -> list[str]:
    """The text of every worker, in the order of their index; all workers have to call it, and wait for each other.

    Args:
      strategy: the run's strategy, of one worker or of several.
      cluster: who takes part.
      text: this worker's; at most ``LENGTH`` bytes of it cross.
    """
    if cluster.num_workers == 1:
        return [text]
    data = text.encode()[:LENGTH]
    mine = np.zeros([cluster.num_workers, LENGTH], np.float32)
    mine[cluster.index, : len(data)] = np.frombuffer(data, np.uint8)
    nothing = np.zeros_like(mine)
    local = strategy.num_replicas_in_sync // cluster.num_workers
    first = cluster.index * local

    import tensorflow as tf

    # A sum over all replicas in which only one replica of each worker has a row, and that one alone.
    def value(context: Any) -> Any:
        return tf.constant(mine if context.replica_id_in_sync_group == first else nothing)

    values = strategy.experimental_distribute_values_from_function(value)
    total = strategy.experimental_local_results(_sum(strategy)(values))[0].numpy()
    rows = total.astype(np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


@functools.cache
def _sum(strategy: Any) -> Any:
    """Per-replica tensors -> their sum over the replicas of all workers, compiled once."""
    import tensorflow as tf

    def add(value: tf.Tensor) -> tf.Tensor:
        # The identity is an op on the replica's device; an argument has none, and TensorFlow asks where it is.
        value = tf.identity(value)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

    return tf.function(lambda values: strategy.run(add, args=(values,)), autograph=False)


def gather_arrays(strategy: Any, cluster: Cluster, local: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of all replicas, ``[replicas, ...]``, in their order; all workers have to call it, and wait.

    Args:
      strategy: the run's strategy, of one worker or of several.
      cluster: who takes part.
      local: an int64 array of each replica of this worker; of one shape on all replicas.
    """
    if cluster.num_workers == 1:
        return np.stack(local)
    import tensorflow as tf

    first = cluster.index * len(local)
    shape = (strategy.num_replicas_in_sync, *local[0].shape)

    def value(context: Any) -> Any:
        replica = int(context.replica_id_in_sync_group)
        slots = np.zeros(shape, np.int64)
        slots[replica] = local[replica - first]
        return tf.constant(slots)

    values = strategy.experimental_distribute_values_from_function(value)
    return strategy.experimental_local_results(_sum(strategy)(values))[0].numpy()
