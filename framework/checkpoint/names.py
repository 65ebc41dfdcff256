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
    import keras
    import tensorflow as tf

    if isinstance(model, (keras.Model, keras.layers.Layer)):
        pairs = [(v.path, native(v)) for v in model.variables]
    elif isinstance(model, tf.Module):
        pairs = list(_walk(model, (), set()))
    else:
        raise ConfigError(
            f"build_model returned {type(model).__name__} but it must return a keras.Model, keras.layers.Layer or "
            "tf.Module"
        )
    named: dict[str, Any] = {}
    for name, variable in pairs:
        if name in named and named[name] is not variable:
            raise ConfigError(f"two variables of the model are named {name!r}; give their layers different names")
        named[name] = variable
    return named


def _walk(value: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Variables below ``value`` with their attribute path, each once, in a fixed order."""
    import keras
    import tensorflow as tf

    if isinstance(value, keras.Variable):
        value = value.value
    if id(value) in seen:
        return
    if isinstance(value, tf.Variable):
        seen.add(id(value))
        yield "/".join(path), value
    elif isinstance(value, (keras.Model, keras.layers.Layer)):
        for variable in value.variables:
            yield from _walk(variable.value, (*path, variable.path), seen)
    elif isinstance(value, tf.Module):
        seen.add(id(value))
        for key in sorted(vars(value)):
            if not key.startswith(("_tf", "_self")):
                yield from _walk(vars(value)[key], (*path, key), seen)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _walk(value[key], (*path, str(key)), seen)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _walk(item, (*path, str(i)), seen)
