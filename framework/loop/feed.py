"""The feed: one batch per replica and step, from a pipeline, a dataset or a function of ``InputContext``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import tensorflow as tf

from framework.errors import ConfigError
from framework.loop.input_options import InputOptions

# Limits of what ``BatchPlan.read`` does in one call.
_TOGETHER = 32
_TOGETHER_BYTES = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Which positions of the stream of examples each replica gets at each step.

    Global batch t holds positions ``[start + t * B, start + (t + 1) * B)``, cut at ``stop``. It is cut into
    ``accumulate_steps`` micro-batches, and each of these into one part for each replica; sizes differ by at most one
    row, and a part may be empty. So a micro-batch holds the same examples whatever the number of replicas. Every
    replica gets a part of every batch, so nobody has to ask the others whether there is more.

    Attributes:
      global_batch_size: B, examples per step over all replicas.
      num_replicas: over all workers.
      first_replica: of this worker.
      local_replicas: on this worker.
      accumulate_steps: micro-batches in a batch.
      start: position of the first example, counted from the beginning of the run.
      stop: position after the last one; None: no end.
      seed: of order and augmentation.
      training: shuffled epochs without end, or (False) the data once, in order.
    """

    global_batch_size: int
    num_replicas: int = 1
    first_replica: int = 0
    local_replicas: int = 1
    accumulate_steps: int = 1
    start: int = 0
    stop: int | None = None
    seed: int = 0
    training: bool = True

    @property
    def num_batches(self) -> int | None:
        """Batches from ``start`` to ``stop``, a short last one included; None: no end."""
        return None if self.stop is None else max(0, -(-(self.stop - self.start) // self.global_batch_size))

    @property
    def static_rows(self) -> int | None:
        """Rows of every part of every batch, if that is one number; else None."""
        if self.global_batch_size % (self.num_replicas * self.accumulate_steps):
            return None
        if self.stop is not None and (self.stop - self.start) % self.global_batch_size:
            return None
        return self.global_batch_size // self.num_replicas

    def positions(self) -> tf.data.Dataset:
        """Dataset of int64 ``[rows]``: positions for this worker's replicas in turn, step after step, up to ``stop``.

        A replica's rows are those of its first micro-batch, then of its second, and so on.
        """

        return self._ended(tf.data.Dataset.counter().map(self._part))

    def _ended(self, endless: tf.data.Dataset) -> tf.data.Dataset:
        batches = self.num_batches
        return endless if batches is None else endless.take(batches * self.local_replicas)

    def read(self, fetch: Callable[[tf.Tensor], Any], *, row_bytes: int) -> tf.data.Dataset:
        """Dataset of ``fetch(positions)`` for each element of ``positions()``, in that order, read ahead.

        Args:
          fetch: int64 positions ``[rows]`` -> a nest of tensors ``[rows, ...]``, each row a function of its position.
          row_bytes: about the size of one row of all tensors. Where a part is small, the work of several steps is done
            by one call: for a small model the calls themselves take longer than what they do.
        """
        size = row_bytes * (self.static_rows or 0)
        together = min(_TOGETHER, _TOGETHER_BYTES // size) if size else 1
        fetch = tf.autograph.experimental.do_not_convert(fetch)
        if together < 2:
            one = tf.autograph.experimental.do_not_convert(lambda i: fetch(self._part(i)))
            each = tf.data.Dataset.counter().map(one, num_parallel_calls=2, deterministic=True)
            return self._ended(each).prefetch(4)

        @tf.autograph.experimental.do_not_convert
        def several(i: tf.Tensor) -> Any:
            positions = self._parts(i * together + tf.range(together, dtype=tf.int64))
            rows = fetch(tf.reshape(positions, [-1]))
            return tf.nest.map_structure(lambda t: tf.reshape(t, [*positions.shape, *t.shape[1:]]), rows)

        blocks = tf.data.Dataset.counter().map(several, num_parallel_calls=2, deterministic=True)
        return self._ended(blocks.prefetch(1).unbatch()).prefetch(4)

    @tf.autograph.experimental.do_not_convert
    def _part(self, i: tf.Tensor) -> tf.Tensor:
        """Positions ``[rows]`` of element i."""
        if self.static_rows is not None:
            return self._parts(i[None])[0]
        step, replica = i // self.local_replicas, self.first_replica + i % self.local_replicas
        low = self.start + step * self.global_batch_size
        count = tf.constant(self.global_batch_size, tf.int64)
        if self.stop is not None:
            count = tf.clip_by_value(self.stop - low, 0, count)
        starts, sizes = micro_parts(count, self.accumulate_steps, replica, self.num_replicas)
        return tf.ragged.range(low + starts, low + starts + sizes).values

    def _parts(self, i: tf.Tensor) -> tf.Tensor:
        """The same for elements ``[n]`` of equal sizes: ``[n, rows]``, from a table of one batch."""
        k = np.arange(self.accumulate_steps)
        sizes = self.global_batch_size // (self.accumulate_steps * self.num_replicas)
        replica = self.first_replica + np.arange(self.local_replicas)[:, None]
        first = (k * self.num_replicas + (replica + k) % self.num_replicas) * sizes  # [local replicas, micro-batches]
        table = (first[..., None] + np.arange(sizes)).reshape(self.local_replicas, -1)
        low = self.start + i // self.local_replicas * self.global_batch_size
        rows = low[:, None] + tf.gather(tf.constant(table, tf.int64), i % self.local_replicas)
        # Some are computed ahead of the end and never given out; they must still be positions of examples.
        return rows if self.stop is None else tf.minimum(rows, self.stop - 1)


def micro_parts(count: tf.Tensor, micros: int, replica: tf.Tensor, replicas: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Where a replica's part of each micro-batch starts in a batch of ``count`` rows, and its size: int64 ``[micros]``.

    The larger parts go round: replica r has place (r + k) mod N in micro-batch k, so that none gets all of them.
    """
    k = tf.range(micros, dtype=tf.int64)
    micro_start, micro_size = _share(count, micros, k)
    start, size = _share(micro_size, replicas, (tf.cast(replica, tf.int64) + k) % replicas)
    return micro_start + start, size


def _share(total: tf.Tensor, parts: int, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Start and size of part i of ``total`` rows, the first parts having the larger sizes."""
    share, more = total // parts, total % parts
    return i * share + tf.minimum(i, more), share + tf.cast(i < more, tf.int64)


@runtime_checkable
class Pipeline(Protocol):
    """Data as a function of position: what ``train_data`` and ``eval_data`` return for an exact resume."""

    size: int | None  # examples in one epoch; None: endless

    def batches(self, plan: BatchPlan) -> tf.data.Dataset:
        """Dataset of batches, one element for each element of ``plan.positions()``, in that order."""
        ...


# A Pipeline, a tf.data.Dataset of global batches, or a function of tf.distribute.InputContext that returns a dataset of
# per-replica batches. TensorFlow brings no types that a checker could use.
Data: TypeAlias = Any


@dataclasses.dataclass
class Position:
    """Where the training is in its data; part of every checkpoint."""

    examples: int = 0  # delivered since the beginning of the run
    epoch: int = 0  # of a dataset: passes completed
    batches: int = 0  # of a dataset: batches delivered in this pass


class Feed:
    """Per-replica batches that the compiled loop can read.

    Attributes:
      iterator: the distributed iterator.
      limit: batches it can give, where that is known before; None: until the data ends.
      bounded: whether ``limit`` (or having no end) makes it unnecessary to ask for the end of the data in the graph.
      parts: 0: an element of the iterator is what ``strategy.run`` takes; else each of so many elements in turn is the
        batch of one of this worker's replicas, in memory that all of them share.
      element_spec: of one replica's batch.
    """

    def __init__(self, *, source: Any, limit: int | None, bounded: bool, parts: int = 0):
        self._source = source
        self.limit = limit
        self.bounded = bounded
        self.parts = parts
        self.element_spec = _replica_spec(source)
        self.restart()

    def restart(self) -> None:
        """Starts at the first batch again."""
        self.iterator = iter(self._source)


def open_feed(
    data: Data, strategy: tf.distribute.Strategy, plan: BatchPlan, position: Position, how: InputOptions
) -> Feed:
    """Distributes ``data`` over the replicas, from ``position`` on.

    Raises:
      ConfigError: ``data`` is nothing that can be read, or has no examples.
    """
    # TensorFlow's distributed iterator copies ahead to each device. In the host's memory there is nothing to copy, and
    # the iterator took 0.3 ms of a step.
    on_host = all("CPU:" in device for device in strategy.extended.worker_devices)
    if isinstance(data, tf.data.Dataset):
        endless = is_endless(data)
        rest = how.users(data.skip(position.batches) if position.batches else data)
        alone = on_host and strategy.num_replicas_in_sync == 1
        source = rest if alone else strategy.experimental_distribute_dataset(rest)
        return Feed(source=source, limit=None, bounded=endless)
    if isinstance(data, Pipeline):
        if data.size is not None and data.size < 1:
            raise ConfigError(f"the data has {data.size} examples but training and evaluation need at least 1")
        how.check_pipeline()
        if on_host:
            return Feed(
                source=how.tuned(data.batches(plan)), limit=plan.num_batches, bounded=True, parts=plan.local_replicas
            )
        distributed = strategy.distribute_datasets_from_function(lambda context: how.tuned(data.batches(plan)))
        return Feed(source=distributed, limit=plan.num_batches, bounded=True)
    if callable(data):

        def from_context(context: tf.distribute.InputContext) -> tf.data.Dataset:
            dataset = how.tuned(data(context))
            return dataset.skip(position.batches * plan.local_replicas) if position.batches else dataset

        distributed = strategy.distribute_datasets_from_function(from_context)
        return Feed(source=distributed, limit=None, bounded=False)
    raise ConfigError(
        f"data is a {type(data).__name__} but it must be a pipeline of input_pipelines, a tf.data.Dataset of global "
        "batches, or a function of tf.distribute.InputContext that returns a tf.data.Dataset"
    )


def data_kind(data: Data) -> str:
    """``dataset``, ``pipeline`` or ``function``."""
    return "dataset" if isinstance(data, tf.data.Dataset) else "pipeline" if isinstance(data, Pipeline) else "function"


def data_size(data: Data) -> int | None:
    """Examples of a pipeline or batches of a dataset in one epoch, if that is known and finite."""
    if isinstance(data, tf.data.Dataset):
        count = _cardinality(data)
        return count if count >= 0 else None
    return data.size if isinstance(data, Pipeline) else None


def is_endless(data: tf.data.Dataset) -> bool:
    """Whether TensorFlow knows that a dataset has no end."""
    return _cardinality(data) == tf.data.INFINITE_CARDINALITY


def _cardinality(data: tf.data.Dataset) -> int:
    return int(data.cardinality().numpy())


def _replica_spec(distributed: Any) -> Any:
    """The element spec of one replica."""
    spec = distributed.element_spec
    parts = getattr(spec, "_component_specs", None)  # a PerReplicaSpec has one a replica
    if parts is None and isinstance(spec, tf.TypeSpec):
        return spec
    return tf.nest.map_structure(_first, spec)


def _first(spec: Any) -> Any:
    parts = getattr(spec, "_value_specs", None)
    return parts[0] if parts else spec
