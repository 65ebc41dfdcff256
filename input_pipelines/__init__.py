"""Input pipelines: data as a function of (seed, position in examples)."""

from input_pipelines.array_record import from_array_record
from input_pipelines.arrays import from_arrays
from input_pipelines.sequence import from_sequence
from input_pipelines.synthetic import synthetic
from input_pipelines.tabular import from_tsv
from input_pipelines.text import from_text, standard_library
from input_pipelines.tfds import from_tfds
from input_pipelines.tokens import from_tokens

__all__ = [
    "from_array_record",
    "from_arrays",
    "from_sequence",
    "from_text",
    "from_tfds",
    "from_tokens",
    "from_tsv",
    "standard_library",
    "synthetic",
]
