"""A folder of checkpoints: written to a temporary place, renamed as the last act, the old ones removed."""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

from framework.checkpoint import disk, find, manifest, restore
from framework.checkpoint.disk import sync_tree
from framework.checkpoint.find import Found, name_of
from framework.checkpoint.keep import Keep
from framework.checkpoint.manifest import Damaged, Manifest, Variable
from framework.errors import LockstepError

# .tmp-STEP-RUN-PID is being written; .old-STEP-RUN-PID has been replaced, or is being removed.
_LEFT = re.compile(r"\.(tmp|old)-(\d+)-([0-9a-z]*)-\d+")
_MORE = 1 << 16  # bytes of index and manifest besides 1 % of the tensors; the index has some 60 a variable


class CheckpointStore:
    """Saves and restores sets of named tensors, one folder ``step-NNNNNNNN`` each.

    The files are TensorFlow's own checkpoint format, readable with ``tf.train.load_checkpoint(folder + "/data")``.
    ``tf.train.Checkpoint`` is not used to write them: it reads the variables while it writes, so training would have to
    stand still, and it matches by the shape of the object graph instead of by name.

    Args:
      folder: where the checkpoints are; it is made by the first save.
      keep: so many of the newest are kept.
      every: and those whose step is a multiple of this; 0: none.
      best: and the best by (figure, ``min`` or ``max``); None: none.
      background: write files in a thread of their own.
      run: id of the run; only checkpoints with this id are ever removed or replaced.
    """

    def __init__(
        self,
        *,
        folder: str,
        keep: int = 5,
        every: int = 0,
        best: tuple[str, str] | None = None,
        background: bool = True,
        run: str = "",
    ):
        self.folder = folder
        self.run = run
        self._keep = Keep(last=keep, every=every, best=best)
        self._background = background
        # One thread for all saves: a new one for each had an arena of its own, and memory grew by 8 MB a save.
        self._writer: concurrent.futures.Executor | None = None
        self._saving: concurrent.futures.Future[None] | None = None
        self._error: BaseException | None = None
        self._made = False  # the folder was there once; if it is gone later, somebody removed it
        self._damaged: set[int] = set()  # found to be so when every byte was read
        self._pending: dict[int, dict[str, float]] = {}  # figures of the save that is running

    # --- what is there -------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, rising, as far as manifests and sizes tell: contents are not read."""
        return sorted(self._manifests())

    def latest(self) -> int | None:
        """The last of ``steps()``, or None."""
        return max(self._manifests(), default=None)

    def newest(self) -> Found:
        """The newest whole checkpoint, every byte of it checked, and why newer ones were passed over.

        What was passed over is not taken for a checkpoint by this object any more.
        """
        found = find.newest(self.folder)
        self._damaged |= set(found.passed_over)
        return found

    def path(self, step: int) -> str:
        """Folder of the checkpoint of ``step``."""
        return os.path.join(self.folder, name_of(step))

    def load(self, step: int) -> dict[str, Any]:
        """Reads the checkpoint of ``step``, after checking every byte of it: name -> NumPy array.

        Raises:
          LockstepError: it is not whole, or cannot be read.
        """
        try:
            find.check(self.folder, step, content=False)
        except Damaged as error:
            raise LockstepError(f"cannot read checkpoint {self.path(step)}: {error}") from error
        return restore.read(self.path(step))

    def best_step(self) -> int | None:
        """Step of the checkpoint best by the configured figure; the first of equals; None if there is none."""
        return self._keep.best_step({s: m.figures for s, m in self._manifests().items()})

    def would_be_best(self, figures: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these figures would be better than every one there; a non-finite one never is."""
        there = {step: m.figures for step, m in self._manifests().items()}
        return self._keep.is_better(figures, {**there, **self._pending})

    def _manifests(self) -> dict[int, Manifest]:
        found: dict[int, Manifest] = {}
        for step in find.steps_in(self.folder):
            try:
                if step not in self._damaged:
                    found[step] = find.check(self.folder, step, content=False)
            except Damaged:
                continue  # not whole, so not a checkpoint
        return found

    # --- saving --------------------------------------------------------------------------------------------------

    def save(self, step: int, tensors: Mapping[str, Any], figures: Mapping[str, float] | None = None) -> None:
        """Saves ``tensors`` as the checkpoint of ``step``; files are written in the background if so configured.

        The tensors are kept, not copied: TensorFlow copies a variable's buffer only when training changes it while a
        tensor still shares it, so a snapshot costs nothing until the next update. Call ``wait`` before reading them,
        or there are two snapshots in memory while the save before is still being written.

        Args:
          step: updates made.
          tensors: name -> eager tensor or NumPy array.
          figures: evaluation figures of this step, for ``best``.

        Raises:
          LockstepError: the save before this one failed, there is no room, or this one failed (not in the background).
        """
        self.wait()
        step, kept, known = int(step), dict(tensors), dict(figures or {})
        need = sum(_bytes(t) for t in kept.values())
        disk.require_room(self.folder, need + need // 100 + _MORE, f"the checkpoint of step {step}")
        self._pending = {step: known}
        if self._background:
            self._writer = self._writer or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._saving = self._writer.submit(self._try, step, kept, known)
        else:
            self._try(step, kept, known)
            self.check()

    def check(self) -> None:
        """Raises the error of a background save that has failed, if any; does not wait.

        Raises:
          LockstepError: a save failed.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise LockstepError(f"saving a checkpoint failed: {error}") from error

    @property
    def saving(self) -> bool:
        """Whether files are being written in the background."""
        return self._saving is not None and not self._saving.done()

    def wait(self) -> None:
        """Waits until the save that is running has finished.

        Raises:
          LockstepError: it failed.
        """
        if self._saving is not None:
            self._saving.result()
            self._saving = None
        self.check()

    def clean(self) -> list[str]:
        """Removes what a killed process of this run left half done, and returns the names; call it before any save.

        A checkpoint that was moved out of the way for another one that never came is put back.
        """
        done = []
        for name in sorted(os.listdir(self.folder)) if os.path.isdir(self.folder) else ():
            left = _LEFT.fullmatch(name)
            if left is None or left[3] != self.run:
                continue
            path, back = os.path.join(self.folder, name), self.path(int(left[2]))
            if left[1] == "old" and not os.path.exists(back) and _whole(path):
                os.rename(path, back)
            else:
                shutil.rmtree(path)
            done.append(name)
        return done

    def _try(self, step: int, tensors: dict[str, Any], figures: dict[str, float]) -> None:
        """Writes, and keeps an error for ``check``."""
        try:
            self._write(step, tensors, figures)
        except Exception as error:
            self._error = error
        finally:
            self._pending = {}

    def _write(self, step: int, tensors: dict[str, Any], figures: dict[str, float]) -> None:
        import tensorflow as tf

        self._make_folder()
        temporary = self._beside("tmp", step)
        shutil.rmtree(temporary, ignore_errors=True)
        os.mkdir(temporary)
        try:
            names = sorted(tensors)
            with tf.device("CPU:0"):
                values = [tf.convert_to_tensor(tensors[n]) for n in names]
                tf.raw_ops.SaveV2(
                    prefix=os.path.join(temporary, restore.DATA),
                    tensor_names=names,
                    shape_and_slices=[""] * len(names),
                    tensors=values,
                )
            variables = {n: Variable(tuple(v.shape.as_list()), v.dtype.name) for n, v in zip(names, values)}
            manifest.write(temporary, step=step, run=self.run, figures=figures, variables=variables)
            sync_tree(temporary)
            self._out_of_the_way(step)
            os.rename(temporary, self.path(step))
            disk.sync(self.folder)
        except (OSError, tf.errors.OpError) as error:
            raise OSError(f"{self.path(step)}: {_reason(error)}; {self._state(tensors)}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._damaged.discard(step)
        shutil.rmtree(self._beside("old", step), ignore_errors=True)
        self._remove_old()

    def _make_folder(self) -> None:
        if self._made and not os.path.isdir(os.path.dirname(os.path.abspath(self.folder))):
            raise OSError(f"{os.path.dirname(self.folder)} is gone: it was deleted or moved while the run wrote to it")
        os.makedirs(self.folder, exist_ok=True)
        self._made = True

    def _beside(self, kind: str, step: int) -> str:
        return os.path.join(self.folder, f".{kind}-{step:08d}-{self.run}-{os.getpid()}")

    def _out_of_the_way(self, step: int) -> None:
        """Makes the name of a step's checkpoint free.

        One of this run is from before it went back to an earlier step, and is replaced. What is damaged, or not of this
        run, is nobody's to delete: it gets another name.
        """
        path = self.path(step)
        if not os.path.lexists(path):
            return
        try:
            own = step not in self._damaged and find.check(self.folder, step, content=False).run == self.run
        except Damaged:
            own = False
        if own:
            os.rename(path, self._beside("old", step))
            return
        number = 1
        while os.path.lexists(f"{path}.aside-{number}"):
            number += 1
        os.rename(path, f"{path}.aside-{number}")

    def _remove_old(self) -> None:
        there = {step: m for step, m in self._manifests().items() if m.run == self.run}
        for step in self._keep.superfluous(there, {step: m.figures for step, m in there.items()}):
            disk.remove_tree(self.path(step), self._beside("old", step))

    def _state(self, tensors: Mapping[str, Any]) -> str:
        """What was needed, what there is, and that the others are whole, for the message of a failed save."""
        need, free = sum(_bytes(t) for t in tensors.values()), disk.free_bytes(self.folder)
        room = f"{disk.megabytes(need)} were to be written"
        room += f", {disk.megabytes(free)} are free now" if free is not None else ""
        there = self.steps()
        return f"{room}; whole checkpoints: {', '.join(map(str, there)) or 'none'}"


def _bytes(tensor: Any) -> int:
    """Bytes of a tensor or array in a file."""
    import numpy as np
    import tensorflow as tf

    if tf.is_tensor(tensor):
        return int(np.prod(tensor.shape.as_list(), dtype=np.int64)) * tensor.dtype.size
    return int(np.asarray(tensor).nbytes)


def _whole(folder: str) -> bool:
    try:
        manifest.check(folder)
    except Damaged:
        return False
    return True


def _reason(error: Exception) -> str:
    """An error's first line, with the name of its class where that says more than the text."""
    if isinstance(error, OSError):
        return str(error)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
