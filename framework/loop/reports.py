"""What a run tells: lines for people, records for its hooks, the files of its folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from framework.errors import LockstepError
from framework.hooks import EarlyStop, Hook, MetricsLog, Progress, TensorBoard
from framework.loop import files
from framework.loop.folder import RunFolder
from framework.parse import parse_condition

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

# Figures of a record that say how the training went and not what it reached.
_NO_RESULTS = frozenset(
    ["learning_rate", "grad_norm", "nonfinite", "examples_per_second", "step_ms", "input_wait", "tflops", "mfu"]
)


class Reports:
    """The framework's own hooks of one run, and its last figures.

    Args:
      trainer: whose run it is.
      folder: the run's folder; None: nothing is written.
    """

    def __init__(self, trainer: Trainer, folder: RunFolder | None):
        self._trainer = trainer
        self._folder = folder
        self._log: list[Hook] = []
        self._logging = False  # the hooks that write files are among them
        self._tensorboard: TensorBoard | None = None
        self._early_stop: EarlyStop | None = None
        self.writes = folder is not None and trainer.cluster.is_chief
        self.results: dict[str, float] = {}  # the last figures by name; of evaluations with eval/ before them

    def say(self, line: str) -> None:
        """One line for people, from the chief only."""
        if line and self._trainer.config.progress != "off" and self._trainer.cluster.is_chief:
            print(line, flush=True)

    def start(self, writes: bool) -> None:
        """Makes the hooks of the framework, and once those that write to the run's folder."""
        t, config = self._trainer, self._trainer.config
        if not self._log:
            condition = parse_condition(config.stop_when)
            self._early_stop = EarlyStop(*condition) if condition else None
            self._log = [Progress(config.progress if t.cluster.is_chief else "off")]
        if not writes or self._logging:
            return
        self._logging = True
        assert config.run_dir is not None
        self._log.append(MetricsLog(os.path.join(config.run_dir, "metrics.jsonl")))
        if config.tensorboard:
            self._tensorboard = TensorBoard(os.path.join(config.run_dir, "tensorboard"))
            self._log.append(self._tensorboard)

    def hooks(self, *, writes: bool = True) -> list[Hook]:
        """The framework's hooks; without ``writes`` only those that write no file of the run."""
        early = [self._early_stop] if self._early_stop is not None else []
        return [*(self._log if writes else self._log[:1]), *early]

    def ready_to_trace(self) -> None:
        """Makes what a step's ``tf.summary`` calls write to: not while the step is traced."""
        if self._tensorboard is not None:
            self._tensorboard.train_writer  # noqa: B018 - made at its first use

    def undone(self) -> None:
        """Drops the records of the steps that a rollback undid."""
        for hook in self._log:
            hook.begin(self._trainer)

    @property
    def stop_reason(self) -> str:
        """Why an early stop is due; empty: it is not."""
        return (self._early_stop.reason or "") if self._early_stop is not None else ""

    def record(self, figures: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Tells the hooks the figures since the last record; TensorBoard the run's seconds by phase too."""
        rates = {f"{name}_per_second" for name in self._trainer.units_per_example()}
        self.results.update({n: v for n, v in figures.items() if n not in _NO_RESULTS | rates})
        for hook in self._log:
            time = {f"time/{name}": value for name, value in seconds.items()} if hook is self._tensorboard else {}
            hook(self._trainer.step, {**figures, **time})

    def check_folder(self) -> None:
        """Raises LockstepError if the run's folder is not at its place any more: nothing may be written then."""
        if self._folder is not None:
            self._folder.check_there()

    def curves(self, folder: str, step: int, values: Mapping[str, float]) -> None:
        """Writes further curves for TensorBoard, to a folder of their own beside ``train``."""
        if self._tensorboard is not None:
            self._tensorboard.curves(folder, step, values)

    def graph(self, graph: tf.Graph | None) -> None:
        """Writes the step's graph for TensorBoard, at a run's beginning."""
        if self._tensorboard is not None and graph is not None and self._trainer.step <= 1:
            self._tensorboard.write_graph(graph)

    def write_settings(self, run_id: str) -> None:
        """Writes ``config.json`` and the files that the caller added."""
        t = self._trainer
        assert t.config.run_dir is not None
        files.write_config(t, run_id)
        for name, text in t.run_files.items():
            files.write_text(os.path.join(t.config.run_dir, name), text)

    def write_summary(
        self,
        status: str,
        reason: str,
        *,
        seconds: Mapping[str, float],
        counts: Mapping[str, Any],
        checks: Mapping[str, Any],
    ) -> None:
        """Writes ``summary.json``, see ``files.write_summary``; raises LockstepError unless the run failed before."""
        if not self.writes or self._folder is None:
            return
        try:
            self._folder.check_there()
            files.write_summary(self._trainer, status, reason, self.results, seconds, counts, checks)
        except (OSError, LockstepError) as error:
            if status != "failed":  # else the first error is the one to report
                raise LockstepError(f"summary.json of run_dir={self._folder.path} was not written: {error}") from error
            return
        self._write_page(self._folder.path)

    def _write_page(self, run_dir: str) -> None:
        """Writes ``report.html``. It can be made again at any time, so whatever goes wrong is only told."""
        from framework import report

        try:
            report.write([run_dir], os.path.join(run_dir, "report.html"))
        except Exception as error:
            print(f"warning: report.html was not written: {type(error).__name__}: {error}", flush=True)

    @contextlib.contextmanager
    def summaries(self, step: tf.Tensor) -> Iterator[None]:
        """Lets ``tf.summary`` calls in a step write to TensorBoard: once, at the true step, when a record is due."""
        every = self._trainer.config.log_every
        if self._tensorboard is None or not every:
            with tf.summary.record_if(False):
                yield
            return
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        due = tf.equal(step % every, 0) & tf.equal(replica, 0)
        writer = self._tensorboard.train_writer
        # The empty name scope is the root: a tag is what the user wrote, without the scopes of the compiled loop.
        with writer.as_default(step=step), tf.summary.record_if(due), tf.name_scope(""):
            yield
