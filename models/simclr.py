"""Learning from pairs of views (Chen et al. 2020, "A Simple Framework for Contrastive Learning", SimCLR)."""

from __future__ import annotations

import keras
import tensorflow as tf

from framework import all_gather
from models.resnet import cifar_resnet


def simclr(
    depth: int,
    *,
    image_size: int,
    channels: int = 3,
    classes: int,
    width: int = 64,
    sync_batch_norm: bool = True,
) -> keras.Model:
    """Images ``[batch, size, size, channels]`` -> (embedding ``[batch, width]``, logits ``[batch, classes]``), float32.

    A residual network for small images gives features; two layers above them make the embedding (section 2.1), and one
    layer tells the class, which no gradient passes back from: it says how good the features are and does not change
    them.

    Args:
      depth: of the residual network, 6n + 2.
      image_size: in pixels.
      channels: of a pixel.
      classes: logits.
      width: of the embedding, and of the layer before it.
      sync_batch_norm: statistics over all replicas; else pairs on one replica may be found by their statistics.
    """
    encoder = cifar_resnet(
        depth, num_classes=0, sync_batch_norm=sync_batch_norm, image_size=image_size, channels=channels
    )
    features = encoder.output
    x = keras.layers.Dense(width, activation="relu", name="projection1")(features)
    x = keras.layers.Dense(width, use_bias=False, dtype="float32", name="projection2")(x)
    logits = keras.layers.Dense(classes, dtype="float32", name="probe")(keras.ops.stop_gradient(features))
    return keras.Model(encoder.input, [x, logits], name="simclr")


def nt_xent(first: tf.Tensor, second: tf.Tensor, temperature: float) -> tuple[tf.Tensor, tf.Tensor]:
    """The normalised, temperature-scaled cross-entropy of equation 1 over the global batch; call it in replica context.

    View a of example i is to be closer to its partner b than to any other view of the global batch, of all replicas:
    the others' and its own. Gradients flow back to the replica that an embedding comes from.

    Args:
      first: embeddings of one view of this replica's examples, float32 ``[rows, width]``; of any length.
      second: those of the other view.
      temperature: similarities are divided by it.

    Returns:
      The loss of each example, the mean of its two views', float32 ``[rows]``; and whether the first view's partner is
      the most similar one of all, bool ``[rows]``.
    """
    first, second = tf.math.l2_normalize(first, 1), tf.math.l2_normalize(second, 1)
    width, rows = first.shape[1], tf.shape(first)[0]
    # Who an embedding belongs to travels with it: one gathering, also where replicas have unequal parts.
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    name = tf.stack([tf.fill([rows], tf.cast(replica, tf.float32)), tf.cast(tf.range(rows), tf.float32)], 1)
    everyone = all_gather(tf.concat([first, second, name], 1))
    all_first, all_second, names = tf.split(everyone, [width, width, 2], 1)
    itself = tf.reduce_all(tf.equal(name[:, None], names[None]), 2)

    def loss(view: tf.Tensor, same: tf.Tensor, other: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        near = tf.where(itself, -1e9, tf.matmul(view, same, transpose_b=True) / temperature)
        across = tf.matmul(view, other, transpose_b=True) / temperature
        partner = tf.reduce_sum(tf.where(itself, across, 0.0), 1)
        every = tf.concat([near, across], 1)
        return tf.reduce_logsumexp(every, 1) - partner, partner >= tf.reduce_max(every, 1)

    (one, found), (two, _) = loss(first, all_first, all_second), loss(second, all_second, all_first)
    return (one + two) / 2.0, found
