"""Field cases C075 to C083: a resumed run cannot be told from an unbroken one."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import LossOutput, Sum, Trainer, step_seed
from input_pipelines import from_arrays
from tests.helpers import Ids, column, decode_ids, ids_by_step, records, saved, settings, tree

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


class Long(Stream):
    """120 ids; a float64 holds only 53 as powers of 2, so three figures hold 40 each."""

    xs = np.arange(120, dtype=np.float32)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        figures = {"rows": Sum(tf.ones_like(batch))}
        for part in range(3):
            inside = (batch >= 40 * part) & (batch < 40 * (part + 1))
            power = tf.pow(tf.constant(2.0, tf.float64), tf.cast(batch, tf.float64) - 40 * part)
            figures[f"ids{part}"] = Sum(tf.where(inside, power, tf.zeros_like(power)))
        return LossOutput(loss=model.w * batch, metrics=figures)


def long_ids(run_dir: Any) -> list[list[int]]:
    """Ids of each step of a ``Long`` run; within a step rising; asserts that none came twice in a step."""
    steps = [[40 * part + i for part in range(3) for i in decode_ids(r[f"ids{part}"])] for r in records(run_dir)]
    assert [len(ids) for ids in steps] == column(run_dir, "rows")
    return steps


LONG = {"global_batch_size": 12, "train_steps": 14, "seed": 5}  # an epoch is 10 steps


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Folders of ``Long``: unbroken; stopped after 3 steps; killed with SIGKILL behind the checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("long")
    Long(settings(run_dir=folder / "unbroken", **LONG)).train()
    Long(settings(run_dir=folder / "stopped", **LONG)).train(3)
    script = (
        "import os, signal, sys\n"
        "os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        "from framework import AtSteps, Scheduled\n"
        "from tests.field.test_resume import LONG, Long\n"
        "from tests.helpers import settings\n"
        "class Killed(Long):\n"
        "    def hooks(self):\n"
        "        return [Scheduled(AtSteps([4]), self.end)]\n"
        "    def end(self, *_):\n"
        "        self._run.saving.wait()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"Killed(settings(run_dir={str(folder / 'killed')!r}, checkpoint_every=3, **LONG)).train()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert len(records(folder / "killed")) > 3  # it had gone further than what it saved
    return {name: folder / name for name in ("unbroken", "stopped", "killed")}


@pytest.mark.parametrize(("replicas", "batch"), [(1, 12), (2, 12), (3, 12), (1, 6), (2, 6)])
@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.slow), "killed"])
def test_the_stream_goes_on_on_any_replicas_and_batch(
    tmp_path: pathlib.Path, long_runs: dict[str, Any], how: str, replicas: int, batch: int
) -> None:
    """The rest of an unbroken run of 14 steps, in the same or in smaller pieces."""
    run_dir = shutil.copytree(long_runs[how], tmp_path / "run")
    parts = 12 // batch
    changes = {"global_batch_size": batch, "train_steps": 3 + 11 * parts, "num_replicas": replicas}
    Long(settings(run_dir=run_dir, **{**LONG, **changes}, resume_anyway=True)).train()
    whole, cut = long_ids(long_runs["unbroken"]), long_ids(run_dir)
    assert sorted(i for step in whole[:10] for i in step) == list(range(120))
    assert cut[:3] == whole[:3]
    rest = cut[3:]
    assert [sorted(i for step in rest[k : k + parts] for i in step) for k in range(0, len(rest), parts)] == whole[3:]


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


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), pytest.param(2, 3, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow)],
)
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
