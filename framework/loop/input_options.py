"""How input is read: shared over workers, by which threads, with how much memory, on which machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.config import RunConfig


class InputOptions:
    """The settings of a run's input.

    Args:
      config: ``shard_by``, ``data_service``, ``input_threads``, ``input_ram_budget_mb`` and ``deterministic`` are read.
      num_workers: of the cluster.

    Raises:
      ConfigError: a data service with several workers.
    """

    def __init__(self, config: RunConfig, num_workers: int = 1):
        self._config = config
        self._workers = num_workers
        if config.data_service and num_workers > 1:
            raise ConfigError(
                f"data_service={config.data_service} with {num_workers} workers: the service deals elements out as "
                "they are asked for, so workers would not share each batch equally; leave it out, or run one worker"
            )
        if config.data_service and config.deterministic:
            raise ConfigError(
                f"data_service={config.data_service} with deterministic=True: the service deals elements out in the "
                "order its workers make them; leave one of the two out"
            )

    def tuned(self, data: tf.data.Dataset) -> tf.data.Dataset:
        """``data`` with the threads and the memory asked for."""
        config, options = self._config, tf.data.Options()
        if config.input_threads:
            options.threading.private_threadpool_size = config.input_threads
        if config.input_ram_budget_mb:
            options.autotune.enabled = True
            options.autotune.ram_budget = config.input_ram_budget_mb * 1_000_000
        return data.with_options(options)

    def users(self, data: tf.data.Dataset) -> tf.data.Dataset:
        """A user's dataset of global batches: over the service or over the workers, and tuned."""
        config = self._config
        if config.data_service:
            service = tf.data.experimental.service
            made = service.distribute(service.ShardingPolicy.DYNAMIC, f"grpc://{config.data_service}")
            # Each of the service's workers has a share of the elements, and so a short batch at its end.
            data = data.apply(made).rebatch(config.global_batch_size)
        if self._workers > 1:
            policies = {
                "data": tf.data.experimental.AutoShardPolicy.DATA,
                "file": tf.data.experimental.AutoShardPolicy.FILE,
            }
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = policies[config.shard_by]
            data = data.with_options(options)
        return self.tuned(data)

    def check_pipeline(self) -> None:
        """Raises ConfigError where a pipeline cannot be read as asked."""
        if self._config.data_service:
            raise ConfigError(
                f"data_service={self._config.data_service} with a pipeline, whose order is exact: a service does not "
                "keep it; return a tf.data.Dataset from train_data, or leave data_service out"
            )

    def describe(self, kind: str) -> str:
        """One line about the training data for people; ``kind``: pipeline, dataset or function."""
        if kind == "pipeline":
            return "data: a pipeline, in an order and from a position that are exact; each worker reads its own rows"
        if kind == "function":
            return (
                "data: a function of InputContext: its batches are a replica's, and each worker's its own to share out"
            )
        if self._config.data_service:
            where = f", made by the data service at {self._config.data_service}; order and resume are not exact"
        else:
            where = f", split over {self._workers} workers by {self._config.shard_by}" if self._workers > 1 else ""
        return f"data: a tf.data.Dataset of global batches{where}; a resume reads and drops what was used of this pass"
