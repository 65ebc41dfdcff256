"""The distillation example: the student learns from the teacher, which stays as it is."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from examples.distillation import Distillation, train_teacher
from input_pipelines import digits, from_arrays
from models.mlp import mlp
from tests.examples.runs import assert_close, assert_moved, assert_same, initial, trained, weights
from tests.helpers import settings, store

IMAGES, LABELS = (a[:60] for a in digits.load("train"))
TEACHER = [np.random.default_rng(i).normal(size=w.shape).astype(np.float32) * 0.2
           for i, w in enumerate(mlp((8, 8), [256, 256], 10).get_weights())]  # fmt: skip


class Taught(Distillation):
    """60 examples in the order of the data, and a teacher of random weights."""

    teacher_weights: Any = TEACHER

    def train_data(self) -> Any:
        return from_arrays((IMAGES, LABELS), shuffle=False)


def logits(values: list[np.ndarray], rows: int) -> np.ndarray:
    x = IMAGES[:rows].reshape(rows, 64).astype(np.float64)
    for i in range(0, len(values), 2):
        x = (np.maximum(x, 0.0) if i else x) @ values[i] + values[i + 1]
    return x


def divergence(student: list[np.ndarray], rows: int = 12, heat: float = 4.0) -> float:
    """Mean of sum p log(p / q) x temperature^2 over the first rows, p of the teacher and q of the student; float64."""

    def softened(values: list[np.ndarray]) -> np.ndarray:
        e = np.exp(logits(values, rows) / heat)
        return e / e.sum(1, keepdims=True)

    p, q = softened(TEACHER), softened(student)
    return float((p * np.log(p / q)).sum(1).mean() * heat**2)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_first_step_is_the_one_worked_out_in_numpy(tmp_path: pathlib.Path, replicas: int) -> None:
    student = initial(Taught).layers[1].get_weights()
    trainer, records = trained(Taught, tmp_path, replicas, train_steps=1)
    assert records[0]["loss"] == pytest.approx(divergence(student), rel=1e-5)
    agree = np.equal(*(logits(v, 12).argmax(1) for v in (student, TEACHER)))
    assert records[0]["agreement"] == pytest.approx(agree.mean())
    # d/dz of KL(p || softmax(z / T)) x T^2 is T (q - p), so the last bias moves by rate x T x mean(p - q).
    p, q = (np.exp(logits(v, 12) / 4.0) for v in (TEACHER, student))
    gap = (p / p.sum(1, keepdims=True) - q / q.sum(1, keepdims=True)).mean(0)
    np.testing.assert_allclose(trainer.student.get_weights()[-1], 0.1 * 4.0 * gap, rtol=1e-4, atol=1e-7)


ROUNDED = (
    "frozen weights are averaged over the replicas like moving statistics: w becomes (sum of rows x w) / rows, rounded"
)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_teacher_does_not_change_by_a_bit(tmp_path: pathlib.Path, replicas: int) -> None:
    before = weights(initial(Taught))
    trainer, _ = trained(Taught, tmp_path, replicas)
    after = weights(trainer.model)
    assert_moved({v.path: before[v.path] for v in trainer.student.variables}, after)
    for value, variable in zip(TEACHER, trainer.teacher.variables, strict=True):
        for copy in trainer.strategy.experimental_local_results(variable.value):
            np.testing.assert_array_equal(copy.numpy(), value, err_msg=variable.path)


def test_any_number_of_replicas_gives_the_same_student(tmp_path: pathlib.Path) -> None:
    runs = [trained(Taught, tmp_path, n, momentum=0.9, global_batch_size=16) for n in (1, 2, 3)]
    for trainer, records in runs[1:]:
        for name in ("loss", "accuracy", "agreement"):
            np.testing.assert_allclose([r[name] for r in records], [r[name] for r in runs[0][1]], rtol=1e-5)
        assert_close(weights(trainer.model), weights(runs[0][0].model))
        assert len(trainer.optimizer.state()) == 1 + 4, (
            "iterations and a velocity for each variable of the student only"
        )


def test_a_new_process_takes_the_teacher_from_the_checkpoint(tmp_path: pathlib.Path) -> None:
    trainer, _ = trained(Taught, tmp_path, 2, train_steps=3)
    assert store(trainer.config.run_dir).steps() == [3]

    class Later(Taught):
        teacher_weights = None

    later = Later(trainer.config)
    assert_moved(weights(later.model), weights(trainer.model), prefix="")  # other weights, until they are restored
    later.evaluate()
    assert_same(weights(trainer.model), weights(later.model))


def test_the_teacher_is_trained_on_the_same_devices() -> None:
    accuracy = Distillation(settings(num_replicas=2, global_batch_size=60))
    accuracy.teacher_weights = train_teacher(accuracy.config, 30)
    assert accuracy.evaluate()["teacher_accuracy"] > 0.5
