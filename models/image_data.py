"""Images and labels by the name of the data set, for the tasks that train on several of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from framework import ConfigError
from input_pipelines import cifar, crop_and_flip, digits, from_arrays, imagenet, images
from input_pipelines.augment import Augment


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSet:
    """What a model must know of a data set; images are uint8 ``[rows, size, size, channels]``, labels int32 ``[rows]``.

    Attributes:
      name: ``digits``, ``cifar10``, ``cifar100`` or ``imagenet``.
      size: in pixels.
      channels: of a pixel.
      classes: labels are below it.
      patch: pixels of the side of a patch that suits the images.
      mean: of the training images by channel, in 0..255.
      std: their standard deviation.
      padding: pixels by which a training image is shifted at most.
      flip: whether mirrored images are images of the same class.
    """

    name: str
    size: int
    channels: int = 3
    classes: int
    patch: int
    mean: Sequence[float]
    std: Sequence[float]
    padding: int = 4
    flip: bool = True

    def normalized(self, pixels: tf.Tensor) -> tf.Tensor:
        """Float32 of mean 0 and deviation 1 by channel."""
        return images.normalize(pixels, self.mean, self.std)

    def data(self, data_dir: str, split: str, augment: Augment | None = None) -> Any:
        """A pipeline of images and labels.

        Args:
          data_dir: directory of the files; empty for ``digits``, which come with the package.
          split: ``train`` or ``test``.
          augment: of training, see ``from_arrays``; None: random shifts and mirrors. ImageNet has its own.

        Raises:
          ConfigError: the files are missing, or not of the format.
        """
        if self.name == "imagenet":
            return imagenet(data_dir, "train" if split == "train" else "validation", image_size=self.size)
        usual = crop_and_flip(padding=self.padding, flip=self.flip, fill=self.mean)
        return from_arrays(self.arrays(data_dir, split), augment=augment or usual)

    def arrays(self, data_dir: str, split: str) -> tuple[np.ndarray, np.ndarray]:
        """All images and labels of a split, of the sets that fit into memory."""
        if self.name == "digits":
            if data_dir:
                raise ConfigError(f"data_dir={data_dir} with data=digits, which come with the package; leave it out")
            pixels, labels = digits.load(split)
            return np.round(255.0 * pixels).astype(np.uint8)[..., None], labels
        load = cifar.load_cifar10 if self.name == "cifar10" else cifar.load_cifar100
        return load(data_dir, split)


_DIGITS = ImageSet(
    name="digits", size=8, channels=1, classes=10, patch=2, mean=(77.9,), std=(95.9,), padding=1, flip=False
)
_CIFAR10 = ImageSet(name="cifar10", size=32, classes=10, patch=4, mean=cifar.MEAN, std=cifar.STD)
_CIFAR100 = ImageSet(name="cifar100", size=32, classes=100, patch=4, mean=(129.3, 124.1, 112.4), std=(68.2, 65.4, 70.4))
_IMAGENET = ImageSet(name="imagenet", size=224, classes=1000, patch=16, mean=images.MEAN, std=images.STD)
_SETS = {s.name: s for s in (_DIGITS, _CIFAR10, _CIFAR100, _IMAGENET)}
SMALL_SETS = ("digits", "cifar10", "cifar100")  # those that fit into memory


def image_set(name: str, *, image_size: int = 0) -> ImageSet:
    """The data set ``name``.

    Args:
      name: one of the names that ``ImageSet`` knows.
      image_size: in pixels, of ``imagenet``, whose images are cut and scaled to it; 0: the usual size.

    Raises:
      ConfigError: another name, or a size for images that have theirs.
    """
    if name not in _SETS:
        raise ConfigError(f"data={name!r} but it must be one of {', '.join(_SETS)}")
    found = _SETS[name]
    if not image_size:
        return found
    if name != "imagenet":
        raise ConfigError(
            f"image_size={image_size} with data={name}, whose images have {found.size} pixels; leave it out"
        )
    return dataclasses.replace(found, size=image_size)
