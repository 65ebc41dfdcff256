"""Noise as a function of (seed, step, micro-batch, replica, layer) and of nothing else.

Runs repeat, resumes repeat, and no two replicas, micro-batches or steps share a mask. Keras seed generators are set
before each forward pass; ``step_seed`` gives the same to ``tf.random.stateless_*``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from framework.errors import LockstepError
from framework.step.autograph import own

# A counter is step, micro-batch, replica and draw side by side in 63 bits, so that no two places share one.
_MICRO_BITS, _REPLICA_BITS, _DRAW_BITS = 10, 14, 8
_STEP_SHIFT = _MICRO_BITS + _REPLICA_BITS + _DRAW_BITS
MAX_MICRO_BATCHES = 2**_MICRO_BITS
_MASK_63 = 2**63 - 1
# Odd constants of SplitMix64 (Steele et al. 2014), as signed 64 bits.
_GOLDEN, _ODD = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the run a forward pass is."""

    seed: int
    step: tf.Tensor  # int64 scalar, 1 at the first step
    micro: Any = 0  # int or int scalar tensor

    def counter(self) -> tf.Tensor:
        """int64 scalar, different at every (step, micro-batch, replica); its low 8 bits are free for draws."""
        context = tf.distribute.get_replica_context()
        # Outside of replicas, where a model is built, as on the first one.
        replica = tf.cast(context.replica_id_in_sync_group if context else 0, tf.int64)
        micro = tf.cast(self.micro, tf.int64)
        return (
            tf.bitwise.left_shift(tf.cast(self.step, tf.int64), _STEP_SHIFT)
            + tf.bitwise.left_shift(micro, _REPLICA_BITS + _DRAW_BITS)
            + tf.bitwise.left_shift(replica, _DRAW_BITS)
        )


_thread = threading.local()  # each replica is traced in its own thread


@contextlib.contextmanager
def at(place: Place) -> Iterator[None]:
    """Makes ``place`` the one that ``step_seed`` and ``place_generators`` use inside the block."""
    before = getattr(_thread, "place", None)
    _thread.place = place
    try:
        yield
    finally:
        _thread.place = before


def here() -> Place:
    """The place of the forward pass that is being traced.

    Raises:
      LockstepError: called outside a training step.
    """
    place = getattr(_thread, "place", None)
    if place is None:
        raise LockstepError("step_seed() was called outside a training step; call it in compute_loss or train_step")
    return place


@own
def step_seed(name: str) -> tf.Tensor:
    """A seed for ``tf.random.stateless_*``: int64 ``[2]``, a function of (seed, step, micro-batch, replica, ``name``).

    Args:
      name: of the use, for example the layer's; two uses with one name share their numbers.

    Raises:
      LockstepError: called outside a training step.
    """
    place = here()
    return tf.stack([tf.constant((place.seed << 32 | zlib.crc32(name.encode())) & _MASK_63, tf.int64), place.counter()])


def seed_generators(variables: Sequence[tf.Variable], names: Sequence[str]) -> list[tf.Variable]:
    """The states of Keras seed generators among ``variables``: integer ``[2]``, named ``seed_generator_state``."""
    return [
        v
        for v, name in zip(variables, names, strict=True)
        if name.rpartition("/")[2] == "seed_generator_state" and v.dtype.is_integer and v.shape == [2]
    ]


def generator_seeds(states: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """The generators' own seeds, before ``place_generators`` mixes places into them."""
    return [state.read_value()[0] for state in states]


def place_generators(states: Sequence[tf.Variable], seeds: Sequence[tf.Tensor]) -> None:
    """Sets this replica's copies of the generators to the present place.

    Keras uses both words of a state modulo 2**31 - 2. The second holds the step and leaves 256 draws free; the first is
    the generator's seed mixed with micro-batch, replica and the step's high bits, so that two places share a state with
    a probability of 2**-31.
    """
    if not states:
        return
    place, high = here(), 22  # bits of the step in the second word
    counter = place.counter()
    step = tf.bitwise.right_shift(counter, _STEP_SHIFT)
    rest = tf.bitwise.bitwise_and(counter, tf.constant(2**_STEP_SHIFT - 1, tf.int64))
    code = rest + tf.bitwise.left_shift(tf.bitwise.right_shift(step, high), _STEP_SHIFT)
    word = tf.bitwise.left_shift(tf.bitwise.bitwise_and(step, tf.constant(2**high - 1, tf.int64)), _DRAW_BITS)
    for state, seed in zip(states, seeds, strict=True):
        mixed = tf.cast(seed, tf.int64) + code * tf.constant(_GOLDEN, tf.int64)
        mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, 29)) * tf.constant(_ODD, tf.int64)
        mixed = tf.bitwise.bitwise_and(mixed, tf.constant(_MASK_63, tf.int64)) % (2**31 - 2)
        state.assign(tf.cast(tf.stack([mixed, word]), state.dtype))


def reset_generators(states: Sequence[tf.Variable], seeds: Sequence[tf.Tensor]) -> None:
    """Puts seeds back and counters to 0: between steps all copies are equal, and there is nothing to save."""
    for state, seed in zip(states, seeds, strict=True):
        state.assign(tf.stack([seed, tf.zeros([], state.dtype)]))
