"""Field cases C083 and C118 to C123: flags, devices, curves, and a run with nothing left to do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags as absl_flags

import train
from framework import ConfigError, LossOutput, RunConfig, Trainer
from framework.hooks import read_metrics
from input_pipelines import from_arrays

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--task=digits",
    "--hidden=8",
    "--global_batch_size=16",
    "--warmup_steps=0",
    "--schedule=constant",
    "--eval_every=0",
    "--checkpoint_every=0",
    "--log_every=1",
    "--device=cpu",
]


def main(*args: str) -> int:
    return train.main(["train.py", *SMALL, *args])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Line(Trainer):
    """A dense layer on ones."""

    def build_model(self) -> Any:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def train_data(self) -> Any:
        return from_arrays((np.ones((8, 3), np.float32),))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=model(batch[0])[:, 0])


def line(**settings: Any) -> Line:
    return Line(RunConfig(**{"device": "cpu", "progress": "off", "global_batch_size": 4, **settings}))


# --- C083: nothing is left -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("c083") / "run"
    assert main(f"--run_dir={run_dir}", "--train_steps=10", "--mode=train") == 0
    return run_dir


def test_c083_the_target_is_reached_already(ten_steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(ten_steps)
    assert main(f"--run_dir={ten_steps}", "--train_steps=10", "--mode=train") == 0
    assert "step 10 of 10 is reached already: nothing is left to do" in capsys.readouterr().out
    assert contents(ten_steps) == before


def test_c083_a_target_below_the_checkpoint_alters_no_file(ten_steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(ten_steps)
    try:
        assert main(f"--run_dir={ten_steps}", "--train_steps=8", "--mode=train") == 0
        assert "step 10 of 8 is reached already: nothing is left to do" in capsys.readouterr().out
        assert contents(ten_steps) == before
    finally:
        (ten_steps / "flags.txt").write_bytes(before["flags.txt"])


def test_c083_the_final_evaluation_is_still_possible(ten_steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"--run_dir={ten_steps}", "--mode=eval") == 0
    assert "going on from the checkpoint of step 10" in capsys.readouterr().out
    record = read_metrics(ten_steps / "metrics.jsonl")[-1]
    assert (record["phase"], record["step"], record["examples"]) == ("eval", 10, 360)


# --- C118, C119: flags are read in main only -----------------------------------------------------------------------


def test_c118_the_trainer_takes_a_plain_config_without_absl() -> None:
    assert not absl_flags.FLAGS.is_parsed()
    trainer = line(train_steps=2)
    assert np.isfinite(trainer.train()["loss"])
    assert not absl_flags.FLAGS.is_parsed()


_CHILD = """
import multiprocessing

def work(queue):
    from framework import RunConfig
    from models.digits_task import Digits
    config = RunConfig(train_steps=2, device="cpu", progress="off", global_batch_size=8)
    queue.put(Digits(config, hidden=4).train(evaluate=False))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print(sorted(queue.get(timeout=90)))
    child.join(30)
    raise SystemExit(child.exitcode)
"""


def test_c118_a_spawned_child_trains_whatever_the_arguments_of_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_CHILD)
    done = subprocess.run(
        [sys.executable, str(script), "--train_steps=nonsense", "--task"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "['accuracy', 'loss']\n"


def load(name: str) -> ModuleType:
    """``train.py`` as a module of its own, as a second script would be."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_c119_two_scripts_in_one_process_and_main_called_twice(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for script, steps in ((load("first_script"), 3), (load("second_script"), 4), (train, 5), (train, 6)):
        assert script.main(["train.py", "--task=synthetic", f"--train_steps={steps}", "--print_config"]) == 0
        printed.append(json.loads(capsys.readouterr().out)["train_steps"])
    assert printed == [3, 4, 5, 6]


