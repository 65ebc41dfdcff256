"""Operations counted in graphs are those of hand counts; rates, shares of the peak and percentiles follow by hand."""

from __future__ import annotations

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, Trainer
from framework.monitor import peaks
from framework.monitor.flops import Uncounted, count
from framework.monitor.throughput import Throughput
from input_pipelines import from_arrays
from models.language_model import LanguageModel, LanguageShape
from models.resnet import cifar_resnet
from tests.helpers import records, settings


def counted(function: Any, *specs: tf.TensorSpec) -> float:
    return count(tf.function(function, autograph=False).get_concrete_function(*specs).graph)


def spec(*shape: int | None, dtype: tf.DType = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype)


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda a, b: tf.matmul(a, b, transpose_a=True), ([5, 3], [5, 7]), 2 * 3 * 5 * 7),
        (lambda a, b: tf.matmul(a, b, transpose_b=True), ([4, 2, 3, 5], [4, 2, 7, 5]), 2 * 8 * 3 * 5 * 7),
        (lambda a, b: tf.matmul(a, b), ([4, 3, 5], [5, 7]), 2 * 4 * 3 * 5 * 7),
        (lambda a, b: tf.einsum("bqd,bkd->bqk", a, b), ([2, 3, 5], [2, 4, 5]), 2 * 2 * 3 * 4 * 5),
        (lambda a, b: tf.einsum("...ij,jk->...ik", a, b), ([2, 6, 3, 5], [5, 7]), 2 * 12 * 3 * 5 * 7),
        (lambda x, f: tf.nn.conv2d(x, f, 2, "SAME"), ([2, 8, 8, 3], [3, 3, 3, 16]), 2 * (2 * 4 * 4 * 16) * 27),
        # Two groups: each output channel sees half of the input's.
        (lambda x, f: tf.nn.conv2d(x, f, 1, "SAME"), ([2, 8, 8, 6], [3, 3, 3, 16]), 2 * (2 * 8 * 8 * 16) * 27),
        (
            lambda x, f: tf.nn.depthwise_conv2d(x, f, [1, 1, 1, 1], "VALID"),
            ([2, 8, 8, 3], [3, 3, 3, 2]),
            2 * (2 * 6 * 6 * 6) * 9,
        ),
        (lambda x, f: tf.nn.conv3d(x, f, [1] * 5, "SAME"), ([1, 4, 4, 4, 2], [3, 3, 3, 2, 5]), 2 * (64 * 5) * 54),
        (lambda a, b: a + b, ([3, 3], [3, 3]), 0),
    ],
)
def test_products_by_hand(function: Any, shapes: Any, expected: float) -> None:
    assert counted(function, *(spec(*shape) for shape in shapes)) == expected


def test_gradients_of_a_convolution_are_as_large_as_the_convolution() -> None:
    def both(x: tf.Tensor, f: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, f])
            y = tf.nn.conv2d(x, f, 2, "SAME")
        return tape.gradient(y, [x, f])

    once = 2 * (2 * 4 * 4 * 16) * 27
    # The output itself is in the graph too, but nobody reads it.
    assert counted(both, spec(2, 8, 8, 3), spec(3, 3, 3, 16)) == 2 * once


def test_loops_count_their_steps_and_branches_the_larger_side() -> None:
    def loop(a: tf.Tensor) -> Any:
        return tf.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x @ a), (tf.constant(0), a))[1]

    def branch(a: tf.Tensor) -> Any:
        return tf.cond(a[0, 0] > 0.0, lambda: a @ a @ a, lambda: a @ a)

    one = 2 * 4**3
    assert counted(loop, spec(4, 4)) == 5 * one
    assert counted(branch, spec(4, 4)) == 2 * one
    assert counted(tf.function(lambda a: tf.function(lambda x: x @ x)(a) @ a), spec(4, 4)) == 2 * one


def test_a_shape_that_is_not_known_is_no_guess() -> None:
    with pytest.raises(Uncounted, match="drop_remainder"):
        counted(lambda a, b: tf.matmul(a, b), spec(None, 3), spec(3, 7))


def gradients_of(model: Any, loss: Any, *specs: tf.TensorSpec) -> float:
    def step(*inputs: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loss(model(inputs[0], training=True)))
        return tape.gradient(value, model.trainable_variables)

    return counted(step, *specs)


