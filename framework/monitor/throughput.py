"""Speed in the field's terms: operations a second and their share of what the devices can do, units, step times."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from framework.monitor import flops, peaks

if TYPE_CHECKING:
    from framework.loop.loop import LoopResult
    from framework.loop.trainer import Trainer

_KEPT = 4096  # newest inner loops; about a quarter of an hour at the chosen length
PERCENTILES = (50, 90, 99)


class Throughput:
    """Counts the operations of a step once, and turns a record's figures into rates.

    Args:
      trainer: whose steps they are.
      graph: gives the traced graph of the training loop, None before it exists.
    """

    def __init__(self, trainer: Trainer, graph: Callable[[], tf.Graph | None]):
        self._trainer = trainer
        self._graph = graph
        self._counted_of: tf.Graph | None = None
        self._flops: float | None = None
        self._why_not = "no step was traced"
        self._peak: tuple[float, str] | None = None
        self._peak_known = False
        self._loops: collections.deque[tuple[int, float]] = collections.deque(maxlen=_KEPT)  # steps, seconds a step

    def add(self, result: LoopResult) -> None:
        """One inner loop that did not compile."""
        if result.steps:
            self._loops.append((result.steps, result.seconds / result.steps))

    def figures(self, record: Mapping[str, float]) -> dict[str, float]:
        """Further figures for a record with ``step_ms`` and ``examples_per_second``; empty where it has none.

        ``tflops``: operations of all devices, 10^12 a second. ``mfu``: the same as a share of their peak, 0..1.
        ``NAME_per_second`` for each of the trainer's ``units_per_example``.
        """
        found: dict[str, float] = {}
        if "step_ms" not in record:
            return found
        for name, units in self._trainer.units_per_example().items():
            found[f"{name}_per_second"] = record["examples_per_second"] * units
        total = self._step_flops()
        if total:
            found["tflops"] = total / record["step_ms"] / 1e9
            peak = self._device_peak()
            if peak is not None:
                found["mfu"] = found["tflops"] / (peak[0] * self._trainer.strategy.num_replicas_in_sync)
        return found

    def step_times(self) -> dict[str, float]:
        """Percentiles of a step's milliseconds: of the inner loops' means, each counted with its steps."""
        if not self._loops:
            return {}
        steps, seconds = (np.array(column, np.float64) for column in zip(*self._loops))
        order = np.argsort(seconds)
        reached = np.cumsum(steps[order]) / steps.sum()
        found = {f"p{p}": float(seconds[order][np.searchsorted(reached, p / 100.0 - 1e-12)]) * 1e3 for p in PERCENTILES}
        return {**found, "max": float(seconds.max()) * 1e3}

    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` says of it."""
        total = self._step_flops()
        peak = self._device_peak()
        return {
            "step_ms": {name: round(value, 4) for name, value in self.step_times().items()},
            "step_flops": total if total is not None else f"not measured: {self._why_not}",
            "peak_tflops_per_device": peak[0] if peak is not None else "not known; pass --peak_tflops",
            "peak_source": peak[1] if peak is not None else "",
        }

    def _step_flops(self) -> float | None:
        """Operations of a step on all workers; None: not known."""
        graph = self._graph()
        if graph is not None and graph is not self._counted_of:
            self._counted_of = graph
            try:
                self._flops = flops.count(graph) * self._trainer.cluster.num_workers
            except flops.Uncounted as error:
                self._flops, self._why_not = None, str(error)
        return self._flops

    def _device_peak(self) -> tuple[float, str] | None:
        """TFLOP/s of one replica's device, and where that is from."""
        config = self._trainer.config
        if not self._peak_known:
            self._peak_known = True
            gpus = tf.config.list_physical_devices("GPU") if self._trainer.choice.device == "gpu" else []
            if config.peak_tflops:
                self._peak = config.peak_tflops, "--peak_tflops"
            elif gpus:
                name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "")
                tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
                self._peak = peaks.known_peak(name, config.precision, tf32=tf32)
        return self._peak
