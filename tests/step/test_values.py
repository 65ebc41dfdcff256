"""Local sums of a LossOutput, and what is refused, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, Max, Min, Stat, StepSums, Sum
from framework.step.values import RESERVED, StatLayout, as_stats, local_sums


def sums(output: LossOutput) -> tuple[float, float, dict[str, Stat]]:
    objective, weight, stats = local_sums(output)
    return float(objective), float(weight), stats


def mean(stat: Stat) -> float:
    assert stat.kind == "mean" and stat.weight is not None
    return float(stat.value) / float(stat.weight)


def test_without_weights_the_weight_is_the_number_of_losses() -> None:
    objective, weight, stats = sums(LossOutput(loss=tf.constant([1.0, 2.0, 6.0])))
    assert (objective, weight) == (9.0, 3.0)
    assert mean(stats["loss"]) == 3.0
    assert list(stats) == ["loss"]


def test_weights_multiply_losses_and_are_summed() -> None:
    # 1*1 + 2*0 + 6*0.5 = 4; 1 + 0 + 0.5 = 1.5
    objective, weight, _ = sums(LossOutput(loss=tf.constant([1.0, 2.0, 6.0]), weight=tf.constant([1.0, 0.0, 0.5])))
    assert (objective, weight) == (4.0, 1.5)


def test_a_mask_of_tokens_counts_tokens_not_rows() -> None:
    loss = tf.constant([[1.0, 2.0, 100.0], [4.0, 100.0, 100.0]])
    mask = tf.constant([[True, True, False], [True, False, False]])
    objective, weight, _ = sums(LossOutput(loss=loss, weight=mask))
    assert (objective, weight) == (7.0, 3.0)


def test_one_weight_per_row_is_repeated_over_positions() -> None:
    loss = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    objective, weight, _ = sums(LossOutput(loss=loss, weight=tf.constant([[2.0], [0.0]])))
    assert (objective, weight) == (6.0, 4.0)


def test_a_scalar_weight_counts_once_for_each_loss() -> None:
    objective, weight, _ = sums(LossOutput(loss=tf.constant([1.0, 3.0]), weight=0.5))
    assert (objective, weight) == (2.0, 1.0)


def test_no_examples_are_zero_and_not_nan() -> None:
    metrics = {
        "hits": tf.zeros([0]),
        "most": Max(tf.zeros([0])),
        "least": Min(tf.zeros([0])),
        "all": Sum(tf.zeros([0])),
    }
    objective, weight, stats = sums(LossOutput(loss=tf.zeros([0]), metrics=metrics, penalty=5.0))
    assert (objective, weight) == (0.0, 0.0)
    assert {n: float(s.value) for n, s in stats.items()} == {
        "loss": 0.0,
        "hits": 0.0,
        "most": -math.inf,
        "least": math.inf,
        "all": 0.0,
    }


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_the_penalty_is_there_once_after_the_division(rows: int) -> None:
    objective, weight, stats = sums(LossOutput(loss=tf.fill([rows], 2.0), penalty=0.9))
    assert objective / weight == pytest.approx(2.9, rel=1e-6)
    assert mean(stats["loss"]) == pytest.approx(2.9, rel=1e-6)


def test_the_penalty_does_not_depend_on_the_weights() -> None:
    objective, weight, _ = sums(LossOutput(loss=tf.constant([2.0, 2.0]), weight=tf.constant([0.25, 0.5]), penalty=1.0))
    assert weight == 0.75
    assert objective / weight == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: tf.DType) -> None:
    # 4096 losses of 1.0: float16 sums would stick at 2048, bfloat16 at 256.
    objective, weight, _ = local_sums(LossOutput(loss=tf.ones([4096], dtype), penalty=tf.constant(0.5, dtype)))
    assert objective.dtype == weight.dtype == tf.float32
    assert (float(objective), float(weight)) == (4096 * 1.5, 4096.0)


def test_float64_stays_float64_and_integers_become_float32() -> None:
    objective, weight, stats = local_sums(LossOutput(loss=tf.constant([1.0], tf.float64), metrics={"n": Sum([3])}))
    assert objective.dtype == weight.dtype == tf.float64
    assert stats["n"].value.dtype == tf.float32


def test_a_metric_is_weighted_like_the_loss() -> None:
    output = LossOutput(
        loss=tf.constant([0.0, 0.0, 0.0]), weight=tf.constant([1.0, 3.0, 0.0]), metrics={"hit": [True, False, True]}
    )
    assert mean(sums(output)[2]["hit"]) == 0.25


def test_a_pair_has_a_weight_of_its_own() -> None:
    value, weight = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[1.0, 1.0], [0.0, 2.0]])
    output = LossOutput(loss=tf.zeros([2]), weight=tf.zeros([2]), metrics={"m": (value, weight)})
    assert mean(sums(output)[2]["m"]) == (1 + 2 + 8) / 4


def test_a_pair_without_weight_counts_its_elements() -> None:
    output = LossOutput(loss=tf.zeros([2]), weight=tf.zeros([2]), metrics={"m": (tf.constant([1.0, 4.0]), None)})
    assert mean(sums(output)[2]["m"]) == 2.5


def test_named_reductions_do_what_they_are_named() -> None:
    value = tf.constant([[1, -7], [3, 2]])
    metrics = {"sum": Sum(value), "max": Max(value), "min": Min(value)}
    stats = sums(LossOutput(loss=tf.zeros([2]), metrics=metrics))[2]
    assert {n: (s.kind, float(s.value)) for n, s in stats.items() if n != "loss"} == {
        "sum": ("sum", -1.0),
        "max": ("max", 3.0),
        "min": ("min", -7.0),
    }


@pytest.mark.parametrize(
    ("output", "parts"),
    [
        (tf.constant([1.0]), ["EagerTensor", "LossOutput"]),
        (LossOutput(loss=tf.constant(1.0)), ["scalar loss", "[batch]", "reduction=None"]),
        (LossOutput(loss=1.0), ["scalar loss"]),
        (LossOutput(loss=tf.zeros([2, 2]), weight=tf.ones([2])), ["(2,)", "(2, 2)", "same rank"]),
        (LossOutput(loss=tf.zeros([2]), weight=tf.ones([2, 1])), ["(2, 1)", "(2,)", "same rank"]),
        (LossOutput(loss=tf.zeros([2]), penalty=tf.zeros([2])), ["penalty", "(2,)", "scalar"]),
        (LossOutput(loss=tf.zeros([2]), metrics={"m": 1.0}), ["'m'", "scalar", "Sum, Max or Min"]),
        (LossOutput(loss=tf.zeros([2]), metrics={"m": (tf.zeros([2, 2]), tf.ones([2]))}), ["metric 'm'", "same rank"]),
    ],
)
def test_what_breaks_the_rules_is_refused_with_the_cure(output: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        local_sums(output)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_names_of_the_frameworks_figures_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'"):
        local_sums(LossOutput(loss=tf.zeros([2]), metrics={name: Sum(tf.zeros([2]))}))


def test_every_figure_of_a_record_is_a_reserved_name() -> None:
    assert {"step", "phase", "time", "loss", "learning_rate", "examples_per_second", "input_wait"} <= RESERVED


def test_a_step_may_return_sums_a_loss_output_or_named_figures() -> None:
    stats = {"loss": Stat("mean", tf.constant(6.0), tf.constant(3.0))}
    sums_ = StepSums(gradients=[], weight=tf.constant(3.0), stats=stats, variables=[])
    assert as_stats(sums_, "train_step") == stats
    assert mean(as_stats(LossOutput(loss=tf.constant([1.0, 3.0])), "eval_step")["loss"]) == 2.0
    figures = as_stats({"a": (tf.constant([1.0, 2.0]), tf.constant([1.0, 1.0, 2.0])), "b": Max([1, 5])}, "train_step")
    assert mean(figures["a"]) == 0.75  # a pair of sums; what is not summed yet is summed
    assert (figures["b"].kind, float(figures["b"].value)) == ("max", 5.0)


@pytest.mark.parametrize("output", [None, tf.constant(1.0), {"a": tf.constant(1.0)}, {"a": 1.0}, {"a": (1, 2, 3)}])
def test_a_figure_that_does_not_name_its_reduction_is_refused(output: Any) -> None:
    with pytest.raises(ConfigError, match="train_step returned"):
        as_stats(output, "train_step")


def test_a_layout_puts_figures_back_as_python_floats_under_their_names() -> None:
    stats = {
        "loss": Stat("mean", tf.constant(6.0), tf.constant(4.0)),
        "most": Stat("max", tf.constant(-2.0)),
        "hits": Stat("sum", tf.constant(5.0)),
        "least": Stat("min", tf.constant(-9.0)),
        "rate": Stat("last", tf.constant(0.5)),
        "void": Stat("mean", tf.constant(0.0), tf.constant(0.0)),
    }
    layout = StatLayout(stats)
    vectors = layout.vectors(stats)
    assert all(v.dtype == tf.float64 for v in vectors)
    figures = layout.figures([v.numpy() for v in vectors])
    assert math.isnan(figures.pop("void"))  # a mean over no weight is not 0
    assert figures == {"loss": 1.5, "most": -2.0, "hits": 5.0, "least": -9.0, "rate": 0.5}
    assert all(type(v) is float for v in figures.values())
    assert list(layout.figures([v.numpy() for v in vectors])) == list(stats)


def test_sums_of_many_steps_are_added_in_float64() -> None:
    # 2**24 + 1 is not a float32: a counter of examples kept in float32 would stand still there.
    stats = {"n": Stat("sum", tf.constant(2.0**24))}
    layout = StatLayout(stats)
    total = layout.vectors(stats)[0] + layout.vectors({"n": Stat("sum", tf.constant(1.0))})[0]
    assert layout.figures([total.numpy(), np.zeros(0), np.zeros(0), np.zeros(0)]) == {"n": 2**24 + 1}
