"""Task ``masked_language``: a small BERT that fills in hidden bytes, by default of Python's own source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from framework import ConfigError, LossOutput, Signature, Trainer
from input_pipelines import MaskTokens
from input_pipelines.tokens import BYTES_VOCABULARY
from models import text_data
from models.bert import Bert, BertShape
from models.options import option
from models.transformer import check_recompute


class MaskedLanguage(Trainer):
    """What stands at hidden places of a text; a model to fine-tune, in the shapes of BERT."""

    recipe: ClassVar[dict[str, Any]] = {
        "train_steps": 2000,
        "global_batch_size": 16,
        "eval_batch_size": 64,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "decay_exclude": "bias,gamma,beta",
        "schedule": "cosine",
        "schedule_end": 0.1,
        "warmup_steps": 200,
        "clip_global_norm": 1.0,
        "log_every": 100,
    }

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        length: int = option(128, "Tokens in a window.")
        width: int = option(128, "Width of the residual stream.")
        layers: int = option(4, "Blocks.")
        heads: int = option(4, "Heads of each attention.")
        rope: bool = option(True, "Rotary positions; else learnt ones, as BERT has them.")
        dropout: float = option(0.0, "Share dropped while training.")
        recompute: bool = option(False, "Compute each block again for its gradients, and keep less in memory.")
        data_dir: str = option("", "Folder with text, or with train.bin and eval.bin; empty: Python's library.")
        pattern: str = option("*.txt", "Pattern of the names of text files in data_dir.")
        separate_documents: bool = option(False, "Whether attention stays inside a document.")
        mask_share: float = option(0.15, "Share of the tokens that are to be told.")
        mask_id: int = option(-1, "The token that hides others; -1: one more than the data have.")

        def __post_init__(self) -> None:
            self.shape(BYTES_VOCABULARY)
            MaskTokens(mask=0, vocabulary=1, share=self.mask_share)

        def shape(self, vocabulary: int) -> BertShape:
            """The model's sizes; ConfigError if they do not go together."""
            return BertShape(
                vocabulary=vocabulary,
                length=self.length,
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                rope=self.rope,
                dropout=self.dropout,
                recompute=self.recompute,
            )

    def build_model(self) -> Bert:
        """Logits ``[batch, count, vocabulary]`` at places ``[batch, count]`` of ids ``[batch, length]``."""
        check_recompute(self, self.options.recompute)
        mask, vocabulary = self._mask()
        return Bert(self.options.shape(max(vocabulary, mask + 1)))

    def train_data(self) -> Any:
        """Windows of the training files, shuffled; other places are hidden in each epoch."""
        return self._data("train")

    def eval_data(self) -> Any:
        """Windows of the files that are not trained on, with the same places hidden each time; None without any."""
        return self._data("eval")

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """Cross-entropy in nats per hidden token, and whether the likeliest token is the right one."""
        segments = batch.get("segments")
        if segments is not None and not self.options.separate_documents:
            # Only padding is to be told from text, and token files have none.
            segments = None if text_data.packed(self.options.data_dir) else tf.minimum(segments, 1)
        logits = model(batch["inputs"], places=batch["places"], segments=segments, training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["targets"], logits)
        right = tf.equal(tf.argmax(logits, 2, tf.int32), batch["targets"])
        return LossOutput(loss=loss, weight=batch["weights"], metrics={"accuracy": right})

    def signatures(self) -> Mapping[str, Signature]:
        """``serving_default``: ids int32 ``[batch, length]`` -> logits ``[batch, length, vocabulary]``; ``encode``.

        ``encode`` gives what became of each place, ``[batch, length, width]``.
        """
        spec = tf.TensorSpec([None, self.options.length], tf.int32)
        return {
            "serving_default": Signature(spec=spec, function=lambda model, ids: model(ids, training=False)),
            "encode": Signature(spec=spec, function=lambda model, ids: model.encode(ids)),
        }

    def _mask(self) -> tuple[int, int]:
        """The id that hides others, and the data's vocabulary."""
        vocabulary, mask = text_data.vocabulary(self.options.data_dir), self.options.mask_id
        if not -1 <= mask < vocabulary:
            raise ConfigError(
                f"mask_id={mask} but it must be below the vocabulary of {vocabulary}; pass the id that the data keep "
                "for it, or -1 for one more than they have"
            )
        return (vocabulary if mask == -1 else mask), vocabulary

    def _data(self, split: str) -> Any:
        o, (mask, vocabulary) = self.options, self._mask()
        end = text_data.document_end(o.data_dir, needed=o.separate_documents)
        corrupt = MaskTokens(mask=mask, vocabulary=vocabulary, share=o.mask_share, keep=end)
        return text_data.windows(o.data_dir, split, length=o.length, pattern=o.pattern, corrupt=corrupt)
