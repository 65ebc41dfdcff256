"""Distillation: a small student learns from the softened logits of a frozen teacher (Hinton et al. 2015).

The teacher is trained first, by a trainer of its own. The student sees no label. Measured is the accuracy of both.

    python examples/distillation.py --num_replicas=2 --train_steps=1000
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from framework import LossOutput, RunConfig, Trainer, flags
from input_pipelines import digits, from_arrays
from models.digits_task import Digits
from models.mlp import mlp
from train import train


class Distillation(Trainer):
    """A student of one small hidden layer, and a teacher inside the same model that does not change."""

    recipe = {
        "train_steps": 1000,
        "global_batch_size": 96,
        "optimizer": "adam",
        "learning_rate": 3e-3,
        "log_every": 200,
        "eval_every": 500,
    }

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        hidden: int = 16  # units of the student's hidden layer
        temperature: float = 4.0  # logits are divided by it before the softmax
        teacher_steps: int = 500  # updates the teacher is trained for

    teacher_weights: list[np.ndarray] | None = None  # None: they come from a checkpoint

    def build_model(self) -> keras.Model:
        """Both networks as one model: every replica gets the teacher, and checkpoints hold it."""
        self.student = mlp((8, 8), [self.options.hidden], 10)
        self.teacher = mlp((8, 8), [Digits.Options.hidden] * 2, 10)
        self.teacher.trainable = False
        if self.teacher_weights is not None:
            self.teacher.set_weights(self.teacher_weights)
        image = keras.Input((8, 8))
        return keras.Model(image, [self.student(image), self.teacher(image)])

    def train_data(self) -> Any:
        """1,437 images and labels, shuffled; the labels go into a metric only."""
        return from_arrays(digits.load("train"))

    def eval_data(self) -> Any:
        """360 images and labels that are never trained on."""
        return from_arrays(digits.load("test"))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """Divergence (Kullback-Leibler) of the student from the teacher, both softened, times temperature^2."""
        images, labels = batch
        student, teacher = self.student(images, training=training), self.teacher(images, training=False)
        heat = self.options.temperature
        wanted, log_given = tf.nn.log_softmax(teacher / heat), tf.nn.log_softmax(student / heat)
        loss = tf.reduce_sum(tf.exp(wanted) * (wanted - log_given), 1) * heat**2
        answer, example = tf.argmax(student, 1, tf.int32), tf.argmax(teacher, 1, tf.int32)
        right = {"accuracy": tf.equal(answer, labels), "teacher_accuracy": tf.equal(example, labels)}
        return LossOutput(loss=loss, metrics={**right, "agreement": tf.equal(answer, example)})


def train_teacher(config: RunConfig, steps: int) -> list[np.ndarray]:
    """Weights of a digits network after so many steps, on the same devices."""
    teacher = Digits(config.replace(train_steps=steps, run_dir=None), dropout=0.0)
    teacher.train(evaluate=False)
    return teacher.model.get_weights()


def main(command: flags.Command) -> int:
    """Trains the teacher, then the student."""
    if command.mode != "eval":  # there the checkpoint holds the teacher
        Distillation.teacher_weights = train_teacher(command.config, command.options["teacher_steps"])
    return train(command)


if __name__ == "__main__":
    sys.exit(flags.run(main, [sys.argv[0], "--task=distillation", *sys.argv[1:]], tasks={"distillation": Distillation}))
