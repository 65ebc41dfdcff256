"""The inner loop: many steps in one call of one compiled function, and one answer to the host."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from framework.errors import ConfigError, LockstepError
from framework.loop.feed import Feed
from framework.step.values import Stat, StatLayout

# How sums, maxima and minima of two steps combine, and the value that changes nothing.
_COMBINE = (
    (tf.add, np.float64(0.0)),
    (tf.maximum, np.float64(-np.inf)),
    (tf.minimum, np.float64(np.inf)),
)


class StepResult(NamedTuple):
    """What one step gives on each replica, equal on all of them."""

    stats: dict[str, Stat]  # reduced over replicas
    finite: tf.Tensor  # bool: the update was made
    alarm: tf.Tensor  # bool: it was not, and a loss scale is not to blame
    norms: tf.Tensor  # float32 [replicas, 1 + variables]: see StepSums.norms; of any size where there is none


# (one replica's batch, the step's number) -> its result; called in replica context while tracing.
ReplicaStep = Callable[[Any, tf.Tensor], StepResult]


class LoopResult(NamedTuple):
    """What the host learns after one inner loop."""

    steps: int  # batches consumed
    ended: bool  # the data ended
    failed: bool  # the last step raised an alarm, and the loop stopped there
    skipped: int  # steps without an update
    alarms: int  # of these, the ones that no loss scale explains
    alarm_step: int  # number of the last of them, or 0
    examples: float  # delivered, also to steps without an update
    waited: float  # seconds the devices had nothing to do but wait for the next batch; NaN: not measured
    seconds: float  # wall clock of the call
    vectors: tuple[
        np.ndarray, ...
    ]  # figures of the steps with finite sums, in the layout's order: sums, maxima, minima, last
    norms: np.ndarray  # of the last alarm, flat: see StepSums.norms


class CompiledLoop:
    """A while loop around ``strategy.run``, compiled once; the number of steps is a tensor, so nothing retraces.

    Args:
      strategy: the distribution strategy.
      replica_step: see ``ReplicaStep``; called in replica context while tracing.
      stop_on_alarm: leave the loop at the first alarm.
      timed: measure the time spent waiting for input.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy,
        replica_step: ReplicaStep,
        stop_on_alarm: bool = True,
        timed: bool = True,
    ):
        self._timed = timed
        self._strategy = strategy
        self._replica_step = replica_step
        self._stop_on_alarm = stop_on_alarm
        self._layout: StatLayout | None = None
        self._functions: dict[bool, Any] = {}
        self.traces = 0

    @property
    def layout(self) -> StatLayout:
        """Names and order of the figures; known after the first call."""
        if self._layout is None:
            raise LockstepError("the loop has not run yet, so its figures are not known")
        return self._layout

    def _clock(self) -> tf.Tensor:
        """Seconds, float64; 0 where the time is not asked for: TensorFlow refuses to tell it in deterministic runs."""
        if self._timed:
            return tf.timestamp()
        return tf.constant(0.0, tf.float64)

    def _function(self, feed: Feed) -> Any:
        if feed.bounded not in self._functions:
            # A partial has no code object: TensorFlow counts traces by code, and would warn of retracing where several
            # loops (training and each evaluation set) are traced once each.
            steps = functools.partial(self._make(feed.bounded))
            self._functions[feed.bounded] = tf.function(steps, reduce_retracing=True)
        return self._functions[feed.bounded]

    def trace(self, feed: Feed) -> StatLayout:
        """Traces without running, and returns the layout of the figures."""
        with _own_errors():
            self._function(feed).get_concrete_function(feed.iterator, tf.constant(1, tf.int64), tf.constant(1))
        return self.layout

    def __call__(self, feed: Feed, first_step: int, steps: int) -> LoopResult:
        """Runs up to ``steps`` steps, the first of which has number ``first_step``, and waits for the devices."""
        function = self._function(feed)
        start = time.perf_counter()
        with _own_errors():
            tensors = function(feed.iterator, tf.constant(first_step, tf.int64), tf.constant(steps))
        # One transfer for everything; reading the values is also what waits for the devices.
        numbers = [np.asarray(t) for t in tensors]
        seconds = time.perf_counter() - start
        done, ended, failed, skipped, alarms, alarm_step, examples, waited, norms, *vectors = numbers
        return LoopResult(
            steps=int(done),
            ended=bool(ended),
            failed=bool(failed),
            skipped=int(skipped),
            alarms=int(alarms),
            alarm_step=int(alarm_step),
            examples=float(examples),
            waited=float(waited) if self._timed else float("nan"),
            seconds=seconds,
            vectors=tuple(vectors),
            norms=norms,
        )

    def graph(self) -> tf.Graph | None:
        """The traced graph, for TensorBoard; None before the first call."""
        for function in self._functions.values():
            for concrete in function._list_all_concrete_functions():
                return concrete.graph
        return None

    def _make(self, bounded: bool) -> Callable[..., Any]:
        def one_step(batch: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
            """One step of all replicas; the figures come back equal from each, the first one's are taken."""

            def replica(batch: Any) -> tuple[tf.Tensor, ...]:
                result = self._replica_step(batch, step)
                self._set_layout(result.stats)
                vectors = self.layout.vectors(result.stats)
                rows = tf.cast(result.stats["examples"].value, tf.float64)
                return (*vectors, result.finite, result.alarm, rows, tf.reshape(result.norms, [-1]))

            outputs = self._strategy.run(replica, args=(batch,))
            return tuple(self._strategy.experimental_local_results(o)[0] for o in outputs)

        def body(iterator: Any, first: tf.Tensor, state: tuple[tf.Tensor, ...]) -> Any:
            i, _, failed, skipped, alarms, alarm_step, examples, waited, before, norms, *totals = state
            if bounded:
                batch, has_value = next(iterator), None
            else:
                optional = iterator.get_next_as_optional()
                has_value = optional.has_value()
            with tf.control_dependencies(_leaves(batch) if has_value is None else [has_value]):
                ready = self._clock()
            # Until `before` the step before this one was still computing: that part was not spent on waiting.
            waited += tf.maximum(ready - before, 0.0)

            def run(batch: Any) -> tuple[tf.Tensor, ...]:
                number = first + tf.cast(i, tf.int64)
                *new, finite, alarm, rows, new_norms = one_step(batch, number)
                with tf.control_dependencies([new[0], finite]):
                    end = self._clock()
                # A step skipped for its gradients alone still has figures.
                usable = finite
                if "loss" in self.layout.kinds:
                    usable |= tf.math.is_finite(new[0][self.layout.place("loss")])
                merged = [
                    _merge(total, tf.where(usable, part, tf.fill(tf.shape(part), neutral)), combine)
                    for total, part, (combine, neutral) in zip(totals[:3], new, _COMBINE, strict=False)
                ]
                kept = tf.cond(alarm, lambda: new_norms, lambda: norms)
                kept.set_shape([None])
                return (
                    i + 1,
                    tf.constant(False),
                    alarm if self._stop_on_alarm else failed,
                    skipped + tf.cast(tf.logical_not(finite), tf.int32),
                    alarms + tf.cast(alarm, tf.int32),
                    tf.where(alarm, number, alarm_step),
                    examples + rows,
                    waited,
                    end,
                    kept,
                    *merged,
                    new[3],
                )

            if has_value is None:
                return run(batch)
            end_of_data = (i, tf.constant(True), *state[2:7], waited, before, norms, *totals)
            return tf.cond(has_value, lambda: run(optional.get_value()), lambda: end_of_data)

        def run_steps(iterator: Any, first: tf.Tensor, limit: tf.Tensor) -> tuple[tf.Tensor, ...]:
            self.traces += 1  # runs while tracing only
            no, zero, empty = tf.constant(False), tf.constant(0), tf.zeros([0], tf.float64)
            nothing = tf.constant(0.0, tf.float64)
            counts = (zero, zero, tf.constant(0, tf.int64), nothing)
            state = (zero, no, no, *counts, nothing, self._clock(), tf.zeros([0]), *[empty] * 4)
            shapes = tuple(tf.TensorShape([None]) if s.shape.rank else s.shape for s in state)
            result = tf.while_loop(
                lambda i, ended, failed, *_: (i < limit) & tf.logical_not(ended | failed),
                lambda *state: body(iterator, first, state),
                state,
                shape_invariants=shapes,
                parallel_iterations=1,
            )
            return (*result[:8], *result[9:])

        return run_steps

    def _set_layout(self, stats: dict[str, Stat]) -> None:
        layout = StatLayout(stats)
        if self._layout is not None and self._layout.kinds != layout.kinds:
            raise ConfigError(
                f"the step reported {layout.kinds} but before it reported {self._layout.kinds}; "
                "report the same figures in every branch"
            )
        self._layout = layout


def _merge(total: tf.Tensor, new: tf.Tensor, combine: Callable[..., tf.Tensor]) -> tf.Tensor:
    """``combine(total, new)``, where ``total`` is still empty at the first step."""
    merged = tf.cond(tf.equal(tf.size(total), 0), lambda: new, lambda: combine(total, new))
    merged.set_shape([None])
    return merged


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raises the framework's own errors as they were: AutoGraph replaces them by others with long texts."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            inner = cause.__cause__ or cause.__context__
            if isinstance(cause, LockstepError) and not isinstance(inner, LockstepError):
                raise cause.with_traceback(cause.__traceback__) from None
            cause = inner
        raise


def _leaves(batch: Any) -> list[tf.Tensor]:
    return [t for t in tf.nest.flatten(batch, expand_composites=True) if isinstance(t, tf.Tensor)]
