"""The training data of a run: its length, the position in it, and feeds that go on from there."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import tensorflow as tf

from framework.errors import ConfigError
from framework.loop.feed import BatchPlan, Data, Feed, Pipeline, Position, data_kind, data_size, is_endless, open_feed
from framework.loop.loop import LoopResult

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer


class Source:
    """What ``train_data`` gave, and how much of it has been used."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._data: Data | None = None
        self._stop: int | None = None  # position at which the open feed ends
        self.position = Position()

    def ask_again(self) -> None:
        """Makes the next use call ``train_data`` again."""
        self._data = None

    @property
    def data(self) -> Data:
        """The training data.

        Raises:
          ConfigError: there is none.
        """
        if self._data is None:
            # A user's shuffle without a seed then is the same on all workers; else each would share out another order.
            tf.random.set_seed(self._trainer.config.seed)
            self._data = self._trainer.train_data()
            if self._data is None:
                raise ConfigError(
                    f"{type(self._trainer).__name__} has no training data; write train_data, or pass --mode=eval"
                )
        return self._data

    def describe(self) -> str:
        """One line about where the data comes from and who reads what."""
        return self._trainer.input_options.describe(data_kind(self.data))

    def fingerprint(self) -> dict[str, str]:
        """What tells this worker's data from other data: its form, its length, the bytes of its first and last example.

        Examples are read of a pipeline only; of a dataset they could be those of this worker alone.
        """
        data, kind = self.data, data_kind(self.data)
        found = {"data": kind}
        if kind == "dataset":
            spec = str(data.element_spec)
            spec = spec if len(spec) <= 200 else hashlib.sha256(spec.encode()).hexdigest()[:12]
            found |= {"data's elements": spec, "data's batches": str(data_size(data))}
        elif kind == "pipeline":
            found["data's examples"] = str(data.size)
            for name, index in {"first": 0, "last": (data.size or 1) - 1}.items():
                plan = BatchPlan(global_batch_size=1, start=index, stop=index + 1, training=False)
                digest = hashlib.sha256()
                for row in data.batches(plan).take(1):
                    for part in tf.nest.flatten(row, expand_composites=True):
                        digest.update(repr((part.dtype, part.shape)).encode())
                        value = part.numpy()
                        digest.update(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
                found[f"data's {name} example"] = digest.hexdigest()[:12]
        return found

    @property
    def epochs(self) -> int | None:
        """Passes asked for: ``train_epochs``, or 1 for ``train_steps=-1``; None: as many as the steps need."""
        config = self._trainer.config
        return config.train_epochs or (1 if config.train_steps == -1 else None)

    @property
    def total_examples(self) -> int | None:
        """Examples in all passes asked for, of a pipeline; None where nothing limits them."""
        if self.epochs is None or not isinstance(self.data, Pipeline):
            return None
        if self.data.size is None:
            raise ConfigError(f"train_epochs={self.epochs} but the training data is endless; pass --train_steps")
        return self.epochs * self.data.size

    @property
    def _exists(self) -> bool:
        from framework.loop.trainer import Trainer

        return self._data is not None or type(self._trainer).train_data is not Trainer.train_data

    @property
    def total_steps(self) -> int | None:
        """The step the run ends at, as far as config and data tell; None: at the end of data of unknown length."""
        config, limits = self._trainer.config, []
        if config.train_steps and config.train_steps > 0:
            limits.append(config.train_steps)
        if not self._exists:
            return min(limits, default=None)
        if self.total_examples is not None:
            # From the position on: an earlier part of the run may have had another batch size.
            rest = max(0, self.total_examples - self.position.examples)
            limits.append(self._trainer.step - -rest // config.global_batch_size)
        if self.epochs is not None and isinstance(self.data, tf.data.Dataset):
            batches = data_size(self.data)
            if batches is not None:
                limits.append(self.epochs * batches)
            elif is_endless(self.data):
                raise ConfigError(f"train_epochs={self.epochs} but the training data is endless; pass --train_steps")
        return min(limits) if limits else None

    @property
    def passes_done(self) -> bool:
        """Whether a dataset has been read as often as asked for."""
        done = self.epochs is not None and not isinstance(self.data, Pipeline)
        return done and self.position.epoch >= (self.epochs or 0)

    def open(self, goal: int | None) -> Feed:
        """A feed from the position on, for a run that ends at step ``goal`` (None: at the end of the data)."""
        t = self._trainer
        size = data_size(self.data) if isinstance(self.data, tf.data.Dataset) else None
        if size and self.position.batches >= size:  # the pass was used up exactly
            self.position.epoch, self.position.batches = self.position.epoch + 1, 0
        batch, total = t.config.global_batch_size, self.total_examples
        # A short last batch costs static shapes, so the end of the data is in the plan only if it is reached.
        short = (
            self._limited(goal)
            and total is not None
            and goal is not None
            and self.position.examples + (goal - t.step) * batch > total
        )
        self._stop = total if short else None
        plan = BatchPlan(
            global_batch_size=batch,
            num_replicas=t.strategy.num_replicas_in_sync,
            first_replica=t.first_replica,
            local_replicas=t.local_replicas,
            accumulate_steps=t.config.accumulate_steps,
            start=self.position.examples,
            stop=self._stop,
            seed=t.config.seed,
        )
        return open_feed(self.data, t.strategy, plan, self.position, t.input_options)

    def _limited(self, goal: int | None) -> bool:
        """Whether a run to ``goal`` is one to the configured total, which the number of passes limits."""
        return goal is not None and goal == self.total_steps

    @property
    def batches_left(self) -> int | None:
        """Batches up to the end of the data, of a pipeline whose end is in reach; None: no end in sight."""
        if self._stop is None:
            return None
        return max(0, -(-(self._stop - self.position.examples) // self._trainer.config.global_batch_size))

    def account(self, result: LoopResult) -> None:
        """Moves the position by what an inner loop consumed."""
        if isinstance(self.data, Pipeline):
            self.position.examples += result.steps * self._trainer.config.global_batch_size
            if self._stop is not None:  # the last batch may have been short
                self.position.examples = min(self.position.examples, self._stop)
        else:
            self.position.examples += round(result.examples)
            self.position.batches += result.steps

    def next_pass(self, goal: int | None, step: int, *, to_total: bool) -> tuple[Feed | None, str]:
        """The data ended: the feed of its next pass; or None, and why if that is news.

        Raises:
          ConfigError: the pass gave no batch.
        """
        if not self.position.batches:
            raise ConfigError("the training data gave no batch; give it data, or do not drop its remainder")
        self.position.epoch, self.position.batches = self.position.epoch + 1, 0
        if to_total and self.epochs is not None and self.position.epoch < self.epochs:
            return self.open(None), ""
        if goal is None or step == goal or (to_total and self.epochs is not None):
            return None, ""
        return None, f"the training data ended after step {step} of {goal}; repeat it, or pass --train_epochs"
