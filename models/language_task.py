"""Task ``language``: a small GPT on bytes, by default of Python's own source; minutes on a laptop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from framework import LockstepError, LossOutput, Signature, Trainer
from input_pipelines.tokens import BYTES_VOCABULARY, END_OF_DOCUMENT
from models import text_data
from models.generate import generate
from models.language_model import LanguageModel, LanguageShape
from models.options import option
from models.transformer import check_recompute


class Language(Trainer):
    """The next byte, or the next token of a token file."""

    recipe: ClassVar[dict[str, Any]] = {
        "train_steps": 600,
        "global_batch_size": 16,
        "eval_batch_size": 64,
        "optimizer": "adamw",
        "learning_rate": 2e-3,
        "beta_2": 0.99,
        "weight_decay": 0.1,
        "decay_exclude": "bias,gamma,beta",
        "schedule": "cosine",
        "schedule_end": 0.1,
        "warmup_steps": 50,
        "clip_global_norm": 1.0,
        "log_every": 50,
    }

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        length: int = option(128, "Tokens in a window.")
        width: int = option(128, "Width of the residual stream.")
        layers: int = option(4, "Blocks.")
        heads: int = option(4, "Heads of each attention.")
        rope: bool = option(True, "Rotary positions; else learnt ones.")
        dropout: float = option(0.0, "Share dropped while training.")
        recompute: bool = option(False, "Compute each block again for its gradients, and keep less in memory.")
        data_dir: str = option("", "Folder with text, or with train.bin and eval.bin; empty: Python's library.")
        pattern: str = option("*.txt", "Pattern of the names of text files in data_dir.")
        separate_documents: bool = option(False, "Whether attention stays inside a document.")

        def __post_init__(self) -> None:
            self.shape(BYTES_VOCABULARY)

        def shape(self, vocabulary: int) -> LanguageShape:
            """The model's sizes; ConfigError if they do not go together."""
            return LanguageShape(
                vocabulary=vocabulary,
                length=self.length,
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                rope=self.rope,
                dropout=self.dropout,
                recompute=self.recompute,
            )

    def build_model(self) -> LanguageModel:
        """Logits ``[batch, length, vocabulary]`` from ids ``[batch, length]``."""
        check_recompute(self, self.options.recompute)
        return LanguageModel(self.options.shape(self._vocabulary))

    def train_data(self) -> Any:
        """Windows of the training files, shuffled."""
        return self._data("train")

    def eval_data(self) -> Any:
        """Windows of the files that are not trained on; None if there are none."""
        return self._data("eval")

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """Cross-entropy in nats per token; whether the likeliest token is right; and, of bytes, bits per byte."""
        if not isinstance(batch, dict):
            batch = {"inputs": batch[0], "targets": batch[1]}
        targets, weights = batch["targets"], batch.get("weights")
        logits = model(batch["inputs"], segments=self._segments(batch), training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
        metrics: dict[str, Any] = {"accuracy": tf.equal(tf.argmax(logits, 2, tf.int32), targets)}
        if self._vocabulary == BYTES_VOCABULARY:
            is_byte = tf.cast(targets != END_OF_DOCUMENT, tf.float32)
            metrics["bits_per_byte"] = (loss / math.log(2.0), is_byte if weights is None else weights * is_byte)
        return LossOutput(loss=loss, weight=weights, metrics=metrics)

    def units_per_example(self) -> Mapping[str, float]:
        """Tokens of a window."""
        return {"tokens": float(self.options.length)}

    def signatures(self) -> Mapping[str, Signature]:
        """``serving_default``: ids int32 ``[batch, length]`` -> logits of the token after each.

        With a vocabulary of bytes also ``text``: strings ``[batch]``, of which the last ``length`` bytes are read ->
        ``logits`` ``[batch, vocabulary]`` of the byte that follows, and ``next``, the likeliest, int64 ``[batch]``.
        """
        length = self.options.length

        def of_ids(model: Any, ids: tf.Tensor) -> tf.Tensor:
            return model(ids, training=False)

        def of_text(model: Any, inputs: Any) -> dict[str, tf.Tensor]:
            size = tf.strings.length(inputs["text"])
            used = tf.clip_by_value(size, 1, length)
            last = tf.strings.substr(inputs["text"], tf.maximum(size - length, 0), tf.minimum(size, length))
            # Zeros after the end of a short text: no place sees what follows it.
            ids = tf.io.decode_raw(last, tf.uint8, fixed_length=length)
            logits = tf.gather(model(tf.cast(ids, tf.int32), training=False), used - 1, axis=1, batch_dims=1)
            return {"logits": logits, "next": tf.argmax(logits, -1)}

        ids = Signature(spec=tf.TensorSpec([None, length], tf.int32), function=of_ids)
        if self._vocabulary != BYTES_VOCABULARY:
            return {"serving_default": ids}
        text = Signature(spec={"text": tf.TensorSpec([None], tf.string)}, function=of_text)
        return {"serving_default": ids, "text": text}

    def sample(self, prompt: str, *, steps: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
        """``prompt`` and what the model of a vocabulary of bytes writes after it, up to a document's end.

        Raises:
          LockstepError: nothing was trained, or restored by ``train`` or ``evaluate``, before.
        """
        if not self.step:
            raise LockstepError("sample() of a model that was not trained; call train() or evaluate() before")
        ids = [list(prompt.encode("utf-8"))]
        with self.averaged_weights():
            made = generate(self.model, ids, steps=steps, temperature=temperature, seed=seed).numpy()[0]
        written = made[: list(made).index(END_OF_DOCUMENT)] if END_OF_DOCUMENT in made else made
        return bytes(written.astype("uint8")).decode("utf-8", "replace")

    def _segments(self, batch: Any) -> tf.Tensor | None:
        """Numbers of the documents in a window, where attention is to stay inside of them."""
        if not self.options.separate_documents or "segments" in batch:
            return batch["segments"] if self.options.separate_documents else None
        end = text_data.document_end(self.options.data_dir, needed=True)
        return 1 + tf.cumsum(tf.cast(batch["inputs"] == end, tf.int32), 1, exclusive=True)

    @property
    def _vocabulary(self) -> int:
        return text_data.vocabulary(self.options.data_dir)

    def _data(self, split: str) -> Any:
        o = self.options
        return text_data.windows(o.data_dir, split, length=o.length, pattern=o.pattern)
