"""Exports: what was trained on any number of replicas runs on one CPU in plain TensorFlow, and gives the same."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LockstepError, Signature, Trainer
from framework.predict import predict
from input_pipelines import digits
from models.digits_task import Digits
from tests.helpers import Toy, settings, tree

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMAGES = digits.load("test")[0][:100]


def trained(run_dir: pathlib.Path, task: type[Trainer] = Digits, **changes: Any) -> Trainer:
    config = settings(
        **{
            "run_dir": run_dir,
            "train_steps": 20,
            "global_batch_size": 96,
            "learning_rate": 2e-3,
            "log_every": 20,
            "num_replicas": 2,
            **changes,
        }
    )
    trainer = task(config)
    trainer.train(evaluate=False)
    return trainer


def in_fresh_process(export: str, images: np.ndarray, folder: pathlib.Path) -> np.ndarray:
    """Outputs of an export in a process that has nothing but TensorFlow and one CPU."""
    np.save(folder / "in.npy", images)
    script = (
        "import os, sys\n"
        "os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        "import numpy as np, tensorflow as tf\n"
        "loaded = tf.saved_model.load(sys.argv[1])\n"
        "out = loaded.signatures['serving_default'](inputs=tf.constant(np.load(sys.argv[2])))\n"
        "assert len(tf.config.list_logical_devices()) == 1\n"
        "np.save(sys.argv[3], out['outputs'].numpy())\n"
    )
    arguments = [export + "/saved_model", str(folder / "in.npy"), str(folder / "out.npy")]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=120, cwd=folder)
    return np.load(folder / "out.npy")


@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.slow), True])
def test_b28_c114_an_export_from_two_replicas_gives_the_same_in_a_fresh_process(
    tmp_path: pathlib.Path, inside: bool
) -> None:
    trainer = trained(tmp_path / "run")
    if inside:
        with trainer.strategy.scope():
            export = trainer.export()
    else:
        export = trainer.export()
    assert export == str(tmp_path / "run" / "export" / "step-00000020")
    wanted = trainer.model(IMAGES, training=False).numpy()
    found = in_fresh_process(export, IMAGES, tmp_path)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_array_equal(found.argmax(1), wanted.argmax(1))
    for file in pathlib.Path(export).rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"CPU:1" not in content and b"replica_1" not in content and b"MirroredVariable" not in content
    about = json.loads((pathlib.Path(export) / "export.json").read_text())
    assert (about["step"], about["signatures"]) == (20, {"serving_default": {"inputs": "float32 ['batch', 8, 8]"}})


def test_a_later_process_exports_the_newest_checkpoint_from_the_command_line(
    tmp_path: pathlib.Path, run_cli: Callable[..., Any]
) -> None:
    trainer = trained(tmp_path / "run", num_replicas=1)
    trainer_output = trainer.model(IMAGES, training=False).numpy()
    done = run_cli(
        ["--task=digits", "--mode=export", f"--run_dir={tmp_path}/run", f"--export_dir={tmp_path}/out", "--device=cpu"]
    )
    assert done.code == 0, done.stderr[-2000:]
    np.save(tmp_path / "in.npy", IMAGES)
    rows = list(predict(str(tmp_path / "out"), str(tmp_path / "in.npy"), batch_size=32))
    np.testing.assert_allclose([r["outputs"] for r in rows], trainer_output, atol=1e-5)


def test_an_export_is_of_the_average_where_there_is_one(tmp_path: pathlib.Path) -> None:
    trainer = trained(tmp_path / "run", ema_decay=0.9)
    with trainer.averaged_weights():
        wanted = trainer.model(IMAGES, training=False).numpy()
    plain = trainer.model(IMAGES, training=False).numpy()
    assert np.abs(wanted - plain).max() > 1e-3
    loaded = tf.saved_model.load(trainer.export() + "/saved_model")
    found = loaded.signatures["serving_default"](inputs=tf.constant(IMAGES))["outputs"].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_keras_file_loads_in_plain_keras(tmp_path: pathlib.Path) -> None:
    trainer = trained(tmp_path / "run", num_replicas=1)
    export = trainer.export(str(tmp_path / "out"), ["keras"])
    assert sorted(os.listdir(export)) == ["export.json", "model.keras"]
    loaded = keras.models.load_model(export + "/model.keras", safe_mode=True)
    np.testing.assert_allclose(loaded(IMAGES).numpy(), trainer.model(IMAGES, training=False).numpy(), atol=1e-6)


def test_a_litert_file_gives_the_same_within_1e_5(tmp_path: pathlib.Path) -> None:
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    trainer = trained(tmp_path / "run", num_replicas=1)
    export = trainer.export(str(tmp_path / "out"), ["saved_model", "tflite"])
    runner = litert.Interpreter(model_path=export + "/model.tflite").get_signature_runner("serving_default")
    found = runner(inputs=IMAGES)["outputs"]
    wanted = trainer.model(IMAGES, training=False).numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_array_equal(found.argmax(1), wanted.argmax(1))


class Decoded(Digits):
    """Also served on PNG files: pre-processing inside the export."""

    def signatures(self) -> Mapping[str, Signature]:
        def from_png(model: Any, inputs: Any) -> Any:
            decode = lambda png: tf.ensure_shape(tf.image.decode_png(png, channels=1)[..., 0], [8, 8])  # noqa: E731
            images = tf.map_fn(decode, inputs["png"], fn_output_signature=tf.uint8)
            logits = model(tf.cast(images, tf.float32), training=False)
            return {"label": tf.argmax(logits, -1), "logits": logits}

        png = Signature(spec={"png": tf.TensorSpec([None], tf.string)}, function=from_png)
        return {**super().signatures(), "png": png}


def test_b28_pre_processing_inside_gives_the_same(tmp_path: pathlib.Path) -> None:
    trainer = trained(tmp_path / "run", Decoded)
    export = trainer.export()
    loaded = tf.saved_model.load(export + "/saved_model")
    images = np.round(IMAGES[:10]).astype(np.uint8)
    files = tf.stack([tf.io.encode_png(image[..., None]) for image in images])
    found = loaded.signatures["png"](png=files)
    wanted = trainer.model(images.astype(np.float32), training=False).numpy()
    np.testing.assert_allclose(found["logits"], wanted, atol=1e-6)
    np.testing.assert_array_equal(found["label"], wanted.argmax(1))


class Measured(Digits):
    """A model that holds a Keras metric of its own."""

    def build_model(self) -> Any:
        model = super().build_model()
        model.my_metric = keras.metrics.Mean(name="seen")
        return model


def test_c116_a_metric_in_the_model_does_not_stand_in_the_way(tmp_path: pathlib.Path) -> None:
    export = trained(tmp_path / "run", Measured).export()
    loaded = tf.saved_model.load(export + "/saved_model")
    assert loaded.signatures["serving_default"](inputs=tf.constant(IMAGES))["outputs"].shape == (100, 10)


def test_c115_an_export_says_that_training_goes_on_from_checkpoints() -> None:
    assert "Training goes on from checkpoints, not from an export" in (Trainer.export.__doc__ or "")


@keras.saving.register_keras_serializable("tests")
class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of the user's."""

    def __call__(self, step: Any) -> Any:
        return 0.1 * tf.pow(0.5, tf.cast(step, tf.float32))

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError("nobody needs it")


