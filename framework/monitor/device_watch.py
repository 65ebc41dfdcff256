"""The devices of a run: records in its folder, curves, and what all workers' readings together say."""

from __future__ import annotations

import contextlib
import json
import os
import queue
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.cluster.agree import gather_arrays
from framework.cluster.nvml import Nvml
from framework.monitor import advice
from framework.monitor.devices import DeviceMonitor, Record, curves

if TYPE_CHECKING:
    from framework.loop.loop import LoopResult
    from framework.loop.reports import Reports
    from framework.loop.trainer import Trainer

FOLDER = "device_metrics"
_KEPT = 360  # newest records that a look goes by: an hour at the default interval


def path(run_dir: str, worker: int) -> str:
    """The records of one worker's machine, one JSON object a line."""
    return os.path.join(run_dir, FOLDER, f"worker-{worker:04d}.jsonl")


class DeviceWatch:
    """Runs the thread and takes up what it hands over.

    Args:
      trainer: whose machine it is; ``device_metrics_every`` of its config says how often.
      reports: where lines and curves go.
      nvml: passed in by tests.
    """

    def __init__(self, trainer: Trainer, reports: Reports, nvml: Nvml | None = None):
        self._trainer = trainer
        self._reports = reports
        every = trainer.config.device_metrics_every
        self._on = bool(every and trainer.config.run_dir)
        self._new: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._records: list[Record] = []
        self._monitor = DeviceMonitor(every=every or 1.0, sink=self._take, nvml=nvml, extra=self._peak)
        self._said: list[str] = []
        self._count = 0
        self._waited = self._seconds = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the steps."""
        if not self._on:
            yield
            return
        with self._monitor.running():
            yield
        self.drain()

    def add(self, result: LoopResult) -> None:
        """One inner loop that did not compile."""
        if not np.isnan(result.waited):
            self._waited += result.waited
            self._seconds += result.seconds

    def drain(self) -> None:
        """Takes up what the thread handed over: curves, and warnings that cannot wait."""
        while not self._new.empty():
            record = self._new.get()
            self._count += 1
            self._records = [*self._records[-_KEPT + 1 :], record]
            self._reports.curves("devices", self._trainer.step, curves(record))
            for gpu, xid in record.get("xids", []):
                worker = f" of worker {self._trainer.cluster.index}" if self._trainer.cluster.num_workers > 1 else ""
                print(f"warning: GPU {gpu}{worker} reported XID {xid}; see NVIDIA's list of XID errors", flush=True)

    def look(self, *, together: bool) -> None:
        """Says what stands out; ``together``: over all workers, which then all have to call it at the same step."""
        if not self._on:
            return
        self.drain()
        t = self._trainer
        wait = self._waited / self._seconds if self._seconds else float("nan")
        local = []
        for i in range(t.local_replicas):
            looks = [gpu for record in self._records for gpu in record["gpus"] if gpu["gpu"] == i]
            local.append(advice.row(t.first_replica + i, t.cluster.index, i, looks, wait).numbers)
        rows = np.stack(local)
        if together:
            rows = gather_arrays(t.strategy, t.cluster, [one.view(np.int64) for one in local]).view(np.float64)
        found = advice.sentences([advice.Row(**dict(zip(advice.FIELDS, row, strict=True))) for row in rows])
        for line in found:
            # Figures change from look to look; what is said once is said.
            if line.split(" is at ")[0].split(":")[0] not in [s.split(" is at ")[0].split(":")[0] for s in self._said]:
                self._reports.say(f"devices: {line}")
        self._said = found
        self._records, self._waited, self._seconds = [], 0.0, 0.0

    def summary(self) -> Any:
        """What ``summary.json`` says of it."""
        if not self._on:
            return "off"
        found: dict[str, Any] = {"every_seconds": self._trainer.config.device_metrics_every, "records": self._count}
        if self._monitor.no_gpus:
            found["gpus"] = f"not measured: {self._monitor.no_gpus}"
        if self._monitor.problem:
            found["ended"] = self._monitor.problem
        return {**found, "says": self._said}

    def _take(self, record: Record) -> None:
        """In the thread: writes the record, on every worker for its own machine."""
        t = self._trainer
        assert t.config.run_dir is not None
        target = path(t.config.run_dir, t.cluster.index)
        # The folder may be gone, or another's by now: it is not made again.
        self._reports.check_folder()
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(target))
        with open(target, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": t.step, **record}) + "\n")
        self._new.put(record)

    def _peak(self, gpu: int) -> dict[str, Any]:
        """What TensorFlow itself had in use at most (never run on a GPU)."""
        import tensorflow as tf

        try:
            return {"peak_memory_bytes": int(tf.config.experimental.get_memory_info(f"GPU:{gpu}")["peak"])}
        except (ValueError, tf.errors.OpError):
            return {}
