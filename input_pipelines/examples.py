"""Pipelines over examples that are read one by one, in any order, and of which some may turn out to be unreadable."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from framework import BatchPlan, ConfigError, LockstepError
from input_pipelines.order import example_indices, example_keys

# (example int64 scalar, seed int64 [2], training) -> the example's tensors, in the graph.
Load = Callable[[tf.Tensor, tf.Tensor, bool], Any]
# (positions int64 [rows], seed) -> examples int64 [rows].
Order = Callable[[tf.Tensor, int], tf.Tensor]

# Reading an example takes 50 us or more, so only parts of very few examples are worth being read several at once.
_LEAST_BYTES = 250_000


class BadExamples:
    """The examples that could not be read, and how many of them are borne.

    Args:
      limit: so many different ones are skipped; one more is an error.
      describe: example -> where it is, for messages.
    """

    def __init__(self, limit: int, describe: Callable[[int], str]):
        if limit < 0:
            raise ConfigError(f"skip_bad_examples={limit} but it must be at least 0; 0 skips none")
        self.limit, self.describe = limit, describe
        self.reasons: dict[int, str] = {}
        self._lock = threading.Lock()  # several batches are read at a time

    def add(self, example: int, reason: str) -> None:
        """Counts an example, with a warning; a second time it is nothing new.

        Raises:
          LockstepError: it is one too many.
        """
        with self._lock:
            if example in self.reasons:
                return
            message = f"{self.describe(example)} cannot be read: {reason}"
            if len(self.reasons) >= self.limit:
                skipped = f"; {self.limit} were skipped before" if self.limit else ""
                raise LockstepError(
                    f"{message} (skip_bad_examples={self.limit}{skipped}); repair or remove it, or pass a larger "
                    "skip_bad_examples"
                )
            self.reasons[example] = reason
            print(f"warning: {message}; the next readable example takes its place", flush=True)


class ExamplePipeline:
    """Examples by number, as a function of (seed, position).

    The examples of one part of a batch are read and decoded in parallel. If one of them fails, the part is made again
    one by one: the place of an unreadable example is taken by the next readable one (example + 1, + 2, ..., after the
    last the first). So positions, batches and shapes stay what they are, whichever replica meets it; the substitute is
    seen twice an epoch. Every failure counts against ``skip_bad_examples``, once for each example and process.

    Args:
      size: examples in an epoch.
      load: the example of a number, with fixed shapes; see ``Load``.
      order: of training; None: a seeded permutation of all examples in each epoch.
      shuffle: whether training is shuffled; evaluation never is.
      skip_bad_examples: so many unreadable ones are replaced; one more ends the run. 0: the first one does.
      describe: example -> where it is, for messages.

    Raises:
      ConfigError: the first example cannot be read and ``skip_bad_examples`` is 0.
    """

    def __init__(
        self,
        *,
        size: int,
        load: Load,
        describe: Callable[[int], str],
        order: Order | None = None,
        shuffle: bool = True,
        skip_bad_examples: int = 0,
    ):
        self.size: int = size
        self._load = tf.autograph.experimental.do_not_convert(load)
        self._traced = {training: self._trace(training) for training in (False, True)}
        self._order, self._shuffle = order, shuffle
        self._bad = BadExamples(skip_bad_examples, describe)
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if not skip_bad_examples:  # a foreign file is refused here and not at the first step
            try:
                self._alone(0, np.zeros(2, np.int64), False)
            except LockstepError as error:
                raise ConfigError(str(error)) from error

    @property
    def bad_examples(self) -> dict[int, str]:
        """The examples that were replaced so far in this process, each with the reason."""
        return dict(self._bad.reasons)

    def batches(self, plan: BatchPlan) -> tf.data.Dataset:
        """See ``framework.Pipeline``."""
        spec = self._spec(plan.training)
        sizes = [s.shape.num_elements() * max(1, s.dtype.size) for s in tf.nest.flatten(spec)]

        def fetch(positions: tf.Tensor) -> Any:
            count = positions.shape[0]
            if count is None:  # there may be none; then position 0 is read and taken off again
                some = tf.concat(
                    [positions, tf.zeros([tf.cast(tf.equal(tf.size(positions), 0), tf.int32)], tf.int64)], 0
                )
                made = self._rows(some, plan, spec)
                return tf.nest.map_structure(lambda t: t[: tf.size(positions)], made)
            return self._rows(positions, plan, spec)

        return plan.read(fetch, row_bytes=max(_LEAST_BYTES, sum(sizes)))

    def _rows(self, positions: tf.Tensor, plan: BatchPlan, spec: Any) -> Any:
        """The examples at some positions, at least one."""
        shuffle = self._shuffle and plan.training
        if shuffle and self._order is not None:
            index = self._order(positions, plan.seed)
        else:
            index = example_indices(positions, self.size, plan.seed, shuffle)
        keys = example_keys(positions, index, self.size, plan.seed)
        count: Any = positions.shape[0] or tf.size(positions, tf.int64)
        specs = tf.nest.flatten(spec)

        def one(number: tf.Tensor, key: tf.Tensor) -> Any:
            return self._load(number, key, plan.training)

        def one_by_one(numbers: tf.Tensor, seeds: tf.Tensor) -> Any:
            function = self._one_by_one_in(plan.training, specs)
            failure, *parts = tf.py_function(function, [numbers, seeds], [tf.string, *(s.dtype for s in specs)])
            # Not raised in Python: TensorFlow would put the traceback of this module into the message.
            with tf.control_dependencies([tf.debugging.Assert(tf.equal(failure, ""), [failure])]):
                parts = [tf.ensure_shape(p, [positions.shape[0], *s.shape]) for p, s in zip(parts, specs, strict=True)]
            return tf.nest.pack_sequence_as(spec, parts)

        # A remainder is dropped so that what is left behind a failure is no batch: then the second source has the word.
        plain = tf.autograph.experimental.do_not_convert
        quick = tf.data.Dataset.from_tensor_slices((index, keys))
        quick = quick.map(plain(one), num_parallel_calls=self._cores, deterministic=True)
        quick = quick.batch(count, drop_remainder=True).ignore_errors()
        careful = tf.data.Dataset.from_tensors((index, keys)).map(plain(one_by_one))
        return quick.concatenate(careful).take(1).get_single_element()

    def _one_by_one_in(self, training: bool, specs: list[tf.TensorSpec]) -> Callable[..., list[Any]]:
        """A function (numbers, seeds) -> what ended the reading, or nothing, and the examples' tensors."""

        def run(numbers: tf.Tensor, seeds: tf.Tensor) -> list[Any]:
            pairs = zip(numbers.numpy(), seeds.numpy(), strict=True)
            try:
                rows = [tf.nest.flatten(self._alone(int(number), seed, training)) for number, seed in pairs]
            except LockstepError as error:
                return [str(error), *(tf.zeros([len(numbers), *s.shape], s.dtype) for s in specs)]
            return ["", *(tf.stack(column) for column in zip(*rows, strict=True))]

        return run

    def _alone(self, number: int, seed: np.ndarray, training: bool) -> Any:
        """One example, or its substitute, read at once."""
        for step in range(self.size):
            example = (number + step) % self.size
            try:
                return self._traced[training](tf.constant(example, tf.int64), tf.constant(seed, tf.int64))
            except tf.errors.OpError as error:
                self._bad.add(example, _reason(error))
        raise LockstepError(f"none of the {self.size} examples can be read; the first one: {self._bad.reasons[0]}")

    def _trace(self, training: bool) -> Any:
        """``load`` as a function of the graph, traced at its first use."""
        signature = [tf.TensorSpec([], tf.int64), tf.TensorSpec([2], tf.int64)]
        return tf.function(lambda n, s: self._load(n, s, training), input_signature=signature, autograph=False)

    def _spec(self, training: bool) -> Any:
        """Tensor specs of one example.

        Raises:
          ConfigError: a shape that is not fixed.
        """
        outputs = self._traced[training].get_concrete_function().structured_outputs
        spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), outputs)
        for part in tf.nest.flatten(spec):
            if not part.shape.is_fully_defined():
                raise ConfigError(
                    f"an example has a tensor of shape {part.shape} but batches need fixed shapes; resize, crop or pad "
                    "it, or use tf.ensure_shape"
                )
        return spec


def _reason(error: tf.errors.OpError) -> str:
    """What went wrong, without the op's name and the traceback."""
    text = error.message.strip().splitlines()[0] if error.message.strip() else type(error).__name__
    return text.removeprefix("{{").split("}} ")[-1].split(" [Op:")[0]
