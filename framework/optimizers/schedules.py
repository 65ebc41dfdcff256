"""Learning rates as functions of the number of updates made.

Update i, counted from 0, uses ``schedule(i)``. With a warm-up of W updates and T updates in all:

- update i < W uses ``peak * (i + 1) / W``: the first has ``peak / W``, the last of the warm-up has the peak;
- a decay runs over updates W to T: update W has the peak, and the final rate would be reached at update T. The last one
  of the run is T - 1, so no update is spent at a final rate of 0. From T on the rate stays at its final value.

A schedule is computed in the graph, in float64, and rounded once to float32. The rate is a function of ``i`` alone: a
resumed run gets the same bits.
"""

from __future__ import annotations

import dataclasses
import math
import numbers

import tensorflow as tf

from framework.config import RunConfig
from framework.errors import ConfigError
from framework.optimizers.base import Schedule
from framework.parse import parse_boundaries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """The same rate at every update."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate("learning_rate", self.rate)

    def __call__(self, iterations: tf.Tensor) -> tf.Tensor:
        """The rate of update ``iterations`` (int64 scalar), as a float32 scalar."""
        del iterations
        return tf.constant(self.rate, tf.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine:
    """Half a cosine from the peak at update ``start`` to ``end * peak`` at update ``stop``.

    ``peak (end + (1 - end) (1 + cos(pi p)) / 2)`` with p from 0 at ``start`` to 1 at ``stop``: Loshchilov and Hutter
    2017, equation 5, one period without restart.
    """

    peak: float
    stop: int
    start: int = 0
    end: float = 0.0

    def __post_init__(self) -> None:
        _check_decay(self.peak, self.start, self.stop, self.end)

    def __call__(self, iterations: tf.Tensor) -> tf.Tensor:
        """The rate of update ``iterations`` (int64 scalar), as a float32 scalar."""
        share = 0.5 * (1.0 + tf.cos(math.pi * _progress(iterations, self.start, self.stop)))
        return tf.cast(self.peak * (self.end + (1.0 - self.end) * share), tf.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Polynomial:
    """From the peak at update ``start`` to ``end * peak`` at update ``stop``; power 1 is a straight line.

    ``peak (end + (1 - end) (1 - p)^power)`` with p from 0 at ``start`` to 1 at ``stop``.
    """

    peak: float
    stop: int
    start: int = 0
    end: float = 0.0
    power: float = 1.0

    def __post_init__(self) -> None:
        _check_decay(self.peak, self.start, self.stop, self.end)
        if not self.power >= 0.0:
            raise ConfigError(f"schedule_power={self.power} but it must be at least 0; 1 is a straight line")

    def __call__(self, iterations: tf.Tensor) -> tf.Tensor:
        """The rate of update ``iterations`` (int64 scalar), as a float32 scalar."""
        share = (1.0 - _progress(iterations, self.start, self.stop)) ** self.power
        return tf.cast(self.peak * (self.end + (1.0 - self.end) * share), tf.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The peak, multiplied by ``factor`` at each boundary; update ``boundary`` is the first with the new rate."""

    peak: float
    boundaries: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_rate("learning_rate", self.peak)
        _check_rate("schedule_factor", self.factor)
        if not self.boundaries or list(self.boundaries) != sorted(set(self.boundaries)) or self.boundaries[0] <= 0:
            raise ConfigError(f"boundaries={self.boundaries} but they must be rising and above 0; for example (30, 60)")

    def __call__(self, iterations: tf.Tensor) -> tf.Tensor:
        """The rate of update ``iterations`` (int64 scalar), as a float32 scalar."""
        passed = tf.reduce_sum(tf.cast(iterations >= tf.constant(self.boundaries, tf.int64), tf.int64))
        rates = [self.peak * self.factor**count for count in range(len(self.boundaries) + 1)]
        return tf.gather(tf.constant(rates, tf.float32), passed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUp:
    """A straight line up to ``peak`` over the first ``steps`` updates, then ``after``, which counts from update 0."""

    peak: float
    steps: int
    after: Schedule

    def __post_init__(self) -> None:
        _check_rate("learning_rate", self.peak)
        if self.steps < 1:
            raise ConfigError(f"warmup_steps={self.steps} but a warm-up has at least 1 update; leave the warm-up out")

    def __call__(self, iterations: tf.Tensor) -> tf.Tensor:
        """The rate of update ``iterations`` (int64 scalar), as a float32 scalar."""
        iterations = tf.cast(iterations, tf.int64)
        rising = self.peak * (tf.cast(iterations + 1, tf.float64) / self.steps)
        return tf.where(iterations < self.steps, tf.cast(rising, tf.float32), self.after(iterations))


def as_schedule(rate: float | Schedule) -> Schedule:
    """A schedule from a number or a callable (also a Keras ``LearningRateSchedule``); else ConfigError."""
    if isinstance(rate, numbers.Real) and not isinstance(rate, bool):
        return Constant(rate=float(rate))
    if callable(rate):
        return rate
    raise ConfigError(f"learning_rate={rate!r} but it must be a number or a schedule; for example learning_rate=0.1")


def from_config(config: RunConfig, total_updates: int | None) -> Schedule:
    """The configured schedule.

    Args:
      config: its ``learning_rate``, ``schedule``, ``schedule_*`` and ``warmup_steps``.
      total_updates: updates in the whole run, counted from 0, also after a resume; None when not known.

    Raises:
      ConfigError: a decay to the end of a run of unknown length, a warm-up as long as the run, or a drop within it.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if total_updates is None and config.schedule in ("cosine", "polynomial"):
        raise ConfigError(
            f"schedule={config.schedule} but the number of updates is not known (train_steps={config.train_steps}): it "
            "decays to the end of the run; pass --train_steps=N, or --schedule=constant or step"
        )
    if total_updates is not None and warmup >= total_updates:
        raise ConfigError(
            f"warmup_steps={warmup} with {total_updates} updates in all: the warm-up must end before the run does; "
            f"pass a --warmup_steps below {total_updates}, or train for longer"
        )
    boundaries = tuple(parse_boundaries(config.schedule_boundaries))
    if boundaries and boundaries[0] < warmup:
        raise ConfigError(
            f"schedule_boundaries={config.schedule_boundaries} with warmup_steps={warmup}: the rate must not drop "
            f"within the warm-up; pass boundaries of at least {warmup}"
        )
    after: Schedule
    if config.schedule == "constant":
        after = Constant(rate=peak)
    elif config.schedule == "step":
        after = Step(peak=peak, boundaries=boundaries, factor=config.schedule_factor)
    elif config.schedule == "cosine":
        after = Cosine(peak=peak, start=warmup, stop=int(total_updates or 0), end=config.schedule_end)
    else:
        after = Polynomial(
            peak=peak,
            start=warmup,
            stop=int(total_updates or 0),
            end=config.schedule_end,
            power=config.schedule_power,
        )
    return WarmUp(peak=peak, steps=warmup, after=after) if warmup else after


def _progress(iterations: tf.Tensor, start: int, stop: int) -> tf.Tensor:
    """0 up to update ``start``, 1 from update ``stop`` on, a straight line between; float64 scalar."""
    done = tf.cast(tf.cast(iterations, tf.int64) - start, tf.float64) / float(stop - start)
    return tf.clip_by_value(done, 0.0, 1.0)


def _check_rate(name: str, value: float) -> None:
    if not (value >= 0.0 and math.isfinite(value)):
        raise ConfigError(f"{name}={value} but it must be finite and at least 0; for example {name}=0.1")


def _check_decay(peak: float, start: int, stop: int, end: float) -> None:
    _check_rate("learning_rate", peak)
    if not 0 <= start < stop:
        raise ConfigError(f"start={start} with stop={stop}: a decay starts at 0 or later and stops after its start")
    if not 0.0 <= end <= 1.0:
        raise ConfigError(
            f"schedule_end={end} but it is a share of the peak, from 0 to 1; for example schedule_end=0.1"
        )
