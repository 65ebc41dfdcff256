"""Checkpoints of a run: what is in one, when the best is saved, and the restore at the start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.checkpoint.store import CheckpointStore, assign
from framework.config import parse_best
from framework.errors import ConfigError, LockstepError
from framework.loop.feed import Position

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer


class Saving:
    """Saves and restores a trainer's whole state: model, optimizers, step and position in the data."""

    def __init__(self, trainer: Trainer):
        config = trainer.config
        self._trainer = trainer
        self._best = parse_best(config.keep_best)
        self._saved_at = -1
        self._restored = False
        self._store: CheckpointStore | None = None
        if config.run_dir:
            self._store = CheckpointStore(
                folder=os.path.join(config.run_dir, "checkpoints"),
                keep=config.keep_checkpoints,
                best=self._best,
                background=config.checkpoint_in_background,
            )

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self._store.latest() if self._store is not None else None

    def restore(self) -> str:
        """Once: reads the newest checkpoint, as ``resume`` says; returns a line about it, empty if there was none.

        Raises:
          ConfigError: ``resume`` forbids what was found, or the checkpoint does not fit.
        """
        if self._restored:
            return ""
        t, config, latest = self._trainer, self._trainer.config, self.latest
        if config.resume == "must" and latest is None:
            raise ConfigError(f"resume=must but run_dir={config.run_dir} has no checkpoint; pass --resume=auto")
        if config.resume == "never" and latest is not None:
            raise ConfigError(
                f"resume=never but run_dir={config.run_dir} has a checkpoint of step {latest}; "
                "pass another --run_dir, or --resume=auto to go on from it"
            )
        self._restored = True
        if latest is None or self._store is None:
            return ""
        self._load(self._store, latest)
        return f"going on from the checkpoint of step {latest}, example {t.position.examples}"

    def go_back(self) -> int:
        """Reads the newest checkpoint again, after training has begun; returns its step.

        Raises:
          LockstepError: there is none.
        """
        self.wait()
        t, latest = self._trainer, self.latest
        if latest is None or self._store is None:
            raise LockstepError("there is no checkpoint to go back to")
        self._load(self._store, latest)
        return t.step

    def _load(self, store: CheckpointStore, step: int) -> None:
        t, values = self._trainer, store.load(step)
        counts = {n: int(values.pop(f"run/{n}", 0)) for n in ("step", "examples", "epoch", "batches")}
        # The position first: building the model may open the data.
        t.position = Position(counts["examples"], counts["epoch"], counts["batches"])
        t.advance(counts["step"] - t.step)
        assign(t.state(), values, store.path(step))
        self._saved_at = step

    def save(self, figures: Mapping[str, float]) -> None:
        """Saves the present step, if that has not been done; ``figures`` of the evaluation of this step, if any."""
        t = self._trainer
        if self._saved_at == t.step:
            return
        self._saved_at = t.step
        if self._store is None or not t.cluster.is_chief:
            return
        tensors: dict[str, Any] = {n: v.read_value() for n, v in t.state().items()}
        p = t.position
        counts = {"step": t.step, "examples": p.examples, "epoch": p.epoch, "batches": p.batches}
        tensors.update({f"run/{n}": np.int64(v) for n, v in counts.items()})
        self._store.save(t.step, tensors, figures)

    def save_if_best(self, figures: Mapping[str, float]) -> None:
        """Saves the present step if its evaluation is the best so far."""
        if self._store is not None and self._best and self._trainer.step and self._store.would_be_best(figures):
            self.save(figures)

    def check_best(self, known: list[str]) -> None:
        """Refuses, before training, a best metric that no evaluation gives; ``known`` are the scalars there are."""
        if self._best and self._best[0] not in known:
            asked = f"keep_best={self._trainer.config.keep_best}"
            if not known:
                raise ConfigError(f"{asked} without evaluation; leave it out, or write eval_data")
            raise ConfigError(f"{asked} but the evaluation gives the scalars {', '.join(known)}; name one of these")

    def check(self) -> None:
        """Raises the error of a background save that failed."""
        if self._store is not None:
            self._store.check()

    def wait(self) -> None:
        """Waits for a background save, and raises its error."""
        if self._store is not None:
            self._store.wait()
