"""The ranking model: its dot products, its sparse gradient, and a task that learns from a table on disk."""

from __future__ import annotations

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import train
from framework import ConfigError
from models.ranking import PairwiseDots, ranking
from models.ranking_task import Ranking
from tests.helpers import column, records, settings


def test_the_dots_are_those_of_all_pairs_once() -> None:
    vectors = np.random.default_rng(0).normal(size=[3, 4, 5]).astype(np.float32)
    expected = [[v[i] @ v[j] for i in range(4) for j in range(i)] for v in vectors]
    np.testing.assert_allclose(PairwiseDots()(vectors), expected, rtol=1e-5)


def test_a_category_has_rows_of_its_own_and_their_gradient_is_sparse() -> None:
    model = ranking(numbers=2, buckets=[3, 5], width=4, bottom=(6,), top=(7,))
    table = model.get_layer("categories").embeddings
    assert table.shape == (8, 4)
    with tf.GradientTape() as tape:
        logits = model([np.ones([2, 2], np.float32), np.array([[2, 0], [2, 4]])])
    assert logits.shape == [2] and logits.dtype == tf.float32
    gradient = tape.gradient(logits, table.value)
    assert isinstance(gradient, tf.IndexedSlices)
    assert sorted(gradient.indices.numpy().reshape(-1).tolist()) == [2, 2, 3, 7]  # 3 rows of the first come first


def test_under_half_precision_the_table_and_the_logits_stay_float32() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = ranking(numbers=2, buckets=[3, 5], width=4)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.get_layer("top_0").compute_dtype == "bfloat16"
    with tf.GradientTape() as tape:
        logits = model([np.ones([2, 2], np.float32), np.array([[2, 0], [2, 4]])])
    assert logits.shape == [2] and logits.dtype == tf.float32
    assert isinstance(tape.gradient(logits, model.get_layer("categories").embeddings.value), tf.IndexedSlices)


def write_table(path: pathlib.Path, lines: int, seed: int) -> None:
    """Clicks that the first category decides, for nine shown of ten."""
    numbers = np.random.default_rng(seed)
    with path.open("w") as out:
        for _ in range(lines):
            kind = int(numbers.integers(0, 20))
            clicked = int((kind < 10) == (numbers.random() < 0.9))
            counts = [str(int(n)) if n else "" for n in numbers.integers(0, 50, 13)]
            rest = [f"{int(n):08x}" for n in numbers.integers(0, 30, 25)]
            out.write("\t".join([str(clicked), *counts, f"{kind:08x}", *rest]) + "\n")


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    made = tmp_path / "tables"
    made.mkdir()
    write_table(made / "train.tsv", 3000, 0)
    write_table(made / "eval.tsv", 500, 1)
    return made


def test_the_command_line_learns_from_a_table(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    arguments = [f"--run_dir={run}", f"--data_dir={folder}", "--device=cpu", "--num_replicas=1", "--progress=off"]
    shape = ["--buckets=50", "--global_batch_size=100", "--train_epochs=6", "--log_every=30", "--learning_rate=0.01"]
    assert train.main(["train.py", "--task=ranking", "--notensorboard", *arguments, *shape]) == 0
    losses = column(run, "loss")
    assert losses[-1] < losses[0] - 0.1
    [record] = records(run, "eval")
    assert record["examples"] == 500 and record["accuracy"] > 0.75


def test_1_and_2_replicas_have_equal_losses_with_bad_lines_and_an_uneven_batch(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    table = folder / "train.tsv"
    rows = table.read_text().split("\n")
    rows[5] = "spoilt"
    table.write_text("\n".join(rows[:40]) + "\n")
    losses = []
    for replicas in (1, 2):
        run = tmp_path / f"{replicas}"
        config = settings(num_replicas=replicas, run_dir=str(run), global_batch_size=13, train_steps=6)
        Ranking(config, data_dir=str(folder), buckets=50, skip_bad_examples=1).train(evaluate=False)
        losses.append(column(run, "loss"))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_it_needs_a_folder_with_a_table(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"data_dir is empty.*train\.tsv"):
        Ranking(settings())
    with pytest.raises(ConfigError, match=r"train\.tsv does not exist"):
        Ranking(settings(), data_dir=str(tmp_path)).train_data()
    (tmp_path / "train.tsv").write_text("1\t2\n")
    with pytest.raises(ConfigError, match="2 fields between tabs but there must be 40"):
        Ranking(settings(), data_dir=str(tmp_path)).train_data()
