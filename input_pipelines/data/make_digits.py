"""Makes ``digits.npz`` from the comma separated form of the data: ``python make_digits.py digits.csv.gz``.

Each line of the source holds the 64 pixels of an 8 x 8 image, 0 to 16, and then the label.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np

TEST_EXAMPLES = 360
SEED = 2021
PIXELS = 64


def choose_test(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """A mask `[N]`, bool, true for ``count`` examples, each class in proportion (largest remainders round up)."""
    classes, sizes = np.unique(labels, return_counts=True)
    shares = sizes * count / len(labels)
    counts = np.floor(shares).astype(int)
    short = count - counts.sum()
    counts[np.argsort(counts - shares, kind="stable")[:short]] += 1
    # RandomState, because NumPy promises that its stream never changes; that of default_rng may.
    rng = np.random.RandomState(seed)
    mask = np.zeros(len(labels), bool)
    for label, n in zip(classes, counts):
        mask[rng.permutation(np.flatnonzero(labels == label))[:n]] = True
    return mask


def main() -> None:
    """Writes the file; ValueError if the source is not of the expected form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="the data as .csv or .csv.gz")
    parser.add_argument("--output", default=pathlib.Path(__file__).with_name("digits.npz"))
    arguments = parser.parse_args()

    table = np.loadtxt(arguments.source, delimiter=",", dtype=np.int64, ndmin=2)
    pixels, labels = table[:, :-1], table[:, -1]
    if pixels.shape[1] != PIXELS or pixels.min() < 0 or pixels.max() > 16 or labels.min() < 0 or labels.max() > 9:
        raise ValueError(f"{arguments.source}: expected 64 pixels of 0 to 16 and a label of 0 to 9 on each line")
    images = pixels.reshape(-1, 8, 8).astype(np.uint8)
    labels = labels.astype(np.uint8)
    test = choose_test(labels, TEST_EXAMPLES, SEED)
    np.savez_compressed(
        arguments.output,
        train_images=images[~test],
        train_labels=labels[~test],
        test_images=images[test],
        test_labels=labels[test],
    )


if __name__ == "__main__":
    main()