class Signed(keras.optimizers.SGD):
    """An optimizer of the user's that cannot be rebuilt from a config."""

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError("nobody needs it")


@pytest.mark.parametrize("replicas", [1, 2])
def test_c117_a_users_optimizer_and_schedule_are_used_as_given_also_after_a_resume(
    tmp_path: pathlib.Path, replicas: int
) -> None:
    class Own(Toy):
        def build_optimizer(self) -> Any:
            return Signed(Halving())

    for name, parts in (("whole", [None]), ("cut", [2, None])):
        for steps in parts:
            trainer = Own(settings(run_dir=tmp_path / name, num_replicas=replicas, train_steps=4))
            trainer.train(steps)
    first, second = (tree(tmp_path / n / "checkpoints" / "step-00000004") for n in ("whole", "cut"))
    assert {n: c for n, (c, _) in first.items() if "data" in n} == {n: c for n, (c, _) in second.items() if "data" in n}


# --- refusals --------------------------------------------------------------------------------------------------------


def test_an_export_that_cannot_be_is_refused_and_writes_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="weights that were not trained"):
        Digits(settings(run_dir=tmp_path / "none")).export()
    trainer = trained(tmp_path / "run", num_replicas=1, train_steps=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        trainer.export(str(tmp_path / "full"))
    with pytest.raises(ConfigError, match=r"formats \['onnx'\] but they must be some of"):
        trainer.export(str(tmp_path / "new"), ["onnx"])
    assert tree(tmp_path) == before
    with pytest.raises(ConfigError, match="export_formats='saved_model,pickle'"):
        settings(export_formats="saved_model,pickle")
    with pytest.raises(ConfigError, match="how to call it for inference is not known"):
        weight = Toy(settings(run_dir=tmp_path / "toy"))
        weight.train()
        weight.export()


def test_a_model_that_differs_the_second_time_is_refused(tmp_path: pathlib.Path) -> None:
    class Changing(Digits):
        calls = 0

        def build_model(self) -> Any:
            type(self).calls += 1
            return keras.Sequential(
                [keras.Input((8, 8)), keras.layers.Flatten()] + [keras.layers.Dense(10) for _ in range(self.calls)]
            )

    trainer = trained(tmp_path / "run", Changing, num_replicas=1, train_steps=1)
    with pytest.raises(LockstepError, match="build_model made other variables the second time"):
        trainer.export()
    assert not (tmp_path / "run" / "export").exists() or not list((tmp_path / "run" / "export").iterdir())


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("in.jsonl", b"[[0]]\nnot json\n", "line 2: not JSON"),
        ("in.jsonl", b'{"other": 1}\n', "line 1 lacks inputs"),
        ("in.jsonl", b"[1, 2]\n", "does not fit the signature serving_default"),
        ("in.npy", b"\x93NUMPY", "cannot be read"),
        ("in.npy", b"", "cannot be read"),
        ("absent.npy", None, "cannot be read"),
    ],
)
def test_input_that_does_not_fit_is_refused(
    tmp_path: pathlib.Path, exported: str, name: str, content: bytes | None, says: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        list(predict(exported, str(path)))


def test_pickled_arrays_are_not_loaded(tmp_path: pathlib.Path, exported: str) -> None:
    np.save(tmp_path / "in.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        list(predict(exported, str(tmp_path / "in.npy")))


def test_a_directory_that_is_no_export_and_an_unknown_signature_are_refused(
    tmp_path: pathlib.Path, exported: str
) -> None:
    with pytest.raises(ConfigError, match="is not an export of this framework"):
        list(predict(str(tmp_path), "x.npy"))
    with pytest.raises(ConfigError, match="signature=other but the export has serving_default"):
        list(predict(exported, "x.npy", signature="other"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An export of a model after one step; made once."""
    return trained(tmp_path_factory.mktemp("exported"), num_replicas=1, train_steps=1).export()


def test_the_predict_command_writes_a_json_line_for_each_row(tmp_path: pathlib.Path, exported: str) -> None:
    lines = "".join(json.dumps(image.tolist()) + "\n" for image in IMAGES[:3])
    done = subprocess.run(
        [sys.executable, "-m", "framework.predict", exported, "-", "--batch_size=2"],
        input=lines,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(r["outputs"]) for r in rows] == [10, 10, 10]
