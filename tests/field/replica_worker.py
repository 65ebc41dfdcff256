"""One worker of a test: an assertion in a bare ``strategy.run``, then a run in which one worker assigns a variable.

``python tests/field/replica_worker.py FOLDER``, with TF_CONFIG set. What was seen goes to FOLDER/worker-I.json;
the exit code is that of the run.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import tensorflow as tf

import framework
from framework import CheckFailed, EveryNSteps, RunConfig, Scheduled
from tests.helpers import Toy


class Coefficient(Toy):
    """Worker 0 sets ``coefficient`` to 1 after step 2, for itself alone."""

    def build_model(self) -> Any:
        model = super().build_model()
        model.coefficient = tf.Variable(0.0, trainable=False)
        model.weights = tf.Variable(tf.random.normal([8]))  # no seed is given
        return model

    def hooks(self) -> Any:
        def keep(step: int, values: Any) -> None:
            if step == 2 and self.cluster.is_chief:
                for copy in self.strategy.experimental_local_results(self.model.coefficient):
                    copy.assign(1.0)

        return [Scheduled(EveryNSteps(1), keep)]

    def copies(self, name: str) -> list[Any]:
        """A variable on each of this worker's replicas."""
        return [v.numpy().tolist() for v in self.strategy.experimental_local_results(self.state()[name])]


seen: dict[str, Any] = {}


def assertion(strategy: Any, function: Any, *, alike: bool) -> str:
    """Runs an assertion about 3000 numbers of which one, in the last replica, may differ; returns its text."""

    @tf.function
    def run() -> None:
        def step() -> None:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            last = tf.equal(replica, strategy.num_replicas_in_sync - 1) & (not alike)
            change = tf.one_hot(2500, 3000) * tf.cast(last, tf.float32)
            function(tf.range(3000.0) + change, name="numbers")

        strategy.run(step)

    try:
        run()
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    return ""


def main(folder: pathlib.Path) -> int:
    config = RunConfig(
        run_dir=str(folder / "run"),
        train_steps=9,
        global_batch_size=4,
        device="cpu",
        num_replicas=2,
        check_replicas_every=3,
        progress="lines",
        tensorboard=False,
    )
    trainer = Coefficient(config)

    def close(value: Any, name: str) -> None:
        framework.assert_replicas_close(value, rtol=0.0, atol=0.5, name=name)

    for name, function in {"equal": framework.assert_replicas_equal, "close": close}.items():
        seen[f"{name}, alike"] = assertion(trainer.strategy, function, alike=True)
        seen[name] = assertion(trainer.strategy, function, alike=False)
    status = 0
    try:
        trainer.build()
        seen["weights at 0"] = trainer.copies("model/weights")
        trainer.train()
    except CheckFailed as error:
        seen["error"], status = str(error), error.exit_code
    seen[f"weights at {trainer.step}"] = trainer.copies("model/weights")
    seen["step"] = trainer.step
    (folder / f"worker-{trainer.cluster.index}.json").write_text(json.dumps(seen))
    return status


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
