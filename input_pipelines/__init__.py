"""Input pipelines: data as a function of (seed, position in examples)."""

from input_pipelines.array_record import from_array_record
from input_pipelines.arrays import from_arrays
from input_pipelines.augment import crop_and_flip
from input_pipelines.image_folder import image_folder
from input_pipelines.imagenet import imagenet
from input_pipelines.masking import MaskTokens
from input_pipelines.sequence import from_sequence
from input_pipelines.synthetic import synthetic
from input_pipelines.tabular import from_tsv
from input_pipelines.text import from_text, standard_library
from input_pipelines.tfds import from_tfds
from input_pipelines.tfrecord import tfrecords
from input_pipelines.tokens import from_tokens
from input_pipelines.views import TwoViews

__all__ = [
    "MaskTokens",
    "TwoViews",
    "crop_and_flip",
    "from_array_record",
    "from_arrays",
    "from_sequence",
    "from_text",
    "from_tfds",
    "from_tokens",
    "from_tsv",
    "image_folder",
    "imagenet",
    "standard_library",
    "synthetic",
    "tfrecords",
]
