"""Exports a trained model for inference: SavedModel with signatures, Keras file, LiteRT; with plain variables only.

An export is for inference. Training goes on from checkpoints, which have the optimizer's state as well.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from framework.errors import ConfigError, LockstepError
from framework.loop import building, files
from framework.parse import EXPORT_FORMATS

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

EXPORT_FILE = "export.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """One way to call an exported model.

    Attributes:
      spec: a ``tf.TensorSpec``, or a dict of them by name; the first dimension, the batch, is usually None.
      function: (model, inputs as in ``spec``) -> a tensor, or a dict of tensors by name. Pre-processing (decoding an
        image, splitting a text) goes here, in TensorFlow ops.
    """

    spec: Any
    function: Callable[[Any, Any], Any]


def export(trainer: Trainer, directory: str, formats: Sequence[str] = ("saved_model",)) -> str:
    """Writes the trainer's present weights, or their moving average, for inference; see ``Trainer.export``."""
    unknown = [f for f in formats if f not in EXPORT_FORMATS]
    if unknown or not formats:
        raise ConfigError(f"export formats {list(formats)} but they must be some of {', '.join(EXPORT_FORMATS)}")
    if os.path.lexists(directory) and (not os.path.isdir(directory) or os.listdir(directory)):
        raise ConfigError(f"export to {directory} but it exists and is not empty; pass another directory")
    signatures = dict(trainer.signatures())
    if not signatures:
        raise ConfigError(f"{type(trainer).__name__}.signatures() is empty; return at least one")
    with trainer.averaged_weights():
        model = building.plain_copy(trainer)
    temporary = f"{directory.rstrip(os.sep)}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    try:
        served = _Served(model, signatures)
        if "keras" in formats:
            _save_keras(model, os.path.join(temporary, "model.keras"))
        if "saved_model" in formats:
            tf.saved_model.save(served, os.path.join(temporary, "saved_model"), signatures=_concrete(served))
        if "tflite" in formats:
            _save_tflite(served, temporary)
        about = {
            "step": trainer.step,
            "task": trainer.task_name,
            "formats": list(formats),
            "averaged": bool(trainer.config.ema_decay),
            "signatures": {name: _describe(s.spec) for name, s in signatures.items()},
            "versions": files.versions(),
        }
        files.write_json(os.path.join(temporary, EXPORT_FILE), about)
        if os.path.isdir(directory):
            os.rmdir(directory)
        os.rename(temporary, directory)
    except OSError as error:
        raise LockstepError(f"the export to {directory} was not written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


class _Served(tf.Module):
    """The model with a function for each signature."""

    def __init__(self, model: Any, signatures: Mapping[str, Signature]):
        super().__init__()
        self.model = model
        self._specs = {name: s.spec for name, s in signatures.items()}
        self.functions = {name: self._function(s) for name, s in signatures.items()}

    def _function(self, signature: Signature) -> Any:
        def call(inputs: Any) -> dict[str, tf.Tensor]:
            outputs = signature.function(self.model, inputs)
            found = dict(outputs) if isinstance(outputs, Mapping) else {"outputs": outputs}
            # Serving wants float32, whatever the model computes in.
            return {n: tf.cast(t, tf.float32) if t.dtype in (tf.bfloat16, tf.float16) else t for n, t in found.items()}

        if isinstance(signature.spec, Mapping):
            return tf.function(lambda **inputs: call(inputs))
        return tf.function(call)

    def concrete(self, name: str) -> Any:
        """The traced function of a signature."""
        spec = self._specs[name]
        if isinstance(spec, Mapping):
            return self.functions[name].get_concrete_function(**{n: _named(n, s) for n, s in spec.items()})
        return self.functions[name].get_concrete_function(_named("inputs", spec))


def _concrete(served: _Served) -> dict[str, Any]:
    return {name: served.concrete(name) for name in served.functions}


def _named(name: str, spec: Any) -> tf.TensorSpec:
    if not isinstance(spec, tf.TensorSpec):
        raise ConfigError(
            f"signature input {name!r} is {spec!r} but it must be a tf.TensorSpec or a dict of them; write signatures()"
        )
    return tf.TensorSpec(spec.shape, spec.dtype, name)


def _describe(spec: Any) -> dict[str, Any]:
    named = spec if isinstance(spec, Mapping) else {"inputs": spec}
    return {n: f"{s.dtype.name} {[d if d is not None else 'batch' for d in s.shape]}" for n, s in named.items()}


def _save_keras(model: Any, path: str) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"export format keras but build_model made a {type(model).__name__}: it is for a keras.Model; pass "
            "--export_formats=saved_model"
        )
    model.save(path)


def _save_tflite(served: _Served, folder: str) -> None:
    # Of a model with variables the converter writes a file that has none of their values.
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    frozen = tf.Module()
    frozen.functions = {}
    for name in served.functions:
        traced = served.concrete(name)
        frozen.functions[name] = _positional(
            convert_variables_to_constants_v2(traced), sorted(traced.structured_outputs)
        )
    constants = os.path.join(folder, ".constants")
    try:
        tf.saved_model.save(frozen, constants, signatures=frozen.functions)
        content = tf.lite.TFLiteConverter.from_saved_model(constants).convert()
    except Exception as error:
        raise LockstepError(
            f"LiteRT cannot convert this model: {str(error).splitlines()[0]}; pass --export_formats=saved_model"
        ) from error
    finally:
        shutil.rmtree(constants, ignore_errors=True)
    with open(os.path.join(folder, "model.tflite"), "wb") as file:
        file.write(content)


def _positional(constant: Any, outputs: Sequence[str]) -> Any:
    """A traced function of named inputs around one that gives its outputs as a list, in the order of ``outputs``."""
    specs = [tf.TensorSpec(t.shape, t.dtype, t.name.partition(":")[0]) for t in constant.inputs]

    @tf.function(input_signature=specs, autograph=False)
    def call(*inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return dict(zip(outputs, constant(*inputs), strict=True))

    return call.get_concrete_function()


def read_about(directory: str) -> dict[str, Any]:
    """What ``export.json`` of an export says.

    Raises:
      ConfigError: ``directory`` is not an export.
    """
    try:
        with open(os.path.join(directory, EXPORT_FILE), encoding="utf-8") as file:
            about = json.load(file)
        if not isinstance(about, dict) or not isinstance(about.get("signatures"), dict):
            raise ValueError("it is none")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory} is not an export of this framework ({EXPORT_FILE}: {error})") from error
    return about
