"""The task ``language`` from its command line: it learns, on any number of replicas alike, from text or tokens."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import train
from framework import ConfigError, LockstepError, RunConfig
from input_pipelines.pack import main as pack
from models.language_task import Language
from tests.helpers import column, records, settings

SIZES = {"length": 32, "width": 32, "layers": 1, "heads": 2}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]


@pytest.fixture
def texts(tmp_path: pathlib.Path) -> pathlib.Path:
    """Three documents that count, and so are easy to learn a little of."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text(" ".join(f"{n} and {n + 1}," for n in range(i * 100, i * 100 + 90)))
    return folder


def command(run_dir: pathlib.Path, *arguments: str) -> int:
    return train.main(
        [
            "train.py",
            "--task=language",
            "--device=cpu",
            "--num_replicas=1",
            "--progress=off",
            "--notensorboard",
            f"--run_dir={run_dir}",
            *SMALL,
            *arguments,
        ]
    )


def trainer(folder: pathlib.Path | str, **changes: Any) -> Language:
    options = {name: changes.pop(name) for name in [*changes] if name not in RunConfig.__dataclass_fields__}
    return Language(settings(**changes), data_dir=str(folder), **{**SIZES, **options})


def test_the_command_line_trains_on_the_standard_library_and_the_loss_falls(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    assert command(run, "--mode=train", "--train_steps=30", "--log_every=10", "--warmup_steps=5") == 0
    first, _, last = column(run, "loss")
    assert math.log(257) * 1.05 > first > last + 0.3
    record = records(run)[-1]
    assert 0.05 < record["accuracy"] < 1.0
    # In nats a token, without the rare ends of documents nearly the same in bits a byte.
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / math.log(2), rel=0.02)


