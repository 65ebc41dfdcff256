"""The digits data set: 1,797 real handwritten digits of 8 x 8 pixels, in the package."""

from __future__ import annotations

import pathlib

import numpy as np

from framework import LockstepError

_FILE = pathlib.Path(__file__).parent / "data" / "digits.npz"


def load(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 ``[examples, 8, 8]`` in 0..1 and labels int32 ``[examples]``; ``split`` is ``train`` or ``test``.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998,
    https://doi.org/10.24432/C50P49, CC BY 4.0.

    Raises:
      LockstepError: the file of the package is missing or damaged.
    """
    try:
        with np.load(_FILE, allow_pickle=False) as data:
            images, labels = data[f"{split}_images"], data[f"{split}_labels"]
    except (OSError, KeyError, ValueError) as error:
        raise LockstepError(f"cannot read {_FILE}: {error}; install lockstep-tf again") from error
    return images.astype(np.float32) / 16.0, labels.astype(np.int32)
