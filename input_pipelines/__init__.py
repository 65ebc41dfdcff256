"""Input pipelines: data as a function of (seed, position in examples)."""

from input_pipelines.arrays import from_arrays
from input_pipelines.synthetic import synthetic

__all__ = ["from_arrays", "synthetic"]
