"""Sampling from a language model, one token at a time, with keys and values of the past kept."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from framework import ConfigError
from models.language_model import LanguageModel
from models.transformer import Cache


def generate(
    model: LanguageModel,
    prompt: Any,
    *,
    steps: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> tf.Tensor:
    """The prompt and ``steps`` tokens after it, int32 ``[batch, places + steps]``.

    The prompt goes through the model once; then each token takes the work of one place. A first call of
    its shape and settings compiles.

    Args:
      model: the model; its dropout is off.
      prompt: token ids ``[batch, places]``, at least one place.
      steps: tokens to make.
      temperature: logits are divided by it; 0: always the likeliest token.
      top_k: draw among so many likeliest tokens; 0: among all.
      seed: the tokens are a function of it, the prompt and the weights.

    Raises:
      ConfigError: a setting out of range, or more places than the model has positions for.
    """
    tokens = tf.cast(tf.convert_to_tensor(prompt), tf.int32)
    if tokens.shape.rank != 2 or not tokens.shape[1]:
        raise ConfigError(f"the prompt has shape {tokens.shape} but it must be [batch, places] with at least one place")
    if steps < 1 or temperature < 0.0 or top_k < 0:
        raise ConfigError(
            f"steps={steps}, temperature={temperature}, top_k={top_k}: steps must be at least 1, the others 0"
        )
    places = int(tokens.shape[1])
    if not model.shape.rope and places + steps > model.shape.length:
        raise ConfigError(
            f"a prompt of {places} and steps={steps} are {places + steps} places but the model has "
            f"{model.shape.length}; pass fewer, or use rotary positions"
        )
    if model.sampler is None:
        model.sampler = tf.function(functools.partial(_sampled, model), autograph=False)
    return model.sampler(tokens, tf.constant(seed), steps, temperature, min(top_k, model.shape.vocabulary))


def _sampled(
    model: LanguageModel, prompt: tf.Tensor, seed: tf.Tensor, steps: int, temperature: float, top_k: int
) -> tf.Tensor:
    places = prompt.shape[1]
    total = places + steps
    range_ = tf.range(places)
    logits, seen = model.run(prompt, range_, tf.where(range_[:, None] >= range_, 0.0, -1e9))
    room = [[0, 0], [0, 0], [0, steps], [0, 0]]
    caches = [Cache(tf.pad(c.keys, room), tf.pad(c.values, room)) for c in seen]
    tokens = tf.pad(prompt, [[0, 0], [0, steps]])

    def body(at: tf.Tensor, tokens: tf.Tensor, logits: tf.Tensor, caches: Any) -> Any:
        token = _pick(logits, temperature, top_k, tf.stack([seed, at]))
        tokens = tf.where(tf.equal(tf.range(total), at), token[:, None], tokens)
        bias = tf.where(tf.range(total) <= at, 0.0, -1e9)
        new, caches = model.run(token[:, None], at[None], bias, caches=caches)
        return at + 1, tokens, new[:, 0], caches

    start = (tf.constant(places), tokens, logits[:, -1], caches)
    return tf.while_loop(lambda at, *_: at < total, body, start, maximum_iterations=steps)[1]


def _pick(logits: tf.Tensor, temperature: float, top_k: int, seed: tf.Tensor) -> tf.Tensor:
    """A token int32 ``[batch]`` for logits ``[batch, vocabulary]``."""
    if temperature == 0.0:
        return tf.argmax(logits, 1, tf.int32)
    if top_k:
        least = tf.math.top_k(logits, top_k).values[:, -1:]
        logits = tf.where(logits < least, -1e9, logits)
    return tf.random.stateless_categorical(logits / temperature, 1, seed, tf.int32)[:, 0]
