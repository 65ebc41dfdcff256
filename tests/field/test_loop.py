"""Field cases C077 and C084 to C090: counts of steps, schedules, intervals."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import EveryStep, Scheduled, flags, optimizers
from framework.hooks import read_metrics
from models.registry import Tasks
from tests.helpers import (
    Ids,
    Toy,
    column,
    decode_ids,
    frozen_heap,
    ids_by_step,
    saved,
    settings,
    store,
    tree,
    young_iterators,
)

__all__ = ["frozen_heap", "young_iterators"]


def summary(run_dir: pathlib.Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def assert_ended_at(trainer: Any, run_dir: pathlib.Path, step: int) -> None:
    """So many updates, and the last checkpoint, record and summary are of that step."""
    assert (trainer.step, trainer.optimizer.iterations.numpy()) == (step, step)
    assert store(run_dir).latest() == step
    assert column(run_dir, "step")[-1] == step
    assert (summary(run_dir)["status"], summary(run_dir)["step"]) == ("done", step)


# --- C084, C085, C086, C087: how many steps --------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("total", "steps_per_loop"), [(10, 4), (3, 10), (1, 4)])
def test_c084_no_step_more_than_asked_for(
    tmp_path: pathlib.Path, total: int, steps_per_loop: int, replicas: int
) -> None:
    config = settings(
        run_dir=tmp_path, train_steps=total, steps_per_loop=steps_per_loop, log_every=0, num_replicas=replicas
    )
    trainer = Toy(config)
    trainer.train()
    assert_ended_at(trainer, tmp_path, total)
    assert trainer.examples_seen == 4 * total


@pytest.mark.parametrize("kind", ["pipeline", "dataset"])
def test_c084_seven_steps_of_epochs_of_five_are_seven(tmp_path: pathlib.Path, kind: str) -> None:
    class Five(Toy):  # 20 examples, batch 4
        xs = np.arange(20, dtype=np.float32)

        def train_data(self) -> Any:
            return tf.data.Dataset.from_tensor_slices(self.xs).batch(4) if kind == "dataset" else super().train_data()

    trainer = Five(settings(run_dir=tmp_path, train_steps=7, train_epochs=3, steps_per_loop=5))
    trainer.train()
    assert_ended_at(trainer, tmp_path, 7)


@pytest.mark.parametrize("kind", ["pipeline", "dataset"])
def test_c085_a_resume_in_the_middle_of_an_epoch_ends_at_the_end_of_the_last(tmp_path: pathlib.Path, kind: str) -> None:
    """Seven steps an epoch, stopped at 10: the target of 3 epochs is absolute, so it is 21 and not 10 + 14 or 17."""

    class Seven(Ids):
        xs = np.arange(28, dtype=np.float32)
        shuffle = False

        def train_data(self) -> Any:
            return tf.data.Dataset.from_tensor_slices(self.xs).batch(4) if kind == "dataset" else super().train_data()

    Seven(settings(run_dir=tmp_path, train_steps=10, train_epochs=3)).train()
    trainer = Seven(settings(run_dir=tmp_path, train_steps=None, train_epochs=3))
    trainer.train()
    assert_ended_at(trainer, tmp_path, 21)
    assert ids_by_step(tmp_path) == [list(range(i, i + 4)) for i in range(0, 28, 4)] * 3


@pytest.mark.parametrize("replicas", [1, 2])
def test_c086_the_total_counts_from_step_0_also_after_a_restart(tmp_path: pathlib.Path, replicas: int) -> None:
    config = settings(run_dir=tmp_path, train_steps=10, num_replicas=replicas)
    first = Ids(config)
    first.train(6)
    assert first.step == 6
    again = Ids(config)
    again.train()
    assert_ended_at(again, tmp_path, 10)
    assert column(tmp_path, "step") == list(range(1, 11))
    before = tree(tmp_path)
    once_more = Ids(config)
    assert once_more.train() == {} and once_more.step == 10
    assert tree(tmp_path) == before


def test_c086_the_help_of_the_flag_says_total(capsys: pytest.CaptureFixture[str]) -> None:
    assert flags.run(lambda command: 0, ["train.py", "--help"], tasks=Tasks()) == 0
    text = " ".join(capsys.readouterr().out.split())
    start = text.index("--train_steps")
    assert "Total number of updates, counted from step 0, also after a resume" in text[start : start + 200]


@pytest.mark.parametrize("how", [{"train_steps": -1}, {"train_steps": None, "train_epochs": 1}])
@pytest.mark.parametrize(("kind", "replicas"), [("pipeline", 1), ("dataset", 2), ("function", 1), ("generator", 2)])
def test_c087_training_to_the_end_of_seven_batches(
    tmp_path: pathlib.Path, kind: str, replicas: int, how: dict[str, Any]
) -> None:
    """Inner loops of 4: 1 (the first step alone), 4 and 2, then a clean end with the checkpoint of step 7."""

    class ToTheEnd(Ids):
        xs = np.arange(26, dtype=np.float32)  # six batches of 4 and one of 2
        shuffle = False

        def train_data(self) -> Any:
            whole = tf.data.Dataset.from_tensor_slices(self.xs).batch(4)
            if kind == "pipeline":
                return super().train_data()
            if kind == "function":
                return lambda context: whole
            if kind == "generator":
                spec = tf.TensorSpec([None], tf.float32)
                batches = [self.xs[i : i + 4] for i in range(0, 26, 4)]
                return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
            return whole

    trainer = ToTheEnd(settings(run_dir=tmp_path, steps_per_loop=4, num_replicas=replicas, **how))
    trainer.train()
    assert_ended_at(trainer, tmp_path, 7)
    assert trainer.examples_seen == 26
    assert ids_by_step(tmp_path) == [list(range(i, min(i + 4, 26))) for i in range(0, 28, 4)]
    assert saved(tmp_path, 7)["run/examples"] == 26


# --- C077, C088, C089: the schedule ----------------------------------------------------------------------------------


class Scheduled12(Toy):
    """Warm-up over 4 of 12 updates to 0.8, then half of it from update 9 on."""

    def build_optimizer(self) -> Any:
        after = optimizers.Step(peak=0.8, boundaries=(9,), factor=0.5)
        return optimizers.SGD(learning_rate=optimizers.WarmUp(peak=0.8, steps=4, after=after))


RATES = [0.2, 0.4, 0.6, *[0.8] * 6, *[0.4] * 3]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_c088_one_step_of_the_schedule_an_update_on_any_number_of_replicas(
    tmp_path: pathlib.Path, replicas: int
) -> None:
    trainer = Scheduled12(settings(run_dir=tmp_path, train_steps=12, num_replicas=replicas, steps_per_loop=5))
    trainer.train()
    assert column(tmp_path, "learning_rate") == pytest.approx(RATES, rel=1e-6)
    assert trainer.optimizer.iterations.numpy() == 12


@pytest.mark.parametrize("replicas", [1, 2])
def test_c088_the_configured_schedule_has_its_lengths_in_updates(tmp_path: pathlib.Path, replicas: int) -> None:
    class Configured(Toy):
        def build_optimizer(self) -> Any:
            return optimizers.from_config(self.config, self.total_steps)

    config = settings(run_dir=tmp_path, train_steps=12, num_replicas=replicas, warmup_steps=4, learning_rate=0.8)
    Configured(config.replace(optimizer="sgd", schedule="polynomial")).train()
    down = [0.8 * (12 - i) / 8 for i in range(4, 12)]
    assert column(tmp_path, "learning_rate") == pytest.approx([0.2, 0.4, 0.6, 0.8, *down], rel=1e-6)


def test_c077_the_rates_of_a_resumed_run_are_those_of_an_unbroken_one_exactly(tmp_path: pathlib.Path) -> None:
    class Cosine(Toy):
        def build_optimizer(self) -> Any:
            return optimizers.from_config(self.config, self.total_steps)

    usual = {"train_steps": 20, "warmup_steps": 5, "schedule": "cosine", "optimizer": "sgd", "learning_rate": 0.1}
    Cosine(settings(run_dir=tmp_path / "unbroken", **usual)).train()
    Cosine(settings(run_dir=tmp_path / "stopped", **usual)).train(8)
    Cosine(settings(run_dir=tmp_path / "stopped", **usual)).train()
    unbroken = column(tmp_path / "unbroken", "learning_rate")
    assert len(unbroken) == 20
    assert column(tmp_path / "stopped", "learning_rate") == unbroken
    assert unbroken[4] == pytest.approx(0.1, rel=1e-6) == max(unbroken)


_gang: list[tuple[pathlib.Path, list[dict[str, Any]]]] = []


@pytest.fixture
def gang(
    run_workers: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, list[dict[str, Any]]]:
    """The run folder of two workers with shards of 6 and 4 examples, and what each of them saw; made once."""
    if not _gang:
        out = tmp_path_factory.mktemp("gang")
        done = run_workers(2, str(out), script="tests/field/worker_script.py", timeout=150)
        assert [d.code for d in done] == [0, 0], done[0].stderr[-3000:] + done[1].stderr[-3000:]
        _gang.append((out / "run", [json.loads((out / f"worker-{i}.json").read_text()) for i in range(2)]))
    return _gang[0]


def test_c088_two_workers_have_the_rates_of_one(gang: tuple[pathlib.Path, list[dict[str, Any]]]) -> None:
    run_dir, workers = gang
    for worker in workers:
        assert [s["learning_rate"] for s in worker["seen"]] == pytest.approx(RATES, rel=1e-6)
        assert (worker["step"], worker["iterations"]) == (12, 12)
    written = [r["learning_rate"] for r in read_metrics(run_dir / "metrics.jsonl") if r["phase"] == "train"]
    assert written == pytest.approx(RATES, rel=1e-6)


def test_c014_c089_the_rate_is_equal_on_workers_with_shards_of_unequal_size(
    gang: tuple[pathlib.Path, list[dict[str, Any]]],
) -> None:
    """Worker 1 is out of data after 2 of the 3 steps of each pass, and both go on together."""
    _, (first, second) = gang
    for name in ("step", "learning_rate", "loss", "ids"):
        assert [s[name] for s in first["seen"]] == [s[name] for s in second["seen"]]
    one_pass = [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5]]
    assert [decode_ids(s["ids"]) for s in first["seen"]] == one_pass * 4


# --- C090: intervals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("every", "steps_per_loop", "saves"), [(4, 3, [4, 8, 12]), (5, 3, [5, 10, 12]), (4, 4, [4, 8, 12])]
)
def test_c090_checkpoints_are_at_their_steps_whatever_the_inner_loop(
    tmp_path: pathlib.Path, every: int, steps_per_loop: int, saves: list[int], replicas: int
) -> None:
    class Counting(Toy):
        xs, rate = np.ones(8, np.float32), 1.0  # the weight after step s is 1 - s

    config = settings(
        run_dir=tmp_path,
        train_steps=12,
        checkpoint_every=every,
        steps_per_loop=steps_per_loop,
        log_every=0,
        num_replicas=replicas,
    )
    Counting(config).train()
    assert store(tmp_path).steps() == saves
    assert [float(saved(tmp_path, s)["model/w"]) for s in saves] == [1.0 - s for s in saves]


def test_c090_inner_loops_are_cut_and_not_skipped(tmp_path: pathlib.Path) -> None:
    """With a hook at each step the loop stops at each step; with none it takes 1, then 3 at a time, cut at 4 and 8."""
    seen: list[int] = []

    class Hooked(Toy):
        def hooks(self) -> Any:
            return [Scheduled(EveryStep(), lambda step, values: seen.append(step))]

    Hooked(settings(run_dir=tmp_path, train_steps=12, checkpoint_every=4, steps_per_loop=3)).train()
    assert seen == list(range(1, 13))
    assert store(tmp_path).steps() == [4, 8, 12]
