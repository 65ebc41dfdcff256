"""Residual networks: their size, their start, and training from the command line on files of CIFAR-10's format."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import train
from framework import ConfigError
from input_pipelines import images
from models.cifar_task import Cifar10
from models.imagenet_task import ImageNet
from models.resnet import cifar_resnet, kernel_penalty, resnet
from tests.helpers import assert_copies_equal, column, settings
from tests.input_pipelines.made_files import image_example, jpeg, write_cifar10, write_imagenet


def trainable(model: keras.Model) -> int:
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def cifar_parameters(n: int) -> int:
    """By hand: kernels of 3 x 3, a scale and an offset for each channel behind each, and the last layer."""
    kernels = 3 * 16 + 2 * n * 16 * 16 + 16 * 32 + (2 * n - 1) * 32 * 32 + 32 * 64 + (2 * n - 1) * 64 * 64
    return 9 * kernels + 2 * (16 + 2 * n * (16 + 32 + 64)) + 64 * 10 + 10


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (56, 853_018)])
def test_a_cifar_resnet_has_the_parameters_of_the_paper(depth: int, parameters: int) -> None:
    """Table 6 of He et al. 2015: 0.27 and 0.85 million."""
    assert cifar_parameters((depth - 2) // 6) == parameters
    assert trainable(cifar_resnet(depth)) == parameters


def test_resnet_110_has_1_7_million_parameters() -> None:
    assert round(cifar_parameters(18) / 1e6, 1) == 1.7


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
def test_an_imagenet_resnet_has_the_parameters_of_its_peers(depth: int, parameters: int) -> None:
    model = resnet(depth)
    assert trainable(model) == parameters
    assert model.output_shape == (None, 1000)
    sizes = [model.get_layer(f"stage{i}_block1_add").output.shape[1] for i in (1, 2, 3, 4)]
    assert sizes == [56, 28, 14, 7]


def test_every_block_of_an_imagenet_resnet_starts_as_its_shortcut() -> None:
    model = resnet(18, num_classes=5, image_size=32)
    probe = keras.Model(model.input, [model.get_layer(f"stage1_block{i}_add").output for i in (1, 2)])
    first, second = probe(np.random.default_rng(0).normal(size=[2, 32, 32, 3]).astype(np.float32))
    np.testing.assert_array_equal(second, np.maximum(first, 0.0))
    assert np.abs(first).max() > 0.0


def test_a_shortcut_of_a_cifar_resnet_takes_every_second_pixel_and_adds_empty_channels() -> None:
    model = cifar_resnet(8)
    joined = model.get_layer("stage2_block1_add")
    probe = keras.Model(model.input, [model.get_layer("stage1_block1_add").output, *joined.input, joined.output])
    x = np.random.default_rng(0).normal(size=[2, 32, 32, 3]).astype(np.float32)
    before, shortcut, residual, after = (np.asarray(t) for t in probe(x))
    expected = np.zeros([2, 16, 16, 32], np.float32)
    expected[..., 8:24] = np.maximum(before, 0.0)[:, ::2, ::2]
    np.testing.assert_array_equal(shortcut, expected)
    np.testing.assert_allclose(after, shortcut + residual, rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: cifar_resnet(21), lambda: cifar_resnet(2), lambda: resnet(49)])
def test_a_depth_that_is_none_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="depth="):
        make()


def test_the_penalty_is_half_the_squares_of_kernels_only() -> None:
    model = cifar_resnet(8)
    kernels = [w for w, v in zip(model.get_weights(), model.weights) if v.path.endswith("kernel")]
    assert len(kernels) == 8
    half = sum(np.square(k.astype(np.float64)).sum() for k in kernels) / 2
    assert float(kernel_penalty(model, 0.01)) == pytest.approx(0.01 * half, rel=1e-5)


# --- training --------------------------------------------------------------------------------------------------------


def run(data: pathlib.Path, run_dir: pathlib.Path, *flags: str) -> None:
    quiet = ["--progress=off", "--notensorboard", "--device=cpu", f"--run_dir={run_dir}", f"--data_dir={data}"]
    assert train.main(["train.py", "--task=cifar10", *quiet, *flags]) == 0


SHORT = ("--depth=8", "--train_steps=30", "--global_batch_size=16", "--learning_rate=0.05", "--log_every=5")


def test_the_loss_falls_from_the_command_line_on_two_replicas(tmp_path: pathlib.Path) -> None:
    write_cifar10(tmp_path / "data", each=40, test=30)
    run(tmp_path / "data", tmp_path / "run", *SHORT, "--num_replicas=2")
    losses = column(tmp_path / "run", "loss")
    assert len(losses) == 6 and np.all(np.isfinite(losses))
    assert losses[-1] < 0.6 * losses[0]
    assert column(tmp_path / "run", "accuracy")[-1] > 0.6
    assert column(tmp_path / "run", "examples", "eval") == [30]


def test_without_a_data_dir_the_command_line_says_what_is_missing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = train.main(["train.py", "--task=cifar10", "--progress=off", "--device=cpu", f"--run_dir={tmp_path / 'r'}"])
    assert code == 2
    assert "data_dir is empty but it must name a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_two_replicas_and_a_resume_in_mid_epoch_equal_one_unbroken_replica(tmp_path: pathlib.Path) -> None:
    """Statistics are synchronised; with other crops or mirrors the losses would differ. Batches are uneven."""
    write_cifar10(tmp_path, each=6, test=4)
    options: dict[str, Any] = {"data_dir": str(tmp_path), "depth": 8, "sync_batch_norm": True}
    usual: dict[str, Any] = {"global_batch_size": 7, "optimizer": "sgd", "learning_rate": 0.02, "momentum": 0.9}
    for run_dir, steps, replicas in (("one", 4, 1), ("two", 2, 2), ("two", 4, 2)):
        config = settings(run_dir=tmp_path / run_dir, train_steps=steps, num_replicas=replicas, **usual)
        trainer = Cifar10(config, **options)
        trainer.train(evaluate=False)
        assert_copies_equal(trainer)
    np.testing.assert_allclose(column(tmp_path / "two", "loss"), column(tmp_path / "one", "loss"), rtol=1e-4)


@pytest.mark.slow
def test_the_imagenet_task_trains_and_evaluates_on_records_with_one_bad_image(tmp_path: pathlib.Path) -> None:
    encoded = [b"no image" if i == 3 else jpeg(i) for i in range(8)]
    write_imagenet(tmp_path, [image_example(e, i + 1) for i, e in enumerate(encoded)])
    write_imagenet(tmp_path, [image_example(jpeg(i), i + 1) for i in range(3)], shards=1, split="validation")
    config = settings(run_dir=tmp_path / "run", train_steps=2, optimizer="sgd", learning_rate=0.01)
    trainer = ImageNet(
        config, data_dir=str(tmp_path), depth=18, image_size=32, skip_bad_examples=1, index_file=str(tmp_path / "index")
    )
    result = trainer.train()
    assert result["eval/examples"] == 3 and np.isfinite(result["eval/loss"])
    # A last layer of small weights makes all classes about equally likely: log 1000, and the penalty.
    losses = column(config.run_dir, "loss")
    penalty = float(kernel_penalty(trainer.model, 1e-4))
    assert losses[0] == pytest.approx(np.log(1000.0) + penalty, rel=0.05)
    assert (tmp_path / "index-train.npz").exists() and (tmp_path / "index-validation.npz").exists()
    # Exported, it takes files as they are: decoded as in evaluation, normalised, as probabilities.
    served = tf.saved_model.load(trainer.export() + "/saved_model").signatures
    found = served["encoded"](encoded=tf.constant([jpeg(1), jpeg(2)]))["outputs"].numpy()
    pixels = tf.stack([images.decode(jpeg(i), tf.zeros([2], tf.int64), size=32, training=False) for i in (1, 2)])
    wanted = tf.nn.softmax(trainer.model(images.normalize(pixels), training=False)).numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_allclose(served["serving_default"](inputs=pixels)["outputs"].numpy(), wanted, atol=1e-6)


@pytest.mark.slow
def test_resnet_20_learns_ten_colours_in_some_hundred_steps(tmp_path: pathlib.Path) -> None:
    write_cifar10(tmp_path / "data", each=200, test=200)
    run(
        tmp_path / "data", tmp_path / "run", "--train_steps=300", "--global_batch_size=32", "--schedule=cosine",
        "--schedule_boundaries=", "--warmup_steps=50", "--log_every=50", "--eval_every=300",
    )  # fmt: skip
    losses = column(tmp_path / "run", "loss")
    assert losses[-1] < 0.2 * losses[0]
    assert column(tmp_path / "run", "accuracy", "eval")[-1] > 0.95


def test_a_model_under_half_precision_gives_float32_logits() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = cifar_resnet(8)
    finally:
        keras.config.set_dtype_policy("float32")
    logits = model(tf.zeros([1, 32, 32, 3]))
    assert logits.dtype == tf.float32
    assert model.get_layer("stem").compute_dtype == "bfloat16"
