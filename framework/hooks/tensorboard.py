"""TensorBoard event files: one folder for training, one for each evaluation set, each with one writer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from framework.hooks.hook import Hook, Values

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer


class TensorBoard(Hook):
    """Writes scalars to ``directory/train`` and ``directory/eval`` (or ``directory/eval/NAME``) at their true step.

    Nothing is written before the first figure (or use of ``train_writer``), so a run that never trains leaves no event
    file. Curves have one point a step: when a folder is first written to after a resume, what a killed run left at
    later steps is moved out of its event files, and a point written again at its step replaces the earlier one. Only
    one process of a run may write to ``directory``.

    Args:
      directory: the folder to point ``tensorboard --logdir`` at; it is made when needed.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = os.fspath(directory)
        self._folders: dict[str, _Folder] = {}
        self._resumed_at: int | None = None  # points after this step are not of this run; None: nothing is known
        self._graph_written = False

    @property
    def train_writer(self) -> tf.summary.SummaryWriter:
        """The ``tf.summary`` writer of ``directory/train``: the default writer for summaries in a user's step."""
        return self._folder("train", None).writer

    def begin(self, trainer: Trainer) -> None:
        self._resumed_at = int(trainer.step)
        for folder in self._folders.values():
            folder.go_back_to(self._resumed_at)

    def __call__(self, step: int, values: Values) -> None:
        self._folder("train", step).scalars(step, values)

    def evaluated(self, step: int, name: str, values: Values) -> None:
        self._folder(os.path.join("eval", name) if name else "eval", step).scalars(step, values)

    def curves(self, name: str, step: int, values: Values) -> None:
        """Writes scalars to ``directory/NAME``."""
        self._folder(name, step).scalars(step, values)

    def write_graph(self, graph: tf.Graph) -> None:
        """Writes ``graph`` (of a ``tf.function``: ``fn.get_concrete_function(...).graph``); later calls do nothing."""
        if self._graph_written:
            return
        self._graph_written = True
        with self.train_writer.as_default():
            tf.summary.graph(graph)

    def end(self, step: int, status: str) -> None:
        for name, folder in list(self._folders.items()):
            folder.writer.flush()
            if name != "train":  # a compiled step with summaries of the user's holds that writer, and may run again
                folder.writer.close()
                del self._folders[name]
        # An evaluation after the end is of this step, and the points up to here are of this run.
        self._resumed_at = int(step)

    def _folder(self, name: str, step: int | None) -> _Folder:
        """The folder ``name``, opened when it is not; ``step`` is that of the first point to be written, if known."""
        if name not in self._folders:
            first = None
            if self._resumed_at is not None:
                # A run at step 0 takes over nothing, not even what another left at step 0.
                first = self._resumed_at + 1 if self._resumed_at else 0
                first = first if step is None else min(first, step)
            self._folders[name] = _Folder(os.path.join(self._directory, name), first)
        return self._folders[name]


class _Folder:
    """One event file, in a folder rid of older points at step ``first`` and later (None: as it is)."""

    def __init__(self, directory: str, first: int | None):
        if first is not None:
            _move_out(directory, first)
        self.writer = tf.summary.create_file_writer(directory)
        self._last: int | None = None
        if first is not None:
            self.mark_restart(first)

    def scalars(self, step: int, values: Values) -> None:
        if self._last is not None and step <= self._last:
            self.mark_restart(step)
        self._last = step
        # The trigger has said that now is the time, whatever record_if the user's own summaries stand under. Leaving
        # as_default flushes, so a killed run loses no point.
        with self.writer.as_default(), tf.summary.record_if(True):
            for name, value in values.items():
                tf.summary.scalar(name, value, step=step)

    def go_back_to(self, step: int) -> None:
        """Strikes the points of this writer behind ``step``, if there are any."""
        if self._last is not None and self._last > step:
            self.mark_restart(step + 1)
            self._last = step

    def mark_restart(self, step: int) -> None:
        """Tells a TensorBoard that has this folder open to forget its points at ``step`` and later.

        It does so at a SessionLog START event. It takes the first one in a folder for the start of a fresh run and
        forgets nothing there, so it is written twice: there may have been none.
        """
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        event = tf.compat.v1.Event(wall_time=time.time(), step=step, session_log=start)
        with tf.device("cpu:0"):
            for _ in range(2):
                # _resource: tf.summary has no public way to write an event that is no summary.
                tf.raw_ops.ImportEvent(writer=self.writer._resource, event=event.SerializeToString())


def _move_out(directory: str, first: int) -> None:
    """Moves the points at step ``first`` and later from event files to files that TensorBoard does not read.

    A START event alone is not enough: TensorBoard's fast loader looks only for steps that are written again, and its
    ``EventAccumulator``, which scripts read curves with, leaves tf.summary's points alone.
    """
    if not tf.io.gfile.isdir(directory):
        return
    for name in sorted(tf.io.gfile.listdir(directory)):
        path = os.path.join(directory, name)
        if "tfevents" not in name or not any(_is_late(record, first) for record in _records(path)):
            continue
        # Readers take a file with "tfevents" in its name for an event file.
        out = os.path.join(directory, f"{name.replace('tfevents', 'discarded')}.{time.time_ns()}")
        kept = os.path.join(directory, name.replace("tfevents", "rewritten"))
        with tf.io.TFRecordWriter(out) as out_file, tf.io.TFRecordWriter(kept) as kept_file:
            for record in _records(path):
                (out_file if _is_late(record, first) else kept_file).write(record)
        tf.io.gfile.rename(kept, path, overwrite=True)


def _records(path: str) -> Iterator[bytes]:
    """The whole records of an event file; a killed run may have left a torn one at the end."""
    try:
        for record in tf.data.TFRecordDataset(path):
            yield record.numpy()
    except tf.errors.DataLossError:
        return


def _is_late(record: bytes, first: int) -> bool:
    event = tf.compat.v1.Event.FromString(record)
    return event.HasField("summary") and event.step >= first
