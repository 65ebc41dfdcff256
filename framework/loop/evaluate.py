"""Evaluation: every example exactly once, whatever the batch size and the number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from framework.errors import ConfigError
from framework.loop.feed import BatchPlan, Feed, Pipeline, Position, is_endless, open_feed
from framework.loop.loop import CompiledLoop
from framework.loop.window import Window

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

# Batches per call of the compiled loop: between two calls Python can react to signals.
_BATCHES_PER_CALL = 64


class Evaluation:
    """The evaluation sets of a trainer, each with its feed and its compiled loop."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._sets: dict[str, tuple[Feed, CompiledLoop]] | None = None

    @property
    def exists(self) -> bool:
        """Whether the trainer has evaluation data."""
        return bool(self._open())

    def forget_traces(self) -> None:
        """Makes the next evaluation trace again."""
        self._sets = None

    def run(self, beat: Callable[[], None] = lambda: None) -> dict[str, dict[str, float]]:
        """Figures of each set by name; the only set has the empty name.

        Args:
          beat: called where something was done.

        Raises:
          ConfigError: a set has no example, or no end.
        """
        self.check()
        with self._trainer.averaged_weights():
            return {name: self._run_one(name, feed, loop, beat) for name, (feed, loop) in self._open().items()}

    def check(self) -> None:
        """Raises ConfigError if there is no evaluation data."""
        if not self._open():
            raise ConfigError(
                f"{type(self._trainer).__name__} has no evaluation data; write eval_data, or pass --mode=train"
            )

    def figure_names(self) -> list[str]:
        """Names of the scalar figures an evaluation gives, from tracing one step on the data's spec."""
        names: list[str] = []
        for name, (feed, loop) in self._open().items():
            names += [f"{name}/{n}" if name else n for n in loop.trace(feed).kinds]
        return names

    def first_feed(self) -> Feed | None:
        """Any set's feed, for its element spec."""
        return next((feed for feed, _ in self._open().values()), None)

    def _run_one(self, name: str, feed: Feed, loop: CompiledLoop, beat: Callable[[], None]) -> dict[str, float]:
        feed.restart()
        window, done = Window(), 0
        while feed.limit is None or done < feed.limit:
            steps = _BATCHES_PER_CALL if feed.limit is None else min(_BATCHES_PER_CALL, feed.limit - done)
            result = loop(feed, done + 1, steps)
            window.add(result)
            beat()
            done += result.steps
            if result.ended:
                break
        if not done:
            raise ConfigError(
                f"the evaluation set {name or 'eval_data'} gave no batch; give it data, or do not drop its remainder"
            )
        return window.totals(loop.layout)

    def _open(self) -> dict[str, tuple[Feed, CompiledLoop]]:
        if self._sets is None:
            tf.random.set_seed(self._trainer.config.seed)  # as for training data
            data = self._trainer.eval_data()
            named = {} if data is None else data if isinstance(data, Mapping) else {"": data}
            self._sets = {name: self._open_one(name, one) for name, one in named.items()}
        return self._sets

    def _open_one(self, name: str, data: Any) -> tuple[Feed, CompiledLoop]:
        trainer = self._trainer
        config, replicas = trainer.config, trainer.strategy.num_replicas_in_sync
        endless = isinstance(data, Pipeline) and data.size is None
        if isinstance(data, tf.data.Dataset):
            endless = is_endless(data)
        if endless:
            raise ConfigError(f"the evaluation set {name or 'eval_data'} has no end; take(n) of it")
        plan = BatchPlan(
            global_batch_size=config.eval_batch_size or config.global_batch_size,
            num_replicas=replicas,
            first_replica=trainer.first_replica,
            local_replicas=trainer.local_replicas,
            stop=data.size if isinstance(data, Pipeline) else None,
            seed=config.seed,
            training=False,
        )
        loop = CompiledLoop(
            strategy=trainer.strategy, replica_step=trainer.stepper.evaluate, stop_on_alarm=False, timed=False
        )
        return open_feed(data, trainer.strategy, plan, Position(), trainer.input_options), loop


def flat(results: dict[str, dict[str, float]], prefix: str) -> dict[str, float]:
    """Figures of several sets in one dict: ``prefix + set/name``."""
    return {
        prefix + (f"{name}/" if name else "") + key: value
        for name, one in results.items()
        for key, value in one.items()
    }