def test_text_of_a_folder_is_split_by_file_and_evaluated(texts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    assert command(run, f"--data_dir={texts}", "--train_steps=4", "--warmup_steps=1") == 0
    [record] = records(run, "eval")
    size = len((texts / "2.txt").read_bytes())
    assert record["examples"] == math.ceil(size / 32)
    (texts / "1.txt").unlink()
    (texts / "2.txt").unlink()
    assert trainer(texts).eval_data() is None  # one file is all for training
    assert trainer(texts).train_data().size == math.ceil(len((texts / "0.txt").read_bytes()) / 32)


def test_packed_files_are_read_with_the_vocabulary_they_say(texts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    packed, run = tmp_path / "packed", tmp_path / "run"
    packed.mkdir()
    for split in ("train", "eval"):
        assert pack([str(texts), str(packed / f"{split}.bin"), f"--split={split}"]) == 0
    assert command(run, f"--data_dir={packed}", "--train_steps=3", "--warmup_steps=1") == 0
    [record] = records(run, "eval")
    assert record["examples"] == len((texts / "2.txt").read_bytes()) // 32
    assert "bits_per_byte" in record
    (packed / "eval.bin").unlink()
    assert trainer(packed).eval_data() is None
    side = packed / "train.json"
    side.write_text(side.read_text().replace("257", "300"))
    other = trainer(packed)
    assert other.model.shape.vocabulary == 300
    assert set(other.train()) >= {"loss", "accuracy"} and "bits_per_byte" not in other.train(1)


def test_documents_of_a_token_file_are_kept_apart_by_their_ends(texts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert pack([str(texts), str(tmp_path / "train.bin")]) == 0
    task, seen = trainer(tmp_path, separate_documents=True), []

    def model(ids: Any, *, segments: Any, training: bool) -> tf.Tensor:
        seen.append(segments.numpy().tolist())
        return tf.zeros([*ids.shape, 257])

    ids = tf.constant([[97, 256, 98, 99, 256]])
    assert task.compute_loss(model, (ids, ids), training=True).weight is None
    assert seen == [[[1, 1, 2, 2, 2]]]
    side = tmp_path / "train.json"
    side.write_text(side.read_text().replace("256", "null"))
    with pytest.raises(ConfigError, match=r"train\.json has no end_of_document"):
        task.compute_loss(model, (ids, ids), training=True)


@pytest.mark.parametrize("options", [{"layers": 2, "recompute": True}, {"rope": False, "separate_documents": True}])
def test_1_and_2_replicas_have_equal_losses(
    texts: pathlib.Path, tmp_path: pathlib.Path, options: dict[str, Any]
) -> None:
    losses = []
    for replicas in (1, 2):
        run = tmp_path / f"{replicas}"
        # A batch of 5 is 3 and 2; weights differ where documents end.
        changes = {"global_batch_size": 5, "train_steps": 6, "learning_rate": 1e-2, "clip_global_norm": 1.0}
        trainer(texts, num_replicas=replicas, run_dir=str(run), **changes, **options).train(evaluate=False)
        losses.append(column(run, "loss"))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert len(losses[0]) == 6 and losses[0][-1] < losses[0][0] - 0.3


@pytest.mark.slow
def test_micro_batches_under_xla_give_the_same_losses(texts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    losses = []
    for i, changes in enumerate(({}, {"accumulate_steps": 3, "jit": "on"})):
        run = tmp_path / f"{i}"
        trainer(texts, run_dir=str(run), global_batch_size=6, train_steps=3, **changes).train(evaluate=False)
        losses.append(column(run, "loss"))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_figures_by_hand(texts: pathlib.Path) -> None:
    """Equal logits: ln 257 nats a token; the end of a document is learnt but is no byte."""
    task = trainer(texts)
    batch = {
        "inputs": tf.constant([[97, 98, 256, 120]]),
        "targets": tf.constant([[98, 256, 120, 256]]),
        "weights": tf.constant([[1.0, 1.0, 0.0, 0.0]]),
        "segments": tf.constant([[1, 1, 1, 2]]),
    }
    seen = []

    def model(ids: Any, *, segments: Any, training: bool) -> tf.Tensor:
        seen.append((segments, training))
        return tf.one_hot(tf.zeros_like(ids), 257) * 0.0

    output = task.compute_loss(model, batch, training=True)
    assert seen == [(None, True)]
    np.testing.assert_allclose(output.loss, [[math.log(257)] * 4], rtol=1e-6)
    assert output.weight is batch["weights"]
    bits, weight = output.metrics["bits_per_byte"]
    np.testing.assert_allclose(bits, [[math.log2(257)] * 4], rtol=1e-6)
    assert weight.numpy().tolist() == [[1, 0, 0, 0]]
    assert output.metrics["accuracy"].numpy().tolist() == [[False] * 4]


def test_it_writes_on_from_a_prompt(texts: pathlib.Path) -> None:
    task = trainer(texts, ema_decay=0.5)
    with pytest.raises(LockstepError, match="not trained"):
        task.sample("1")
    task.train(1, evaluate=False)
    text = task.sample("1 and é", steps=5, seed=1)
    assert text.startswith("1 and é") and text == task.sample("1 and é", steps=5, seed=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "width=32 with heads=3"),
        ({"data_dir": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_settings_that_cannot_work_end_the_command_with_2(
    tmp_path: pathlib.Path, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--{name}={value}" for name, value in options.items()]
    assert command(tmp_path / "run", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_empty_folder_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="no file that fits"):
        trainer(tmp_path).train_data()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_recipe_learns_python(tmp_path: pathlib.Path, run_cli: Callable[..., Any]) -> None:
    """300 steps of the recipe's size; bytes one by one, by their frequency alone, take 4.5 bits."""
    run = tmp_path / "run"
    done = run_cli(
        ["--task=language", f"--run_dir={run}", "--train_steps=300", "--device=cpu", "--num_replicas=1"], timeout=580
    )
    assert done.code == 0, done.stderr[-2000:]
    [record] = records(run, "eval")
    assert record["bits_per_byte"] < 3.2


def test_an_export_reads_texts_and_ids_alike(tmp_path: pathlib.Path, texts: pathlib.Path) -> None:
    made = trainer(texts, run_dir=tmp_path / "run", train_steps=2)
    made.train(evaluate=False)
    loaded = tf.saved_model.load(made.export() + "/saved_model")
    text = "1 and 2, 2 and 3, 3 and 4, 4 and 5, 5 and"
    ids = np.frombuffer(text.encode()[-32:], np.uint8)[None].astype(np.int32)
    logits = loaded.signatures["serving_default"](inputs=tf.constant(ids))["outputs"].numpy()[0, -1]
    short = loaded.signatures["serving_default"](inputs=tf.constant(np.pad(ids[:, -3:], [(0, 0), (0, 29)])))["outputs"]
    found = loaded.signatures["text"](text=tf.constant([text, text[-3:], ""]))
    np.testing.assert_allclose(found["logits"][0], logits, atol=1e-5)
    np.testing.assert_allclose(found["logits"][1], short[0, 2], atol=1e-5)
    assert found["next"].numpy()[0] == logits.argmax() and np.isfinite(found["logits"].numpy()).all()
