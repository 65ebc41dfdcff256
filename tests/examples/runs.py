"""What tests of the examples share: short runs whose every step is recorded, and comparisons of weights."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from framework import Trainer
from tests.helpers import assert_copies_equal, records, settings


def trained(
    kind: type[Trainer], folder: pathlib.Path, replicas: int, **changes: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """A trainer after a short run of SGD, and the record of each step; every replica's copies are equal bit for bit."""
    config = settings(
        **{"run_dir": folder / f"{kind.__name__}{replicas}", "num_replicas": replicas}
        | {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.0, "train_steps": 10, "global_batch_size": 12}
        | changes
    )
    trainer = kind(config)
    trainer.train(evaluate=False)
    assert trainer.local_replicas == replicas
    assert_copies_equal(trainer)
    return trainer, records(config.run_dir)


def weights(model: Any) -> dict[str, np.ndarray]:
    """Every variable of a Keras model by its path."""
    return {v.path: v.numpy() for v in model.variables}


def assert_close(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    """Every variable differs by at most ``tolerance`` of itself, or of its variable's largest element."""
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        atol = tolerance * float(np.abs(theirs[name]).max())
        np.testing.assert_allclose(value, theirs[name], rtol=tolerance, atol=atol, err_msg=name)


def assert_moved(before: dict[str, np.ndarray], after: dict[str, np.ndarray], prefix: str = "") -> None:
    """Every variable whose path begins with ``prefix`` has changed, and there is one."""
    names = [n for n in before if n.startswith(prefix)]
    assert names
    assert not [n for n in names if np.array_equal(before[n], after[n])]


def assert_same(before: dict[str, np.ndarray], after: dict[str, np.ndarray], prefix: str = "") -> None:
    """Every variable whose path begins with ``prefix`` is the same bit for bit, and there is one."""
    names = [n for n in before if n.startswith(prefix)]
    assert names
    for name in names:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def initial(kind: type[Trainer], **changes: Any) -> Any:
    """The model as it is before the first step, on one replica."""
    return kind(settings(**changes)).model
