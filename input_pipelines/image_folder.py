"""A directory of images with one sub-directory for each class."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from framework import ConfigError
from input_pipelines import files, images
from input_pipelines.examples import ExamplePipeline

_SUFFIXES = (".jpg", ".jpeg", ".png")


class ImageFolder(ExamplePipeline):
    """See ``image_folder``.

    Attributes:
      class_names: names of the sub-directories, sorted; a label is a place in this list.
    """

    def __init__(self, data_dir: str | os.PathLike[str], *, image_size: int, skip_bad_examples: int):
        if image_size < 1:
            raise ConfigError(f"image_size={image_size} but it must be at least 1; for example image_size=224")
        folder = files.folder_at(data_dir, "data_dir", "data/train")
        self.class_names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        if not self.class_names:
            raise ConfigError(f"{folder} has no sub-directory but it must have one for each class")
        paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(self.class_names):
            found = _images(os.path.join(folder, name))
            if not found:
                raise ConfigError(
                    f"{folder / name} has no file that ends with {', '.join(_SUFFIXES)}; put images there, or remove it"
                )
            paths += found
            labels += [label] * len(found)
        with tf.device("CPU:0"):  # tensors and not constants: they would be copied into every graph
            path_of, label_of = tf.constant(paths), tf.constant(np.array(labels, np.int32))

        def load(number: tf.Tensor, key: tf.Tensor, training: bool) -> Any:
            encoded = tf.io.read_file(tf.gather(path_of, number))
            image = images.decode(encoded, key, size=image_size, training=training)
            return image, tf.gather(label_of, number)

        super().__init__(
            size=len(paths), load=load, skip_bad_examples=skip_bad_examples, describe=lambda number: paths[number]
        )


def image_folder(data_dir: str | os.PathLike[str], *, image_size: int = 224, skip_bad_examples: int = 0) -> ImageFolder:
    """Images uint8 ``[rows, image_size, image_size, 3]`` and labels int32 ``[rows]`` from ``data_dir/CLASS/IMAGE``.

    Training takes a random part of each image and mirrors half of them, evaluation the middle; see ``images.decode``.

    Args:
      data_dir: directory with one sub-directory for each class, with files ``.jpg``, ``.jpeg`` or ``.png``. Classes are
        numbered in the order of their names, files in that of class and name.
      image_size: in pixels.
      skip_bad_examples: so many images that cannot be read or decoded are replaced by the next readable one, with a
        warning that names the file; one more ends the run.

    Raises:
      ConfigError: the directory is missing or has no class, a class has no image, or the first image cannot be decoded.
    """
    return ImageFolder(data_dir, image_size=image_size, skip_bad_examples=skip_bad_examples)


def _images(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.lower().endswith(_SUFFIXES) and not e.name.startswith(".")]
    return [os.path.join(folder, name) for name in sorted(names)]
