"""The inner loop: many steps in one call of one compiled function, and one answer to the host."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from framework.errors import CheckFailed, ConfigError, LockstepError
from framework.loop.feed import Feed
from framework.monitor.replicas import FIRST_WORDS, LAST_WORDS
from framework.step.values import Stat, StatLayout


class StepResult(NamedTuple):
    """What one step gives on each replica, equal on all of them."""

    stats: dict[str, Stat]  # reduced over replicas
    finite: tf.Tensor  # bool: the update was made
    alarm: tf.Tensor  # bool: it was not, and a loss scale is not to blame
    norms: tf.Tensor  # float32 [replicas, 1 + variables]: see StepSums.norms; of any size where there is none
    # Of several workers, [1 + workers]: above 0 where one asks all of them to stop behind this step; then how many
    # steps each wants in the next inner loop at most.
    wishes: tf.Tensor | None = None
    arrival: tf.Tensor | None = None  # of this replica alone: see framework.monitor.stamps


# (one replica's batch, the step's number) -> its result; called in replica context while tracing.
ReplicaStep = Callable[[Any, tf.Tensor], StepResult]


class LoopResult(NamedTuple):
    """What the host learns after one inner loop."""

    steps: int  # batches consumed
    ended: bool  # the data ended
    failed: bool  # the last step raised an alarm, and the loop stopped there
    asked: float  # not 0: a worker asked to stop, and the loop stopped behind that step on all of them
    next_steps: int  # the least that a worker wants in the next loop; 0: nobody said
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
    # float64 [1 + local replicas], sums over the steps: seconds from a batch that was ready to the end of the
    # reduction, then to its begin on each replica; None: not measured.
    times: np.ndarray | None = None
    # float64, flat [replicas, 1 + variables], sums over the updates: logarithms of StepSums.norms; None: not asked for.
    logs: np.ndarray | None = None


# Behind the figures in the vector of sums: updates, alarms, examples, wishes, seconds waited. Then times, then logs.
_COUNTS = 4  # without wishes
_OUTPUTS = 7  # of a replica's step, which are equal on all of them


class CompiledLoop:
    """A while loop around ``strategy.run``, compiled once; the number of steps is a tensor, so nothing retraces.

    Args:
      strategy: the distribution strategy.
      replica_step: see ``ReplicaStep``; called in replica context while tracing.
      stop_on_alarm: leave the loop at the first alarm.
      timed: measure the time spent waiting for input.
      logged: every step's norms are added up as logarithms.
      stamped: every step gives ``StepResult.arrival``; only where ``timed``.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy,
        replica_step: ReplicaStep,
        stop_on_alarm: bool = True,
        timed: bool = True,
        stamped: bool = False,
        logged: bool = False,
    ):
        self._timed = timed
        self._stamped = stamped
        self._stamps = 0  # figures of LoopResult.times
        self._logged = logged
        self._logs = 0  # figures of LoopResult.logs
        self._wishes = 0  # figures of StepResult.wishes
        self._strategy = strategy
        self._replica_step = replica_step
        self._stop_on_alarm = stop_on_alarm
        self._layout: StatLayout | None = None
        self._maxima = 0  # figures that are maxima
        self._functions: dict[tuple[bool, int], Any] = {}
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
        key = (feed.bounded, feed.parts)
        if key not in self._functions:
            # A partial has no code object: TensorFlow counts traces by code, and would warn of retracing where several
            # loops (training and each evaluation set) are traced once each. AutoGraph: see framework.step.autograph.
            steps = functools.partial(self._make(*key))
            self._functions[key] = tf.function(steps, reduce_retracing=True, autograph=False)
        return self._functions[key]

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
        return self._result(numbers, time.perf_counter() - start)

    def _result(self, numbers: list[np.ndarray], seconds: float) -> LoopResult:
        """What the compiled function gave, taken apart."""
        done, ended, sums, peaks, last, norms = numbers
        if not done:
            behind = _COUNTS + self._wishes + self._stamps + self._logs
            sums, peaks, last = np.zeros(behind), np.zeros(1), np.zeros(1)
        sizes = [_COUNTS + self._wishes, self._stamps, self._logs]
        sums, counts, stamps, logs = np.split(sums, np.cumsum([len(sums) - sum(sizes), *sizes[:-1]]))
        updates, alarms, examples, *wishes, waited = counts
        asked, *lengths = wishes or [0.0]
        failed = self._stop_on_alarm and bool(alarms)
        return LoopResult(
            steps=int(done),
            ended=bool(ended) and not failed and not asked,
            failed=failed,
            asked=float(asked),
            next_steps=round(min(lengths) / int(done)) if done and lengths else 0,
            skipped=int(done - updates),
            alarms=int(alarms),
            alarm_step=int(peaks[-1]),
            examples=float(examples),
            waited=float(waited) if self._timed else float("nan"),
            seconds=seconds,
            vectors=(sums, peaks[: self._maxima], -peaks[self._maxima : -1], last[:-1]),
            norms=norms,
            times=stamps if self._stamped else None,
            logs=logs if self._logged else None,
        )

    def graph(self) -> tf.Graph | None:
        """The traced graph, for TensorBoard; None before the first call."""
        for function in self._functions.values():
            for concrete in function._list_all_concrete_functions():
                return concrete.graph
        return None

    def _make(self, bounded: bool, parts: int) -> Callable[..., Any]:
        # Every tensor that goes from step to step costs about as much as five small ops, so they are few: what is
        # added up is one vector, what is a maximum (or a negated minimum) another.
        def one_step(batch: Any, step: tf.Tensor) -> tuple[Any, ...]:
            """One step of all replicas: figures, which are equal on each, so the first one's are taken; then stamps."""

            def replica(batch: Any) -> tuple[tf.Tensor, ...]:
                if parts:
                    batch = batch[_local_replica(parts)]
                result = self._replica_step(batch, step)
                self._set_layout(result.stats)
                sums, maxima, minima, last = self.layout.vectors(result.stats)
                usable = result.finite
                if "loss" in result.stats:  # a step skipped for its gradients alone still has figures
                    usable |= tf.math.is_finite(result.stats["loss"].value)
                wishes = tf.zeros([0], tf.float64) if result.wishes is None else tf.cast(result.wishes, tf.float64)
                self._wishes = wishes.shape[0]
                halt = wishes[0] > 0.0 if self._wishes else tf.constant(False)
                halt = halt | result.alarm if self._stop_on_alarm else halt
                flags = tf.cast(tf.stack([result.finite, result.alarm]), tf.float64)
                rows = tf.cast(result.stats["examples"].value, tf.float64)
                counts = tf.concat([flags, rows[None], wishes], 0)
                peaks = tf.where(result.alarm, tf.cast(step, tf.float64), 0.0)[None]
                sums = tf.where(usable, sums, tf.zeros([], tf.float64))
                if maxima.shape[0] or minima.shape[0]:
                    both = tf.concat([maxima, -minima], 0)
                    both = tf.where(usable, both, tf.constant(-np.inf, tf.float64))
                    peaks = tf.concat([both, peaks], 0)
                self._maxima = maxima.shape[0]
                outputs = sums, counts, peaks, last, halt, result.alarm, tf.reshape(result.norms, [-1])
                return (*outputs, result.arrival) if self._stamped else outputs

            results = self._strategy.experimental_local_results
            outputs = self._strategy.run(replica, args=(batch,))
            first = tuple(results(o)[0] for o in outputs[:_OUTPUTS])
            if not self._stamped:
                return (*first, None)
            return (*first, results(outputs[_OUTPUTS]))

        def run(number: tf.Tensor, batch: Any, ready: tf.Tensor, state: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
            sums, peaks, last, kept = state
            new_sums, counts, new_peaks, new_last, halt, alarm, norms, stamps = one_step(batch, number)
            with tf.control_dependencies([new_sums, counts]):
                end = self._clock()
            # Until the last step's end it was computing: that part was not spent on waiting.
            waited = tf.maximum(ready - tf.reshape(last, [-1])[-1], 0.0)
            own = [waited]
            if stamps is not None:
                own += [t - ready for t in (end, *stamps)]
                self._stamps = 1 + len(stamps)
            parts = [new_sums, counts, own]
            if self._logged:
                # counts begins with whether the update was made: what was not finite counts as 0.
                parts.append(tf.math.multiply_no_nan(tf.math.log(tf.cast(norms, tf.float64)), counts[0]))
                self._logs = int(norms.shape[0])
            new = (
                sums + tf.concat(parts, 0),
                tf.maximum(peaks, new_peaks),
                tf.concat([new_last, [end]], 0),
                tf.where(alarm, norms, kept),
            )
            return (halt, *new)

        def body(iterator: Any, first: tf.Tensor, i: tf.Tensor, state: tuple[tf.Tensor, ...]) -> Any:
            number = first + tf.cast(i, tf.int64)
            if bounded:
                batch = tuple(next(iterator) for _ in range(parts)) if parts else next(iterator)
                with tf.control_dependencies(_leaves(batch)):
                    ready = self._clock()
                # Work that starts at once may keep the clock waiting for a thread, and look like input that is late.
                # Replicas of one worker have the same input, so there the barrier's 2 % of a small step are saved.
                if self._stamped and 0 < parts < self._strategy.num_replicas_in_sync:
                    with tf.control_dependencies([ready]):
                        batch = tf.nest.map_structure(tf.identity, batch, expand_composites=True)
                return (i + 1, *run(number, batch, ready, state))
            optional = iterator.get_next_as_optional()
            has_value = optional.has_value()
            with tf.control_dependencies([has_value]):
                ready = self._clock()
            halt, *new = tf.cond(
                has_value,
                lambda: run(number, optional.get_value(), ready, state),
                lambda: (tf.constant(False), *state),
            )
            return (i + tf.cast(has_value, tf.int32), halt | tf.logical_not(has_value), *new)

        def run_steps(iterator: Any, first: tf.Tensor, limit: tf.Tensor) -> tuple[tf.Tensor, ...]:
            self.traces += 1  # runs while tracing only
            # Scalars at the start: added to the first step's vector they take its shape.
            zero = tf.zeros([], tf.float64)
            lowest = tf.constant(-np.inf, tf.float64)
            state = (tf.constant(0), tf.constant(False), zero, lowest, self._clock(), tf.zeros([]))
            anything = tf.TensorShape(None)
            return tf.while_loop(
                lambda i, stop, *_: (i < limit) & tf.logical_not(stop),
                lambda i, stop, *state: body(iterator, first, i, state),
                state,
                shape_invariants=(tf.TensorShape([]), tf.TensorShape([]), *[anything] * 4),
                parallel_iterations=1,
            )

        return run_steps

    def _set_layout(self, stats: dict[str, Stat]) -> None:
        layout = StatLayout(stats)
        if self._layout is not None and self._layout.kinds != layout.kinds:
            raise ConfigError(
                f"the step reported {layout.kinds} but before it reported {self._layout.kinds}; "
                "report the same figures in every branch"
            )
        self._layout = layout


# How TensorFlow tells of an exception in a Python function of the input: its name, its text, its traceback.
_FROM_INPUT = re.compile(r"\b(ConfigError|LockstepError): (.+?)(?=\nTraceback |\n\n|\Z)", re.DOTALL)

# An assertion of framework.monitor.replicas that failed in a step.
_ASSERTED = re.compile(f"{re.escape(FIRST_WORDS)}.*?{re.escape(LAST_WORDS)}", re.DOTALL)


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raises the framework's own errors as they were.

    AutoGraph replaces them by others with long texts; and of one that was raised while data was read, in a function of
    the input, or by an assertion in the graph, TensorFlow keeps only the text.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            inner = cause.__cause__ or cause.__context__
            if isinstance(cause, LockstepError) and not isinstance(inner, LockstepError):
                raise cause.with_traceback(cause.__traceback__) from None
            cause = inner
        told = _FROM_INPUT.search(str(error)) if isinstance(error, tf.errors.OpError) else None
        if told is not None:
            kind = ConfigError if told[1] == "ConfigError" else LockstepError
            raise kind(told[2].strip()) from None
        asserted = _ASSERTED.search(str(error)) if isinstance(error, tf.errors.InvalidArgumentError) else None
        if asserted is not None:
            raise CheckFailed(asserted[0]) from None
        raise


def _local_replica(count: int) -> int:
    """Number of the replica being traced, among the ``count`` of its worker, whose replicas follow each other."""
    replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    return int(replica) % count


def _leaves(batch: Any) -> list[tf.Tensor]:
    return [t for t in tf.nest.flatten(batch, expand_composites=True) if isinstance(t, tf.Tensor)]