def test_c119_what_one_call_was_given_the_next_does_not_see(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for args in (["--seed=7", "--notensorboard", "--hidden=4"], []):
        assert train.main(["train.py", "--task=digits", "--print_config", *args]) == 0
        shown = json.loads(capsys.readouterr().out)
        seen.append((shown["seed"], shown["tensorboard"], shown["options"]["hidden"]))
    assert seen == [(7, False, 4), (0, True, 256)]


# --- C120: the smaller limit wins ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "steps", "end"),
    [(10, 7, 7), (1, 700, 2), (3, 5, 5)],  # 8 examples, batches of 4: 2 steps an epoch
)
def test_c120_the_smaller_of_epochs_and_steps_wins_and_is_said(
    epochs: int, steps: int, end: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = line(train_epochs=epochs, train_steps=steps, progress="lines")
    trainer.train()
    assert trainer.step == trainer.total_steps == end
    assert f"steps: 0 to {end}" in capsys.readouterr().out.splitlines()


# --- C121: devices asked for too late, or not there ----------------------------------------------------------------


def test_c121_more_logical_cpus_after_tensorflow_has_started() -> None:
    have = len(tf.config.list_logical_devices("CPU"))  # starts it, if it was not
    with pytest.raises(ConfigError) as caught:
        line(num_replicas=have + 1)
    assert f"num_replicas={have + 1} logical CPU devices (there are {have})" in str(caught.value)
    assert "make the Trainer before the first TensorFlow op" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_c121_as_many_as_there_are_or_fewer_is_not_too_late() -> None:
    have = len(tf.config.list_logical_devices("CPU"))
    assert line(num_replicas=have).strategy.num_replicas_in_sync == have
    assert line(num_replicas=1).strategy.num_replicas_in_sync == 1


_TOO_LATE = """
import sys, tensorflow as tf
tf.constant(1.0)
import train
sys.exit(train.main(["train.py", "--task=synthetic", "--num_replicas=2", "--run_dir=" + sys.argv[1]]))
"""


def test_c121_an_op_before_main_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", _TOO_LATE, str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert "num_replicas=2 logical CPU devices (there are 1) cannot be set any more" in errors[0]
    assert not run_dir.exists()


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU")
def test_c121_a_gpu_that_is_required_and_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    assert train.main(["train.py", "--task=synthetic", "--device=gpu", f"--run_dir={run_dir}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: device=gpu but TensorFlow sees no GPU")
    assert "--device=cpu" in lines[0]
    assert not run_dir.exists()


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU")
def test_c121_a_gpu_that_is_not_there_and_not_required_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    line(device="auto", train_steps=1, progress="lines").train()
    assert "on CPU (no GPU is visible)" in capsys.readouterr().out


# --- C123: summaries of the user's own -----------------------------------------------------------------------------


class Summarised(Line):
    """Writes from inside the step: the number of updates before this one, and this replica's number."""

    def train_step(self, batch: Any) -> Any:
        tf.summary.scalar("mine/updates", tf.convert_to_tensor(self.optimizer.iterations))
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        tf.summary.scalar("mine/replica", tf.cast(replica, tf.float32))
        return super().train_step(batch)


def events(folder: Path) -> list[Any]:
    """Every event of a folder's event files, in the order written."""
    records = [
        r for p in sorted(folder.glob("*tfevents*")) for r in tf.data.TFRecordDataset(str(p)).as_numpy_iterator()
    ]
    return [tf.compat.v1.Event.FromString(record) for record in records]


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every point by tag; "while/" is taken from a tag's front, see the test of the tag."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events(folder):
        for value in event.summary.value:
            point = (event.step, float(tf.make_ndarray(value.tensor)))
            found.setdefault(value.tag.removeprefix("while/"), []).append(point)
    return found


def summarise(run_dir: Path, **settings: Any) -> Path:
    """Trains 12 steps with a record every 4; returns the folder of event files."""
    base = {"device": "cpu", "progress": "off", "global_batch_size": 4, "train_steps": 12, "log_every": 4}
    Summarised(RunConfig(run_dir=str(run_dir), **{**base, **settings})).train()
    return run_dir / "tensorboard" / "train"


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("steps_per_loop", [0, 4])
def test_c123_a_users_summary_is_at_its_true_step_once_and_at_the_interval(
    replicas: int, steps_per_loop: int, tmp_path: Path
) -> None:
    found = points(summarise(tmp_path, num_replicas=replicas, steps_per_loop=steps_per_loop))
    assert found["mine/updates"] == [(4, 3.0), (8, 7.0), (12, 11.0)]
    assert found["mine/replica"] == [(4, 0.0), (8, 0.0), (12, 0.0)]
    assert [step for step, _ in found["loss"]] == [4, 8, 12]


def test_c123_a_users_summary_has_the_tag_the_user_wrote(tmp_path: Path) -> None:
    tags = {value.tag for event in events(summarise(tmp_path)) for value in event.summary.value}
    assert {"mine/updates", "mine/replica"} <= tags


def test_c123_nothing_in_an_unbroken_run_tells_tensorboard_to_forget_points(tmp_path: Path) -> None:
    kinds = [event.WhichOneof("what") for event in events(summarise(tmp_path))]
    assert "session_log" not in kinds[kinds.index("summary") :]


def test_c123_without_tensorboard_a_users_summary_is_no_error(tmp_path: Path) -> None:
    config = RunConfig(
        run_dir=str(tmp_path), device="cpu", progress="off", global_batch_size=4, train_steps=2, tensorboard=False
    )
    assert np.isfinite(Summarised(config).train()["loss"])
    assert not list(tmp_path.rglob("*tfevents*"))
