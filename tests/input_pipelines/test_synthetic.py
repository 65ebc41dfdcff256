"""Synthetic data: a function of seed and position, whatever the split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines import synthetic

SPEC = {"x": tf.TensorSpec([3], tf.float32), "y": tf.TensorSpec([], tf.int32)}


def rows(steps: int, size: int | None = None, replicas: int = 1, **plan: Any) -> dict[str, np.ndarray]:
    """All examples of ``steps`` global batches, in order."""
    made = BatchPlan(num_replicas=replicas, local_replicas=replicas, **plan)
    parts = list(synthetic(SPEC, size=size).batches(made).take(steps * replicas).as_numpy_iterator())
    return {name: np.concatenate([p[name] for p in parts]) for name in SPEC}


def test_an_example_depends_on_its_position_and_not_on_the_batch_it_is_in() -> None:
    whole = rows(1, global_batch_size=12)
    assert whole["x"].shape == (12, 3) and whole["x"].dtype == np.float32 and whole["y"].dtype == np.int32
    for other in (rows(3, global_batch_size=4), rows(2, replicas=2, global_batch_size=6)):
        for name, value in whole.items():
            np.testing.assert_array_equal(other[name], value)
    later = rows(1, global_batch_size=5, start=7)
    np.testing.assert_array_equal(later["x"], whole["x"][7:])


def test_epochs_repeat_and_seeds_differ() -> None:
    twice = rows(1, size=5, global_batch_size=10)
    np.testing.assert_array_equal(twice["x"][:5], twice["x"][5:])
    assert len(np.unique(twice["x"])) == 15
    other = rows(1, size=5, global_batch_size=10, seed=1)
    assert not np.any(other["x"] == twice["x"])


def test_numbers_are_normal_and_labels_uniform() -> None:
    many = rows(1, global_batch_size=3000)
    # 9000 normal numbers: the mean is within 6 / sqrt(9000) of 0, the variance within 6 sqrt(2 / 9000) of 1.
    assert abs(many["x"].mean()) < 0.064 and abs(many["x"].var() - 1.0) < 0.09
    counts = np.bincount(many["y"], minlength=10)
    assert len(counts) == 10 and np.all(np.abs(counts - 300) < 6 * np.sqrt(270))


@pytest.mark.parametrize("plan", [{"global_batch_size": 4, "stop": 5}, {"global_batch_size": 1}])
def test_a_replica_without_an_example_gets_no_rows(plan: dict[str, Any]) -> None:
    made = rows(2, replicas=2, **plan)
    assert len(made["y"]) == (5 if "stop" in plan else 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (tf.TensorSpec([None], tf.float32), "full shape"),
        (np.float32, "tf.TensorSpec"),
        (tf.TensorSpec([], tf.string), "dtype string"),
    ],
)
def test_what_cannot_be_made_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthetic(spec)


def test_an_endless_source_has_no_size() -> None:
    assert synthetic(SPEC).size is None
    assert synthetic(SPEC, size=7).size == 7
