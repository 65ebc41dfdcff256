"""Follows a training run from another process: evaluates each of its checkpoints and ends when the run has."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from framework.checkpoint import find
from framework.checkpoint.manifest import Damaged
from framework.errors import ConfigError, LockstepError
from framework.hooks import Hook, MetricsLog, TensorBoard
from framework.loop.evaluate import Evaluation
from framework.loop.folder import LOCK
from framework.loop.saving import Saving

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

_POLL_SECONDS = 1.0
_ENDED = ("done", "stopped_early")  # a run of another status is expected to be started again


class Follower:
    """Evaluates a run's checkpoints, in the order of their steps, as they appear.

    It writes nothing but evaluation records: to the run's ``metrics.jsonl`` and TensorBoard folder, which other
    processes may add to.

    Args:
      trainer: of the same task and settings as the run.
      evaluation: its evaluation sets.
      saving: reads its checkpoints.

    Raises:
      ConfigError: there is no run folder, no evaluation data, or more than one worker.
    """

    def __init__(self, trainer: Trainer, evaluation: Evaluation, saving: Saving):
        config = trainer.config
        if not config.run_dir:
            raise ConfigError("mode=continuous_eval without run_dir: there is nothing to follow; pass --run_dir")
        if trainer.cluster.num_workers > 1:
            raise ConfigError(
                f"mode=continuous_eval with {trainer.cluster.num_workers} workers: one process follows a run; "
                "unset TF_CONFIG, or pass --cluster=none"
            )
        evaluation.check()
        self._trainer, self._evaluation, self._saving = trainer, evaluation, saving
        self._run_dir = config.run_dir
        self._checkpoints = os.path.join(config.run_dir, find.CHECKPOINTS)
        self._done: set[int] = set()
        self._hooks: list[Hook] = []

    def run(self) -> dict[str, dict[str, float]]:
        """Follows the run to its end and returns the figures of the last checkpoint, by set.

        Raises:
          LockstepError: no new checkpoint came for ``eval_patience`` seconds while the run had not ended.
        """
        results: dict[str, dict[str, float]] = {}
        patience = self._trainer.config.eval_patience
        waited_since = time.monotonic()
        while True:
            ended = self._ended()  # before looking: what the run saved last is then seen
            for step in [s for s in find.steps_in(self._checkpoints) if s not in self._done]:
                results = self._evaluate(step) or results
                waited_since = time.monotonic()
            if ended:
                if not self._done:
                    raise ConfigError(f"run_dir={self._run_dir} holds a run that ended without a checkpoint")
                self._say(f"the run has ended; {len(self._done)} checkpoints evaluated")
                return results
            if time.monotonic() - waited_since > patience:
                raise LockstepError(
                    f"no new checkpoint in {self._checkpoints} for eval_patience={patience:g} s, and the run has not "
                    "ended: is it still going on? Start this again when it is, or raise --eval_patience"
                )
            time.sleep(_POLL_SECONDS)

    def _evaluate(self, step: int) -> dict[str, dict[str, float]]:
        """Figures of one checkpoint; empty if it is gone again or not whole."""
        self._done.add(step)
        try:
            find.check(self._checkpoints, step, content=True)
            self._saving.read(step)
        except (Damaged, LockstepError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            self._say(f"passed over the checkpoint of step {step}: {error}")
            return {}
        results = self._evaluation.run()
        if not self._hooks:
            self._hooks = [MetricsLog(os.path.join(self._run_dir, "metrics.jsonl"))]
            if self._trainer.config.tensorboard:
                self._hooks.append(TensorBoard(os.path.join(self._run_dir, "tensorboard")))
        for name, values in results.items():
            for hook in self._hooks:
                hook.evaluated(step, name, values)
            shown = "  ".join(f"{n} {v:.4g}" for n, v in values.items() if "/" not in n)
            self._say(f"step {step}  eval{'/' + name if name else ''}: {shown}")
        return results

    def _ended(self) -> bool:
        """Whether the run's summary says so and no process has the folder."""
        if os.path.exists(os.path.join(self._run_dir, LOCK)):
            return False
        try:
            with open(os.path.join(self._run_dir, "summary.json"), encoding="utf-8") as file:
                return json.load(file).get("status") in _ENDED
        except (OSError, ValueError, AttributeError):
            return False

    def _say(self, line: str) -> None:
        if self._trainer.config.progress != "off":
            print(line, flush=True)
