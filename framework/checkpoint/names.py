"""Names of variables: by path, the same in every process, never by position."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from framework.errors import ConfigError
from framework.step.gradients import native


@contextlib.contextmanager
def fresh_keras_names() -> Iterator[None]:
    """Restarts Keras's count of automatic layer names inside the block.

    Keras numbers layers per process (``dense``, ``dense_1``, ...), so the second model built in a process would get
    other names than the same model in a fresh process, and its checkpoints would not fit.
    """
    # Keras has no public name for this; tests/checkpoint/test_names.py fails when it moves.
    from keras.src.backend.common import global_state

    before = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", collections.defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", before or collections.defaultdict(int))


def variable_names(model: Any) -> dict[str, Any]:
    """Name -> ``tf.Variable`` of every variable of a Keras model or layer, or of a ``tf.Module``.

    Raises:
      ConfigError: two variables have the same name, or the model is of another kind.
    """
    return {name: native(variable) for name, variable, _ in _found(model)}


def trainable_variables(model: Any) -> list[Any]:
    """The trainable ones, as the model holds them: Keras's or TensorFlow's variables."""
    return [variable for _, variable, trainable in _found(model) if trainable]


def unbuilt_layers(model: Any) -> list[str]:
    """Names of the Keras layers that have not made their variables yet."""
    return [layer.name for layer in layers_of(model) if not layer.built]


def made_trainable(model: Any) -> list[Any]:
    """The variables that Keras layers made as weights, also in layers that are frozen now: no state of a step."""
    # Private: a frozen layer lists its weights and its moving statistics alike.
    return [native(v) for layer in layers_of(model) for v in getattr(layer, "_trainable_variables", ())]


def layers_of(model: Any) -> list[Any]:
    """The Keras layers in a model, itself included."""
    import keras

    if isinstance(model, keras.layers.Layer):
        # Private, but without another way to the layers inside layers; tests/checkpoint/test_names.py guards it.
        return list(model._flatten_layers())
    return [layer for _, child in _attributes(model) for layer in layers_of(child)]


def _found(model: Any) -> list[tuple[str, Any, bool]]:
    """(name, variable, trainable) of each variable, once."""
    import keras
    import tensorflow as tf

    if isinstance(model, keras.layers.Layer):
        triples = [(v.path, v, t) for v, t in _of_layer(model)]
    elif isinstance(model, tf.Module):
        triples = list(_walk(model, (), set()))
    else:
        raise ConfigError(
            f"build_model returned {type(model).__name__} but it must return a keras.Model, keras.layers.Layer or "
            "tf.Module"
        )
    named: dict[str, tuple[Any, bool]] = {}
    for name, variable, trainable in triples:
        if name in named and native(named[name][0]) is not native(variable):
            raise ConfigError(f"two variables of the model are named {name!r}; give their layers different names")
        named[name] = (variable, trainable)
    return [(name, *pair) for name, pair in named.items()]


def _of_layer(layer: Any) -> list[tuple[Any, bool]]:
    trainable = {id(v) for v in layer.trainable_variables}
    return [(v, id(v) in trainable) for v in layer.variables]


def _walk(value: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, Any, bool]]:
    """Variables below ``value`` with their attribute path, each once, in a fixed order."""
    import keras
    import tensorflow as tf

    if id(native(value)) in seen:
        return
    if isinstance(value, (tf.Variable, keras.Variable)):
        seen.add(id(native(value)))
        yield "/".join(path), value, bool(value.trainable)
    elif isinstance(value, keras.layers.Layer):
        for variable, trainable in _of_layer(value):
            if id(native(variable)) not in seen:
                seen.add(id(native(variable)))
                yield "/".join((*path, variable.path)), variable, trainable
    else:
        seen.add(id(value))
        for key, child in _attributes(value):
            yield from _walk(child, (*path, key), seen)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """What a module, mapping or sequence holds, with a name for each, in a fixed order."""
    import tensorflow as tf

    if isinstance(value, tf.Module):
        return [(key, vars(value)[key]) for key in sorted(vars(value)) if not key.startswith(("_tf", "_self"))]
    if isinstance(value, Mapping):
        return [(str(key), value[key]) for key in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [(str(i), item) for i, item in enumerate(value)]
    return []
