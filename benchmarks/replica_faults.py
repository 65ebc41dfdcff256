"""Faults put into a run on purpose, and which check found them: ``python -m benchmarks.replica_faults [--clean=10]``.

A small network with batch normalisation trains on logical CPU replicas with the framework's checks at short intervals,
once for each fault and some times without any. The table says whether a fault was found, by which check, whether the
right replica was named, and how many steps after it came.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks import machine, result
from framework import AtSteps, CheckFailed, LossOutput, RunConfig, Scheduled, Trainer
from input_pipelines import from_arrays

FAULTY, BEGIN, STEPS, EVERY = 1, 60, 700, 20  # replica; step behind which the fault comes; steps; replica checks
_DEVICES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
      name: for the table.
      replicas: in the run; with more replicas than cores nobody is named as late.
      assign: called once behind step ``BEGIN``, or before the first step if ``at_start``, with the trainer.
      at_start: see ``assign``.
      gradient: changes the faulty replica's gradients, before the all-reduce.
      batch: changes what the faulty replica trains on.
      forward, backward: extra work in one of the passes of the faulty replica.
    """

    name: str
    replicas: int = 3
    assign: Callable[[Trainer], None] | None = None
    at_start: bool = False
    gradient: Callable[[Any], Any] | None = None
    batch: Callable[[Any], Any] | None = None
    forward: bool = False
    backward: bool = False


def _local(trainer: Trainer, *parts: str) -> Any:
    """The faulty replica's copy of the first variable whose name holds all parts."""
    state = trainer.state()
    name = next(name for name in state if all(part in name for part in parts))
    return trainer.strategy.experimental_local_results(state[name])[FAULTY]


def _flip(*parts: str) -> Callable[[Trainer], None]:
    """Flips one bit of one element, in the middle of its mantissa."""

    def flip(trainer: Trainer) -> None:
        variable = _local(trainer, *parts)
        value = np.array(variable.numpy())
        value.reshape(-1)[:1].view(np.uint32)[0] ^= np.uint32(1 << 12)
        variable.assign(value)

    return flip


def _off(trainer: Trainer) -> None:
    """As if an update had been another, or had not been made."""
    for name in [n for n in trainer.state() if n.startswith("model/") and n.endswith("kernel")]:
        variable = _local(trainer, name)
        variable.assign(variable.numpy() * (1.0 + 1e-6))


def _other_start(trainer: Trainer) -> None:
    variable = _local(trainer, "model/", "first/kernel")
    variable.assign(np.random.RandomState(5).randn(*variable.shape).astype(np.float32) * 0.1)


def _scaled(factor: float) -> Callable[[Any], Any]:
    return lambda gradients: [factor * g for g in gradients]


def _one_element(gradients: Any) -> Any:
    first, *rest = gradients
    wrong = tf.tensor_scatter_nd_add(first, [[0, 0]], [1e-3])
    return [wrong, *rest]


FAULTS = (
    Fault(name="one bit of a weight flipped", assign=_flip("model/", "first/kernel")),
    Fault(name="one bit of a slot flipped", assign=_flip("optimizer/", "first/kernel")),
    Fault(name="one bit of BatchNorm's state flipped", assign=_flip("model/", "moving_variance")),
    Fault(name="one replica's weights off by 1e-6 of themselves", assign=_off),
    Fault(name="other initial weights", assign=_other_start, at_start=True),
    Fault(name="gradients scaled by 100", gradient=_scaled(100.0)),
    Fault(name="gradients scaled by 1.5", gradient=_scaled(1.5)),
    Fault(name="gradients scaled by 1.01", gradient=_scaled(1.01)),
    Fault(name="a product wrong in one element of the gradient", gradient=_one_element),
    Fault(name="the same row instead of its own batch", batch=lambda x: tf.repeat(x[:1], x.shape[0], 0)),
    Fault(name="slower in its forward pass", replicas=2, forward=True),
    Fault(name="slower in its backward pass", replicas=2, backward=True),
)

_MATRIX = np.random.RandomState(0).randn(300, 300).astype(np.float32) / 20.0


def _work(x: tf.Tensor) -> tf.Tensor:
    """Some ms of products, and a number that is almost 0."""
    product = _MATRIX + x
    for _ in range(6):
        product = tf.tanh(product @ product)
    return 1e-9 * tf.reduce_sum(product)


@tf.custom_gradient
def _slow_backward(x: tf.Tensor) -> Any:
    return tf.identity(x), lambda gradient: gradient + _work(x[0])


