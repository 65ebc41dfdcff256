"""Input pipelines: data as a function of (seed, position in examples)."""

from input_pipelines.arrays import from_arrays
from input_pipelines.augment import crop_and_flip
from input_pipelines.image_folder import image_folder
from input_pipelines.imagenet import imagenet
from input_pipelines.synthetic import synthetic
from input_pipelines.tfrecord import tfrecords

__all__ = ["crop_and_flip", "from_arrays", "image_folder", "imagenet", "synthetic", "tfrecords"]
