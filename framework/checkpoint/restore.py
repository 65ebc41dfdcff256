"""Reads a checkpoint and writes it into variables: everything must fit, or, for a start from other weights, a part."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from framework.checkpoint import manifest
from framework.checkpoint.manifest import Damaged
from framework.errors import ConfigError, LockstepError

DATA = "data"  # prefix of TensorFlow's files in a checkpoint's folder
# The state of a Keras seed generator: noise is that of the run's own seed, also where weights come from elsewhere.
_SEEDS = "seed_generator_state"


def read(folder: str) -> dict[str, Any]:
    """Reads the checkpoint ``folder``, after checking every byte of it: name -> NumPy array.

    Raises:
      LockstepError: it is not whole, or cannot be read.
    """
    import tensorflow as tf

    try:
        manifest.check(folder)
        reader = tf.train.load_checkpoint(os.path.join(folder, DATA))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    except (Damaged, tf.errors.OpError, OSError, ValueError) as error:
        raise LockstepError(f"cannot read checkpoint {folder}: {error}") from error


def assign(variables: Mapping[str, Any], values: Mapping[str, Any], where: str) -> None:
    """Writes restored values into variables, on all their copies; everything must fit.

    Args:
      variables: name -> ``tf.Variable``, also one of a strategy.
      values: name -> array, as ``read`` gives them.
      where: they are from, for the message.

    Raises:
      ConfigError: a name is missing or unused, or a shape or dtype differs; all are listed and nothing is written.
    """
    wrong = differences(variables, values)
    if wrong:
        raise ConfigError(
            f"the checkpoint {where} does not fit this model; use the one it was written with, or another run_dir:\n  "
            + "\n  ".join(wrong)
        )
    for name, variable in variables.items():
        variable.assign(values[name])


def differences(variables: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """What keeps ``values`` from being written into ``variables``, a line each; empty: nothing does."""
    wrong = [f"missing in the checkpoint: {n}" for n in sorted(set(variables) - set(values))]
    wrong += [f"not in this model: {n}" for n in sorted(set(values) - set(variables))]
    for name in sorted(set(variables) & set(values)):
        variable, value = variables[name], values[name]
        if tuple(variable.shape) != tuple(value.shape):
            wrong.append(f"{name}: shape {tuple(value.shape)} in the checkpoint, {tuple(variable.shape)} in this model")
        elif variable.dtype.as_numpy_dtype != value.dtype:
            wrong.append(f"{name}: dtype {value.dtype} in the checkpoint, {variable.dtype.name} in this model")
    return wrong


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Names of the variables that a start from other weights loaded, kept as they were, and found but left out."""

    loaded: list[str]
    kept: list[str]
    unused: list[str]

    def describe(self, where: str, step: int) -> list[str]:
        """Lines that name every variable."""
        lines = [f"initial weights: {len(self.loaded)} variables from {where} (step {step}): {', '.join(self.loaded)}"]
        if self.kept:
            lines.append(f"initial weights: {len(self.kept)} kept as they were made: {', '.join(self.kept)}")
        if self.unused:
            lines.append(f"initial weights: {len(self.unused)} of that checkpoint left out: {', '.join(self.unused)}")
        return lines


def assign_part(
    variables: Mapping[str, Any],
    values: Mapping[str, Any],
    where: str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Loaded:
    """Writes some values into variables, on all their copies; what the patterns leave must fit on both sides.

    Args:
      variables: the model's, name -> ``tf.Variable``.
      values: the checkpoint's model, name -> array.
      where: they are from, for the message.
      include: regular expressions; only names in which one is found count. Empty: all.
      exclude: likewise; names in which one is found do not count, on either side.

    Raises:
      ConfigError: a pattern fits no name, no name is left, or what is left does not fit; nothing is written.
    """
    names = set(variables) | set(values)
    for pattern in (*include, *exclude):
        if not any(re.search(pattern, name) for name in names):
            option = "init_include" if pattern in include else "init_exclude"
            raise ConfigError(
                f"{option} has the pattern {pattern!r} but no variable of the model or of {where} fits; there are "
                f"{', '.join(sorted(names))}"
            )

    def counts(name: str) -> bool:
        if name.rpartition("/")[2] == _SEEDS:
            return False
        wanted = not include or any(re.search(pattern, name) for pattern in include)
        return wanted and not any(re.search(pattern, name) for pattern in exclude)

    mine = {name: v for name, v in variables.items() if counts(name)}
    theirs = {name: v for name, v in values.items() if counts(name)}
    wrong = differences(mine, theirs)
    if wrong:
        raise ConfigError(
            f"init_from={where} does not fit this model; leave out what differs with --init_exclude, or load only a "
            "part with --init_include:\n  " + "\n  ".join(wrong)
        )
    if not mine:
        raise ConfigError(f"init_from={where}: init_include and init_exclude leave no variable; change the patterns")
    for name, variable in mine.items():
        variable.assign(theirs[name])
    return Loaded(sorted(mine), sorted(set(variables) - set(mine)), sorted(set(values) - set(theirs)))