class Faulty(Trainer):
    """The network; ``fault`` says what goes wrong on replica ``FAULTY``."""

    def __init__(self, config: RunConfig, fault: Fault | None):
        super().__init__(config)
        self._fault = fault

    def build_model(self) -> Any:
        layers = [keras.layers.Dense(32, name="first"), keras.layers.BatchNormalization(name="norm")]
        return keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(4, name="last")], name="net")

    def train_data(self) -> Any:
        draw = np.random.RandomState(0)
        return from_arrays((draw.randn(3000, 16).astype(np.float32), draw.randint(0, 4, 3000).astype(np.int32)))

    def _here(self) -> Fault | None:
        replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        return self._fault if replica == FAULTY else None

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        inputs, labels = batch
        fault = self._here()
        if fault is not None and fault.batch is not None:
            inputs = fault.batch(inputs)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(inputs, training=training))
        if fault is not None and fault.forward:
            loss += _work(loss[0])
        return LossOutput(loss=_slow_backward(loss) if fault is not None and fault.backward else loss)

    def train_step(self, batch: Any) -> Any:
        sums, fault = self.gradients(batch), self._here()
        if fault is not None and fault.gradient is not None:
            sums = dataclasses.replace(sums, gradients=fault.gradient(sums.gradients))
        sums = self.reduce(sums)
        self.apply(sums)
        return sums

    def hooks(self) -> Sequence[Scheduled]:
        assign = self._fault.assign if self._fault is not None and not self._fault.at_start else None
        return [Scheduled(AtSteps([BEGIN]), lambda step, values: assign(self))] if assign is not None else []


def run(fault: Fault | None, seed: int = 0) -> dict[str, Any]:
    """One run; what was found first, in the columns of the table."""
    replicas = fault.replicas if fault is not None else 2
    started = 0 if fault is None or fault.assign is None or fault.at_start else BEGIN
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            run_dir=folder,
            train_steps=STEPS,
            global_batch_size=24,
            seed=seed,
            device="cpu",
            num_replicas=replicas,
            optimizer="sgd",
            momentum=0.9,
            learning_rate=0.01,
            steps_per_loop=10,
            check_replicas_every=EVERY,
            straggler_every=EVERY,
            log_every=0,
            progress="off",
            tensorboard=False,
        )
        trainer, differ = Faulty(config, fault), ""
        try:
            trainer.build()
            if fault is not None and fault.at_start and fault.assign is not None:
                fault.assign(trainer)
            trainer.train()
        except CheckFailed as error:
            differ = str(error)
        told = _told(pathlib.Path(folder))
    if differ:
        told.append((trainer.step, "replicas compared", differ))
    row: dict[str, Any] = {"fault": fault.name if fault is not None else "none", "replicas": replicas}
    if not told:
        return {**row, "found": False, "by": "", "named": False, "after": None, "says": ""}
    step, by, says = min(told)
    named = f"replica {FAULTY}" in (says.split("in the minority: ")[-1] if by == "replicas compared" else says)
    return {**row, "found": True, "by": by, "named": named, "after": step - started, "says": says}


def _told(run_dir: pathlib.Path) -> list[tuple[int, str, str]]:
    """(step, check, sentence) of what the checks that stop nothing left in a run's files."""
    summary = json.loads((run_dir / "summary.json").read_text())
    gradients = summary["checks"]["gradients"]
    found = [(o["step"], "gradient norms", o["says"]) for o in gradients["outliers"]]
    file = run_dir / "stragglers.jsonl"
    looks = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    late = [(look["step"], look["culprit"]["says"]) for look in looks if look["culprit"]]
    return found + [(step, "times to the all-reduce", says) for step, says in late]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 if a clean run was told to be faulty."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.replica_faults", description="Faults, and which check finds them."
    )
    p.add_argument("--clean", type=int, default=10, help="runs without a fault")
    p.add_argument("--out", default="", help="result file to write, JSON")
    args = p.parse_args(argv)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * _DEVICES)
    print(
        "| fault in replica 1 | replicas | found by | right replica | steps after it came |\n"
        "| --- | --- | --- | --- | --- |"
    )
    rows = []
    for fault in FAULTS:
        row = run(fault)
        rows.append(row)
        found = (
            f"{row['by']} | {'yes' if row['named'] else 'no'} | {row['after']}" if row["found"] else "not found | | "
        )
        print(f"| {row['fault']} | {row['replicas']} | {found} |", flush=True)
    clean = [run(None, seed) for seed in range(args.clean)]
    alarms = [row["says"] for row in clean if row["found"]]
    print(f"\n{len(clean)} clean runs of {STEPS} steps: {len(alarms)} false alarms {alarms}", flush=True)
    if args.out:
        result.write(args.out, {**machine.circumstances(), "faults": rows, "clean": clean})
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
