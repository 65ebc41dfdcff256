"""A folder of checkpoints: written to a temporary place, renamed as the last act, the old ones removed."""

from __future__ import annotations

import concurrent.futures
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

from framework.errors import ConfigError, LockstepError

_NAME = re.compile(r"step-(\d{8,})")
_DATA = "data"  # prefix of TensorFlow's files in a checkpoint's folder
MANIFEST = "manifest.json"


class CheckpointStore:
    """Saves and restores sets of named tensors, one folder ``step-NNNNNNNN`` each.

    The files are TensorFlow's own checkpoint format, readable with ``tf.train.load_checkpoint(folder + "/data")``.
    ``tf.train.Checkpoint`` is not used to write them: it reads the variables while it writes, so training would have to
    stand still, and it matches by the shape of the object graph instead of by name.
    """

    def __init__(self, *, folder: str, keep: int = 5, best: tuple[str, str] | None = None, background: bool = True):
        self.folder = folder
        self.keep = keep
        self.best = best
        self._background = background
        # One thread for all saves: a new one for each had an arena of its own, and memory grew by 8 MB a save.
        self._writer: concurrent.futures.Executor | None = None
        self._saving: concurrent.futures.Future[None] | None = None
        self._error: BaseException | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, rising."""
        return sorted(self._manifests())

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        steps = self.steps()
        return steps[-1] if steps else None

    def path(self, step: int) -> str:
        """Folder of the checkpoint of ``step``."""
        return os.path.join(self.folder, f"step-{step:08d}")

    def save(self, step: int, tensors: Mapping[str, Any], figures: Mapping[str, float] | None = None) -> None:
        """Saves ``tensors`` as the checkpoint of ``step``; files are written in the background if so configured.

        The tensors are kept, not copied: TensorFlow copies a variable's buffer only when training changes it while a
        tensor still shares it, so a snapshot costs nothing until the next update.

        Args:
          step: updates made.
          tensors: name -> eager tensor or NumPy array.
          figures: evaluation figures of this step, for ``best``.

        Raises:
          LockstepError: the save before this one failed, or this one did (not in the background).
        """
        self.wait()
        if not self._background:
            self._write(step, dict(tensors), dict(figures or {}))
            return

        def write() -> None:
            try:
                self._write(step, dict(tensors), dict(figures or {}))
            except BaseException as error:
                self._error = error

        self._writer = self._writer or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving = self._writer.submit(write)

    def check(self) -> None:
        """Raises the error of a background save that has failed, if any; does not wait.

        Raises:
          LockstepError: a save failed.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise LockstepError(f"saving a checkpoint failed: {error}") from error

    def wait(self) -> None:
        """Waits until the save that is running has finished.

        Raises:
          LockstepError: it failed.
        """
        if self._saving is not None:
            self._saving.result()
            self._saving = None
        self.check()

    def load(self, step: int) -> dict[str, Any]:
        """Reads the checkpoint of ``step``: name -> NumPy array.

        Raises:
          LockstepError: it cannot be read.
        """
        import tensorflow as tf

        try:
            reader = tf.train.load_checkpoint(os.path.join(self.path(step), _DATA))
            return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
        except (tf.errors.OpError, OSError, ValueError) as error:
            raise LockstepError(f"cannot read checkpoint {self.path(step)}: {error}") from error

    def _manifests(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        if not os.path.isdir(self.folder):
            return found
        for name in os.listdir(self.folder):
            match = _NAME.fullmatch(name)
            try:
                if match:
                    with open(os.path.join(self.folder, name, MANIFEST), encoding="utf-8") as file:
                        found[int(match[1])] = json.load(file)
            except (OSError, ValueError):
                continue  # not complete, so not a checkpoint
        return found

    def _write(self, step: int, tensors: dict[str, Any], figures: dict[str, float]) -> None:
        import tensorflow as tf

        os.makedirs(self.folder, exist_ok=True)
        temporary = os.path.join(self.folder, f".tmp-{step:08d}-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)
        try:
            names = sorted(tensors)
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=os.path.join(temporary, _DATA),
                    tensor_names=names,
                    shape_and_slices=[""] * len(names),
                    tensors=[tf.convert_to_tensor(tensors[n]) for n in names],
                )
            manifest = {
                "step": step,
                "figures": {k: v for k, v in figures.items() if math.isfinite(v)},
                "files": {n: os.path.getsize(os.path.join(temporary, n)) for n in sorted(os.listdir(temporary))},
            }
            with open(os.path.join(temporary, MANIFEST), "w", encoding="utf-8") as file:
                json.dump(manifest, file, indent=1)
            for name in os.listdir(temporary):
                _sync(os.path.join(temporary, name))
            if os.path.exists(self.path(step)):  # the same step again, from a run that was continued
                shutil.rmtree(self.path(step))
            os.rename(temporary, self.path(step))
            _sync(self.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._remove_old()

    def best_step(self) -> int | None:
        """Step of the checkpoint best by the configured figure; the first of equals; None if there is none."""
        if self.best is None:
            return None
        name, direction = self.best
        sign = 1 if direction == "max" else -1
        scored = [(sign * m["figures"][name], -s) for s, m in self._manifests().items() if name in m["figures"]]
        return -max(scored)[1] if scored else None

    def would_be_best(self, figures: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these figures would be better than every one there; a non-finite one never is."""
        assert self.best is not None
        name, direction = self.best
        value, step = figures.get(name, math.nan), self.best_step()
        if not math.isfinite(value) or step is None:
            return math.isfinite(value)
        best = self._manifests()[step]["figures"][name]
        return value > best if direction == "max" else value < best

    def _remove_old(self) -> None:
        steps, best = self.steps(), self.best_step()
        for step in steps[: -self.keep]:
            if step != best:
                shutil.rmtree(self.path(step))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def assign(variables: Mapping[str, Any], values: Mapping[str, Any], where: str) -> None:
    """Writes restored values into variables, on all their copies; everything must fit.

    Raises:
      ConfigError: a name is missing or unused, or a shape or dtype differs; all are listed and nothing is written.
    """
    wrong = [f"missing in the checkpoint: {n}" for n in sorted(set(variables) - set(values))]
    wrong += [f"not in this model: {n}" for n in sorted(set(values) - set(variables))]
    for name in sorted(set(variables) & set(values)):
        variable, value = variables[name], values[name]
        if tuple(variable.shape) != tuple(value.shape):
            wrong.append(f"{name}: shape {tuple(value.shape)} in the checkpoint, {tuple(variable.shape)} in this model")
        elif variable.dtype.as_numpy_dtype != value.dtype:
            wrong.append(f"{name}: dtype {value.dtype} in the checkpoint, {variable.dtype.name} in this model")
    if wrong:
        raise ConfigError(
            f"the checkpoint {where} does not fit this model; use the one it was written with, or another run_dir:\n  "
            + "\n  ".join(wrong)
        )
    for name, variable in variables.items():
        variable.assign(values[name])
