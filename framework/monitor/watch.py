"""All that looks on while a run trains, behind one face: the loop calls it, and it never slows a step."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from framework.hooks.triggers import Trigger
from framework.monitor.device_watch import DeviceWatch
from framework.monitor.gradient_outliers import GradientOutliers
from framework.monitor.ledger import Ledger
from framework.monitor.profiler import Profiler
from framework.monitor.stragglers import Stragglers
from framework.monitor.throughput import Throughput

if TYPE_CHECKING:
    from framework.loop.loop import LoopResult
    from framework.loop.reports import Reports
    from framework.loop.trainer import Trainer

STRAGGLERS = "stragglers.jsonl"


class Watch:
    """The watchers of one run.

    Args:
      trainer: whose run it is.
      reports: where lines and curves go.
      ledger: where the time of what all workers do together is booked, as ``checks``.
      graph: gives the traced graph of the training loop.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        ledger: Ledger,
        reports: Reports,
        graph: Callable[[], tf.Graph | None],
    ):
        self._trainer = trainer
        self._ledger = ledger
        self._reports = reports
        self.stragglers = Stragglers(trainer, say=reports.say, tell=self._tell_stragglers)
        self.devices = DeviceWatch(trainer, reports)
        self.gradients = GradientOutliers(trainer, say=reports.say)
        self.throughput = Throughput(trainer, graph)
        self.profiler = Profiler(trainer, say=reports.say)

    @property
    def triggers(self) -> list[Trigger]:
        """The loop is cut where these fire."""
        return [self.stragglers.trigger, self.profiler]

    def describe(self) -> list[str]:
        """Lines for the start of a run."""
        return [self.stragglers.describe(), self.profiler.describe()]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the steps."""
        with self.stragglers.common_gc(), self.devices.running(), self.profiler.running():
            yield

    def add(self, result: LoopResult, *, compiled: bool) -> None:
        """One inner loop has ended; ``compiled``: before it began."""
        self.gradients.add(result)
        if compiled and not self.profiler.active:
            self.stragglers.add(result)
            self.devices.add(result)
            self.throughput.add(result)

    def at(self, step: int, seconds: float) -> None:
        """Between two inner loops, after ``step`` steps, at monotonic time ``seconds``."""
        self.devices.drain()
        self.profiler.at(step)
        if self.stragglers.trigger.fires(step, seconds):
            with self._ledger.timed("checks"):
                self.stragglers.look()
                self.devices.look(together=True)
                self.stragglers.collect()

    def finish(self) -> None:
        """After the last step of a run that was not interrupted."""
        with self._ledger.timed("checks"):
            self.stragglers.look()
            self.devices.look(together=self.stragglers.on)

    def with_rates(self, figures: dict[str, float]) -> dict[str, float]:
        """A record's figures, with the rates that follow from them."""
        return {**figures, **self.throughput.figures(figures)}

    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` says in ``checks``."""
        return {
            "gradients": self.gradients.summary(),
            "stragglers": self.stragglers.summary(),
            "devices": self.devices.summary(),
        }

    def _tell_stragglers(self, record: dict[str, Any], curves: Mapping[str, float]) -> None:
        self._append(STRAGGLERS, record)
        self._reports.curves("replicas", record["step"], {**curves, **self.gradients.curves()})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        """Appends a record to a file of the run folder, on the chief."""
        config = self._trainer.config
        if self._reports.writes and config.run_dir:
            self._reports.check_folder()
            with open(os.path.join(config.run_dir, name), "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
