"""The common start for contenders of other libraries: ``python -m benchmarks.start WORKLOAD STEPS FILE``.

The file (NumPy's ``.npz``) holds every trainable weight of the Keras model by its path, such as ``dense_1/kernel``, and
``order``: int64 ``[steps, batch]``, the examples of each step; and the data, unless they are random numbers that NumPy
makes anywhere. So another library trains the same model from the same
weights on the same examples, and its losses must be the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks.process import ROOT
from benchmarks.workload import Workload, arrays, build_model


def write(workload: Workload, steps: int, path: str) -> None:
    """Writes the file, in a process of its own: the caller stays free of TensorFlow.

    Raises:
      RuntimeError: the process failed.
    """
    command = [sys.executable, "-m", "benchmarks.start", json.dumps(workload.to_dict()), str(steps), path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"benchmarks.start ended with code {done.returncode}\n{done.stderr[-2000:]}")


def weights(path: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Weights by path, and the order of examples."""
    with np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files if not name.startswith("data/")}
    return found, found.pop("order")


def data(workload: Workload, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """As ``workload.arrays``, from the file where it holds them: reading real data there would load TensorFlow."""
    if workload.data == "random":
        return arrays(workload, split)
    with np.load(workload.start, allow_pickle=False) as file:
        return file[f"data/{split}/inputs"], file[f"data/{split}/labels"]


def weight_name(path: str) -> str:
    """A variable's path without the model's own name, and without TensorFlow's number behind it."""
    parts = path.partition(":")[0].split("/")
    return "/".join(parts[1:] if parts[0].startswith(("sequential", "functional", "model")) else parts)


def main(argv: Sequence[str]) -> None:
    """The process's work."""
    import keras
    import tensorflow as tf

    from input_pipelines.order import example_indices

    spec: dict[str, Any] = json.loads(argv[0])
    workload, steps = Workload.from_dict(spec), int(argv[1])
    keras.utils.set_random_seed(workload.seed)
    model = build_model(workload)
    count = len(arrays(workload)[0])
    order = example_indices(tf.range(steps * workload.batch, dtype=tf.int64), count, workload.seed, True)
    named = {weight_name(v.path): v.numpy() for v in model.trainable_variables}
    if workload.data != "random":
        for split in ("train", "test"):
            named[f"data/{split}/inputs"], named[f"data/{split}/labels"] = arrays(workload, split)
    np.savez(argv[2], order=order.numpy().reshape(steps, workload.batch), **named)


if __name__ == "__main__":
    main(sys.argv[1:])
