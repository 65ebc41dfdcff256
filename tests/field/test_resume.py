"""Field cases C075 to C083: a resumed run cannot be told from an unbroken one."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import LossOutput, Trainer, step_seed
from input_pipelines import from_arrays
from tests.helpers import Ids, ids_by_step, saved, settings, tree

ROOT = pathlib.Path(__file__).resolve().parents[2]


def ids_of(run_dir: Any) -> list[int]:
    """Ids in the order of the steps; within a step rising."""
    return [i for step in ids_by_step(run_dir) for i in step]


class Stream(Ids):
    """48 ids, shuffled."""

    xs = np.arange(48, dtype=np.float32)


def test_c075_a_resumed_run_sees_what_an_unbroken_one_sees(tmp_path: pathlib.Path) -> None:
    usual = {"global_batch_size": 10, "train_steps": 8}
    Stream(settings(run_dir=tmp_path / "unbroken", **usual)).train()
    Stream(settings(run_dir=tmp_path / "resumed", **usual)).train(4)
    Stream(settings(run_dir=tmp_path / "resumed", **usual)).train()
    assert ids_by_step(tmp_path / "resumed") == ids_by_step(tmp_path / "unbroken")


@pytest.mark.parametrize(("replicas", "batch"), [(1, 12), (2, 12), (3, 12), (2, 6)])
def test_the_stream_goes_on_on_any_replicas_and_batch(tmp_path: pathlib.Path, replicas: int, batch: int) -> None:
    """Stopped after 3 steps of 12; then the same stream in other pieces."""
    usual = {"global_batch_size": 12, "train_steps": 8, "seed": 5}
    Stream(settings(run_dir=tmp_path / "unbroken", **usual)).train()
    Stream(settings(run_dir=tmp_path / "cut", **usual)).train(3)
    rest = 60 // batch
    config = settings(
        run_dir=tmp_path / "cut",
        **{**usual, "global_batch_size": batch, "train_steps": 3 + rest},
        num_replicas=replicas,
    )
    Stream(config.replace(resume_anyway=True)).train()
    whole, cut = ids_by_step(tmp_path / "unbroken"), ids_by_step(tmp_path / "cut")
    assert cut[:3] == whole[:3]
    joined = [
        sorted(i for step in cut[3 + k * 12 // batch : 3 + (k + 1) * 12 // batch] for i in step) for k in range(5)
    ]
    assert joined == whole[3:]


class Noisy(Trainer):
    """Dropout, noise of the step, noise added to the examples, micro-batches: all that could differ."""

    def build_model(self) -> Any:
        inputs = keras.Input((4,))
        x = keras.layers.Dense(8, activation="relu")(inputs)
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.5)(x)))

    def train_data(self) -> Any:
        return from_arrays(np.random.RandomState(1).randn(40, 4).astype(np.float32))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        noise = tf.random.stateless_normal(tf.shape(batch), step_seed("jitter"), stddev=0.1)
        return LossOutput(loss=tf.square(model(batch + noise, training=training)[:, 0] - tf.reduce_sum(batch, 1)))


NOISY = {"global_batch_size": 8, "train_steps": 7, "accumulate_steps": 2, "optimizer": "adamw", "ema_decay": 0.9}


@pytest.mark.parametrize("replicas", [1, 2])
def test_c076_weights_are_equal_bit_for_bit_after_a_kill(tmp_path: pathlib.Path, replicas: int) -> None:
    """The process is killed with SIGKILL after its third checkpoint, wherever it is then."""
    usual = {**NOISY, "num_replicas": replicas, "checkpoint_every": 1, "keep_checkpoints": 10}
    Noisy(settings(run_dir=tmp_path / "unbroken", **usual)).train()
    script = (
        "import os, signal, sys\n"
        "os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        "from framework import AtSteps, Scheduled\n"
        "from tests.field.test_resume import Noisy\n"
        "from tests.helpers import settings\n"
        "class Killed(Noisy):\n"
        "    def hooks(self):\n"
        "        return [Scheduled(AtSteps([5]), lambda *_: os.kill(os.getpid(), signal.SIGKILL))]\n"
        f"Killed(settings(run_dir={str(tmp_path / 'killed')!r}, **{usual!r})).train()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    Noisy(settings(run_dir=tmp_path / "killed", **usual)).train()
    whole, again = saved(tmp_path / "unbroken", 7), saved(tmp_path / "killed", 7)
    assert whole.keys() == again.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    assert [s for s in os.listdir(tmp_path / "killed" / "checkpoints") if s.startswith(".")] == []


class Augmented(Noisy):
    """Noise that belongs to the examples, and micro-batches; masks belong to the replicas, so there is no dropout."""

    def build_model(self) -> Any:
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, activation="relu")(inputs)))

    def train_data(self) -> Any:
        def jitter(example: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
            return example + tf.random.stateless_normal([4], seed, stddev=0.1)

        return from_arrays(np.random.RandomState(1).randn(40, 4).astype(np.float32), augment=jitter)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.square(model(batch, training=training)[:, 0] - tf.reduce_sum(batch, 1)))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1)])
def test_c076_weights_agree_to_1e_6_on_other_replicas(tmp_path: pathlib.Path, before: int, after: int) -> None:
    usual = {**NOISY, "optimizer": "sgd", "learning_rate": 0.05}
    Augmented(settings(run_dir=tmp_path / "unbroken", num_replicas=before, **usual)).train()
    Augmented(settings(run_dir=tmp_path / "moved", num_replicas=before, **usual)).train(3)
    Augmented(settings(run_dir=tmp_path / "moved", num_replicas=after, **usual)).train()
    whole, moved = saved(tmp_path / "unbroken", 7), saved(tmp_path / "moved", 7)
    assert whole.keys() == moved.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(moved[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def test_c079_with_micro_batches_a_position_counts_examples_of_updates(tmp_path: pathlib.Path) -> None:
    """10 updates of 4 micro-batches of one example: 40 micro-batches a pass."""
    usual = {"accumulate_steps": 4, "train_epochs": 1, "train_steps": None}
    stopped = Ids(settings(run_dir=tmp_path, **usual))
    stopped.train(7)
    assert stopped.examples_seen == 28
    rest = Ids(settings(run_dir=tmp_path, **usual))
    rest.train()
    assert (rest.step, rest.examples_seen) == (10, 40)
    assert sorted(ids_of(tmp_path)) == list(range(40))


@pytest.mark.parametrize("total", [10, 8])
def test_c083_a_target_that_is_reached_leaves_every_file_alone(
    tmp_path: pathlib.Path, total: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class WithEval(Ids):
        def eval_data(self) -> Any:
            return from_arrays(self.xs, shuffle=False)

    WithEval(settings(run_dir=tmp_path, train_steps=10)).train()
    before = tree(tmp_path)
    again = WithEval(settings(run_dir=tmp_path, train_steps=total, progress="lines"))
    assert again.train() == {}
    assert "nothing is left to do" in capsys.readouterr().out
    assert tree(tmp_path) == before
    assert again.evaluate()["examples"] == 40
