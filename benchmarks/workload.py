"""What is trained in a measurement: model, data, optimizer and batch, the same for every contender."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import networks

if TYPE_CHECKING:
    import keras


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A perceptron, its data and AdamW with a constant rate. It crosses to a contender's process as JSON.

    Attributes:
      data: ``digits`` (1,437 images of 64 pixels), ``library`` (the bytes of Python's own source, for the transformer)
        or ``random`` (4,096 vectors of ``features`` numbers).
      network: ``mlp``; ``resnet20`` on random 32 x 32 images; or ``transformer`` on random bytes, 128 a row.
      features: numbers in one example, of ``mlp``.
      hidden: units of each hidden layer, of ``mlp``.
      batch: examples in a step, over all replicas.
      replicas: on one process; more than one are logical CPU devices.
      learning_rate: of AdamW.
      weight_decay: of AdamW.
      seed: of weights and data order.
      threads: of TensorFlow's two pools, each; 0: TensorFlow's default, one a core.
      eval_every: steps between evaluations; 0: none.
      checkpoint_every: steps between checkpoints in a temporary run folder; 0: none, and nothing is written.
      start: file with weights and the order of examples, for contenders of other libraries; see ``benchmarks.start``.
    """

    data: str = "random"
    network: str = "mlp"
    features: int = 0
    hidden: tuple[int, ...] = ()
    batch: int
    replicas: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    seed: int = 0
    threads: int = 0
    eval_every: int = 0
    checkpoint_every: int = 0
    start: str = ""

    def __post_init__(self) -> None:
        if self.data not in ("digits", "library", "random"):
            raise ValueError(f"data={self.data!r} but it must be digits, library or random")
        if self.network not in networks.BUILDERS:
            raise ValueError(f"network={self.network!r} but it must be one of {', '.join(networks.BUILDERS)}")
        if self.batch % self.replicas:
            raise ValueError(f"batch={self.batch} with replicas={self.replicas}: the bare loop has no uneven shares")

    @property
    def figure(self) -> str:
        """What an evaluation tells: ``bits_per_byte`` of the transformer, else ``accuracy``."""
        return "bits_per_byte" if self.network == "transformer" else "accuracy"

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Workload:
        """The inverse of ``to_dict``, also after JSON made a list of a tuple."""
        return cls(**{**value, "hidden": tuple(value["hidden"])})


def set_threads(workload: Workload) -> None:
    """Sets TensorFlow's thread pools; call it before the first op."""
    import tensorflow as tf

    if workload.threads:
        tf.config.threading.set_inter_op_parallelism_threads(workload.threads)
        tf.config.threading.set_intra_op_parallelism_threads(workload.threads)


def arrays(workload: Workload, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Inputs ``[examples, ...]`` and labels int32 ``[examples]``, or ``[examples, positions]`` for the transformer."""
    if workload.data == "digits":
        from input_pipelines import digits

        images, labels = digits.load(split)
        return images.reshape(len(images), -1), labels
    if workload.data == "library":
        return _library("train" if split == "train" else "eval")
    random = np.random.default_rng(0 if split == "train" else 1)
    if workload.network == "transformer":
        tokens = random.integers(0, networks.BYTES, (1024, networks.LENGTH + 1)).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (32, 32, 3) if workload.network == "resnet20" else (workload.features,)
    # Enough that ResNet-20 does not know them by heart soon: then losses of rounding errors apart would drift apart.
    inputs = random.standard_normal((4096, *shape), np.float32)
    return inputs, random.integers(0, 10, 4096).astype(np.int32)


def _library(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Windows of source files, joined; of those for evaluation the first 256."""
    from input_pipelines.text import read_document, standard_library

    data = np.concatenate([read_document(path) for path in standard_library(split)]).astype(np.int32)
    rows = (len(data) - 1) // networks.LENGTH
    places = np.arange(rows)[:, None] * networks.LENGTH + np.arange(networks.LENGTH)
    places = places if split == "train" else places[:256]
    return data[places], data[places + 1]


def build_model(workload: Workload) -> keras.Model:
    """The network: inputs -> logits; seed Keras before, for equal weights."""
    import keras

    return networks.BUILDERS[workload.network](keras, workload.features, workload.hidden)
