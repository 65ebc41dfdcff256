"""Field cases C046 to C056: every example counts once, and figures say how they are reduced."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import AtSteps, ConfigError, LockstepError, LossOutput, Max, Scheduled, Sum
from input_pipelines import from_arrays
from tests.field.data_worker import THOUSAND, scored
from tests.helpers import Ids, Toy, ToyWithEval, column, ids_by_step, records, settings


class Counted(Toy):
    """1,000 examples with a loss, an accuracy and a maximum that depend on each of them."""

    def eval_data(self) -> Any:
        return from_arrays(THOUSAND, shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return scored(model, batch)


@pytest.fixture(scope="module")
def alone() -> dict[str, float]:
    """The figures of one replica with batches of 8."""
    return Counted(settings(eval_batch_size=8)).evaluate()


@pytest.mark.parametrize(("replicas", "batch"), [(2, 8), (3, 8), (1, 64), (2, 64), (3, 7)])
def test_a_thousand_examples_give_the_same_figures_for_any_batch_and_replicas(
    alone: dict[str, float], replicas: int, batch: int
) -> None:
    result = Counted(settings(num_replicas=replicas, eval_batch_size=batch)).evaluate()
    assert (result["examples"], result["rows"]) == (1000, 1000)
    assert result == pytest.approx(alone, rel=1e-7)
    xs = THOUSAND.astype(np.float64)
    assert alone["loss"] == pytest.approx(((xs - 1) ** 2).mean(), rel=1e-6)
    assert (alone["accuracy"], alone["most"]) == ((xs > 0).mean(), xs.max())


@pytest.mark.parametrize("replicas", [1, 2])
def test_c047_sums_of_the_replicas_are_added_and_bare_scalars_refused(tmp_path: pathlib.Path, replicas: int) -> None:
    class Two(Toy):
        xs = np.float32([1, 3])

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=model.w * batch, metrics={"sum": Sum(batch)})

    Two(settings(run_dir=tmp_path, train_steps=1, global_batch_size=2, num_replicas=replicas)).train()
    assert column(tmp_path, "sum") == [4.0]

    class Bare(Two):
        def eval_data(self) -> Any:
            return self.train_data()

        def eval_step(self, batch: Any) -> Any:
            return {"loss": tf.reduce_sum(batch)}

    with pytest.raises(ConfigError, match="'loss' without saying how it is reduced over replicas"):
        Bare(settings(num_replicas=replicas)).evaluate()


@pytest.mark.parametrize("replicas", [1, 2])
def test_c054_training_goes_on_in_its_data_after_an_evaluation(tmp_path: pathlib.Path, replicas: int) -> None:
    class WithEval(Ids):
        def eval_data(self) -> Any:
            return from_arrays(self.xs, shuffle=False)

    for name, changes in (("plain", {}), ("evaluated", {"eval_every": 3})):
        WithEval(settings(run_dir=tmp_path / name, train_steps=10, num_replicas=replicas, **changes)).train(
            evaluate=bool(changes)
        )
    lists = [ids_by_step(tmp_path / name) for name in ("plain", "evaluated")]
    assert lists[0] == lists[1]
    assert sorted(i for step in lists[0] for i in step) == list(range(40))


@pytest.mark.parametrize("replicas", [1, 2])
def test_c055_a_maximum_is_that_of_the_whole_batch(replicas: int) -> None:
    class Most(ToyWithEval):
        eval_xs = np.float32([1, 7, 3, 2, 5, 4, 8, 6])

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=model.w * batch, metrics={"most": Max(batch)})

    assert Most(settings(num_replicas=replicas, eval_batch_size=8)).evaluate()["most"] == 8.0


def test_c056_a_hook_may_count_on_its_own_once_and_not_for_each_replica() -> None:
    """A figure of the outer loop is a Python number: it needs no variable that is summed over replicas."""
    counted = []

    class Counting(Toy):
        def hooks(self) -> Any:
            return [Scheduled(AtSteps([1, 2, 3]), lambda step, values: counted.append(values["loss"]))]

    Counting(settings(num_replicas=2, train_steps=3)).train()
    assert len(counted) == 3


# --- continuous evaluation -------------------------------------------------------------------------------------------


def test_every_checkpoint_of_a_finished_run_is_evaluated_once(tmp_path: pathlib.Path) -> None:
    config = settings(run_dir=tmp_path, train_steps=6, checkpoint_every=2)
    trained = ToyWithEval(config.replace(tensorboard=True))
    trained.train(evaluate=False)
    assert records(tmp_path, "eval") == []
    follower = ToyWithEval(config.replace(tensorboard=True))
    result = follower.evaluate_continuously()
    assert column(tmp_path, "step", "eval") == [2, 4, 6]
    assert result["loss"] == ToyWithEval(config).evaluate()["loss"]
    assert list((tmp_path / "tensorboard" / "eval").glob("events*"))


def test_a_run_in_another_process_is_followed_to_its_end(tmp_path: pathlib.Path, run_cli: Callable[..., Any]) -> None:
    flags = ["--task=digits", f"--run_dir={tmp_path}/run", "--device=cpu", "--train_steps=60", "--checkpoint_every=20"]
    environment_flags = ["--progress=lines"]
    train = subprocess.Popen(
        [sys.executable, "train.py", *flags, "--mode=train", "--log_every=20"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=pathlib.Path(__file__).parents[2],
    )
    try:
        done = run_cli([*flags, *environment_flags, "--mode=continuous_eval", "--eval_patience=90"], timeout=150)
    finally:
        train.wait(timeout=60)
    assert done.code == 0, done.stderr[-3000:]
    assert "the run has ended" in done.stdout
    evaluated = column(tmp_path / "run", "step", "eval")
    assert evaluated == sorted(set(evaluated)) and evaluated[-1] == 60
    assert train.returncode == 0


def test_following_ends_with_an_error_where_nothing_comes(tmp_path: pathlib.Path) -> None:
    config = settings(run_dir=tmp_path, train_steps=2, eval_patience=1.5)
    start = time.monotonic()
    with pytest.raises(LockstepError, match=r"no new checkpoint in .* for eval_patience=1\.5 s"):
        ToyWithEval(config).evaluate_continuously()
    assert time.monotonic() - start < 30


def test_following_passes_over_a_damaged_checkpoint(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(run_dir=tmp_path, train_steps=4, checkpoint_every=2)
    ToyWithEval(config).train(evaluate=False)
    data = next((tmp_path / "checkpoints" / "step-00000002").glob("data.data*"))
    data.write_bytes(data.read_bytes()[:-1])
    ToyWithEval(config.replace(progress="lines")).evaluate_continuously()
    assert column(tmp_path, "step", "eval") == [4]
    assert "passed over the checkpoint of step 2" in capsys.readouterr().out


def test_following_without_a_folder_or_evaluation_data_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="continuous_eval without run_dir"):
        ToyWithEval(settings()).evaluate_continuously()
    with pytest.raises(ConfigError, match="Toy has no evaluation data"):
        Toy(settings(run_dir=tmp_path)).evaluate_continuously()


def test_a_run_that_ended_without_a_checkpoint_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"status": "done"}))
    with pytest.raises(ConfigError, match="ended without a checkpoint"):
        ToyWithEval(settings(run_dir=tmp_path)).evaluate_continuously()
