"""Builds a trainer's model: in the strategy's scope to train it, and once more outside of it to export it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from framework.checkpoint.names import fresh_keras_names, unbuilt_layers, variable_names
from framework.errors import ConfigError, LockstepError
from framework.step import randomness
from framework.step.values import as_stats

if TYPE_CHECKING:
    from framework.export import Signature
    from framework.loop.trainer import Trainer


def build_model(trainer: Trainer) -> Any:
    """Calls the task's ``build_model`` and makes all variables, also those of layers that wait for their first call.

    Raises:
      ConfigError: what it made is no model, or a layer is still without its variables.
    """
    tf.keras.utils.set_random_seed(trainer.config.seed)
    with _precision(trainer.config.precision), fresh_keras_names():
        model = trainer.build_model()
        variable_names(model)  # refuses what is not a model
        if unbuilt_layers(model) or not variable_names(model):
            _call_once(trainer, model)
    return model


def plain_copy(trainer: Trainer) -> Any:
    """The model once more with the weights it has now, in variables that know of no replica.

    Raises:
      LockstepError: ``build_model`` made another model the second time.
    """
    values = {name: v.read_value().numpy() for name, v in variable_names(trainer.model).items()}
    with tf.device("CPU:0"):
        model = build_model(trainer)
        own = variable_names(model)
        if own.keys() != values.keys():
            raise LockstepError(
                f"build_model made other variables the second time ({sorted(own.keys() ^ values.keys())[:4]}); an "
                "export needs it to make the same model whenever it is called"
            )
        for name, variable in own.items():
            variable.assign(values[name])
    return model


def default_signature(trainer: Trainer) -> Signature:
    """``serving_default`` of a task that does not say how its model is called.

    Raises:
      ConfigError: it is no Keras model, so how to call it is not known.
    """
    import keras

    from framework.export import Signature

    if not isinstance(trainer.model, keras.layers.Layer):
        raise ConfigError(
            f"{type(trainer).__name__}.build_model made a {type(trainer.model).__name__}, and how to call it for "
            'inference is not known; write signatures(), for example {"serving_default": Signature(spec=..., '
            "function=lambda model, inputs: model(inputs))}"
        )
    spec = trainer.element_spec
    spec = spec[0] if isinstance(spec, tuple) else spec
    spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype), spec)
    return Signature(spec=spec, function=lambda model, inputs: model(inputs, training=False))


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    """Keras layers made inside the block compute in this precision."""
    before = tf.keras.config.dtype_policy()
    if name != "float32":
        tf.keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        tf.keras.config.set_dtype_policy(before)


def _call_once(trainer: Trainer, model: Any) -> None:
    """Creates the variables of layers that wait for their first call, from the data's spec.

    Raises:
      ConfigError: a layer is still without them.
    """
    spec = trainer.element_spec

    def losses(batch: Any) -> tf.Tensor:
        # Evaluation: a training step would move moving statistics by an empty example.
        return as_stats(trainer.compute_loss(model, batch, training=False), "compute_loss")["loss"].value

    place = randomness.Place(trainer.config.seed, tf.zeros([], tf.int64))
    try:
        with randomness.at(place):
            losses(tf.nest.map_structure(_empty_example, spec))
    except Exception:
        if not unbuilt_layers(model) and variable_names(model):
            return  # what it failed at came after the variables
        strategy = tf.distribute.get_strategy()
        trace = tf.function(lambda batch: strategy.run(losses, args=(batch,)))
        trace.get_concrete_function(spec)


def _empty_example(spec: tf.TypeSpec) -> tf.Tensor:
    """One example of zeros for a spec whose unknown dimensions are taken as 1."""
    if not isinstance(spec, tf.TensorSpec):
        raise TypeError(f"no zeros of {spec}")
    shape = [1, *(d or 1 for d in spec.shape[1:])]
    return tf.fill(shape, "") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)