def test_resnet20_by_hand() -> None:
    batch = 8
    found = gradients_of(cifar_resnet(20), tf.square, spec(batch, 32, 32, 3))
    stem = 32 * 32 * 16 * 27
    first = 6 * 32 * 32 * 16 * (9 * 16)
    second = 16 * 16 * 32 * (9 * 16) + 5 * 16 * 16 * 32 * (9 * 32)
    third = 8 * 8 * 64 * (9 * 32) + 5 * 8 * 8 * 64 * (9 * 64)
    forward = stem + first + second + third + 64 * 10
    # Backward is twice the forward pass, less the gradient of the pixels.
    assert found == 2 * batch * (3 * forward - stem)


def test_a_transformer_by_hand() -> None:
    batch, shape = 4, LanguageShape(vocabulary=256, length=32, width=64, layers=2, heads=4)
    found = gradients_of(LanguageModel(shape), tf.square, spec(batch, 32, dtype=tf.int32))
    places, w = batch * shape.length, shape.width
    products = 2 * places * (12 * w * w)  # query, key and value; out; two of the perceptron
    attention = 2 * (2 * batch * shape.length**2 * w)
    forward = shape.layers * (products + attention) + 2 * places * w * shape.vocabulary
    assert found == pytest.approx(3 * forward, rel=0.05)


class Perceptron(Trainer):
    def build_model(self) -> Any:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(3)])

    def train_data(self) -> Any:
        return from_arrays(np.ones((32, 6), np.float32))

    def units_per_example(self) -> Any:
        return {"words": 4.0}

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.reduce_sum(model(batch, training=training), 1))


def test_a_run_of_replicas_and_micro_batches_tells_operations_and_their_share_of_the_peak(
    tmp_path: pathlib.Path,
) -> None:
    config = settings(
        num_replicas=2, accumulate_steps=2, global_batch_size=16, peak_tflops=1e-6, run_dir=str(tmp_path), train_steps=6
    )
    results = Perceptron(config).train()
    flops = 2 * 16 * (2 * (6 * 5) + 3 * (5 * 3))  # 6 x 5 has no gradient of its input
    for record in records(tmp_path)[1:]:  # the first step traces and has no rate
        assert record["tflops"] == pytest.approx(flops / record["step_ms"] / 1e9, rel=1e-9)
        assert record["mfu"] == pytest.approx(record["tflops"] / 2e-6, rel=1e-9)  # two devices
        assert record["words_per_second"] == pytest.approx(4.0 * record["examples_per_second"])
    assert set(results) == {"loss"}
    speed = json.loads((tmp_path / "summary.json").read_text())["throughput"]
    assert (speed["step_flops"], speed["peak_source"]) == (flops, "--peak_tflops")
    assert 0.0 < speed["step_ms"]["p50"] <= speed["step_ms"]["p90"] <= speed["step_ms"]["max"]


def test_percentiles_count_a_loop_with_its_steps() -> None:
    speed = Throughput(Perceptron(settings()), lambda: None)
    assert speed.step_times() == {}
    for steps, seconds in [(80, 0.080), (15, 0.030), (5, 0.050)]:  # 1, 2 and 10 ms a step
        speed.add(SimpleNamespace(steps=steps, seconds=seconds))  # type: ignore[arg-type]
    assert speed.step_times() == pytest.approx({"p50": 1.0, "p90": 2.0, "p99": 10.0, "max": 10.0})
    assert speed.figures({"loss": 1.0}) == {}
    assert "not measured: no step was traced" in speed.summary()["step_flops"]


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "mixed_bfloat16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 156.0),
        ("NVIDIA H100 80GB HBM3", "mixed_float16", 989.4),
        ("NVIDIA H100 PCIe", "mixed_float16", 756.0),
        ("Tesla T4", "float32", 8.1),
        ("Tesla T4", "mixed_bfloat16", None),
        ("NVIDIA GeForce GTX 1080", "float32", None),
    ],
)
def test_peaks_of_known_devices(name: str, precision: str, expected: float | None) -> None:
    found = peaks.known_peak(name, precision, tf32=True)
    assert (found and found[0]) == expected
    assert found is None or "data sheet" in found[1]


def test_float32_without_tf32_has_its_own_peak() -> None:
    assert peaks.known_peak("NVIDIA A100-PCIE-40GB", "float32", tf32=False) == (19.5, "NVIDIA A100 data sheet, float32")


def test_a_measured_peak_is_printed_as_the_flag_to_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert peaks.main(["--device=CPU:0", "--size=64", "--seconds=0.01"]) == 0
    printed = capsys.readouterr().out
    assert "CPU:0, float32 [64, 64]: " in printed and "pass --peak_tflops=" in printed


def test_metrics_may_not_take_the_names() -> None:
    from framework.step.values import local_sums

    with pytest.raises(ConfigError, match="mfu"):
        local_sums(LossOutput(loss=tf.ones([2]), metrics={"mfu": tf.ones([2])}))
