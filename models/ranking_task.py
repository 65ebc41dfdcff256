"""Task ``ranking``: whether a shown advertisement was clicked, from a table in Criteo's format."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar

import keras
import tensorflow as tf

from framework import ConfigError, LossOutput, Trainer
from input_pipelines import from_tsv
from models.options import option
from models.ranking import ranking

_NUMBERS, _CATEGORIES = 13, 26


class Ranking(Trainer):
    """Clicks from 13 numbers and 26 categories."""

    recipe: ClassVar[dict[str, Any]] = {
        "train_epochs": 1,
        "global_batch_size": 512,
        "optimizer": "adam",
        "learning_rate": 2e-3,
        "log_every": 100,
    }

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        data_dir: str = option("", "Folder with train.tsv and, if there is one, eval.tsv.")
        buckets: int = option(10_000, "Ids of each category.")
        width: int = option(16, "Numbers of each embedding.")
        hidden: int = option(64, "Units of the hidden layers.")
        skip_bad_examples: int = option(0, "So many bad lines are borne.")
        in_memory: bool = option(False, "Read the files into memory.")

        def __post_init__(self) -> None:
            if not self.data_dir:
                raise ConfigError(
                    "data_dir is empty but the task ranking needs a folder with train.tsv, in Criteo's format of a "
                    "label, 13 numbers and 26 categories a line; pass --data_dir=FOLDER"
                )

    def build_model(self) -> keras.Model:
        """Logits ``[batch]``."""
        o = self.options
        return ranking(
            numbers=_NUMBERS, buckets=[o.buckets] * _CATEGORIES, width=o.width, bottom=[o.hidden], top=[o.hidden]
        )

    def train_data(self) -> Any:
        """The lines of ``train.tsv``, shuffled."""
        return self._data("train.tsv")

    def eval_data(self) -> Any:
        """The lines of ``eval.tsv``; None without it."""
        return self._data("eval.tsv") if (pathlib.Path(self.options.data_dir) / "eval.tsv").exists() else None

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """Cross-entropy per line in nats, and whether the likelier label is right."""
        label, weight = batch["label"], batch["weight"]
        logits = model([batch["dense"], batch["sparse"]], training=training)
        loss = tf.nn.sigmoid_cross_entropy_with_logits(label, logits)
        return LossOutput(loss=loss, weight=weight, metrics={"accuracy": tf.equal(logits > 0.0, label > 0.5)})

    def _data(self, name: str) -> Any:
        o = self.options
        return from_tsv(
            pathlib.Path(o.data_dir) / name,
            buckets=o.buckets,
            in_memory=o.in_memory,
            skip_bad_examples=o.skip_bad_examples,
        )
