"""Hidden tokens: how many, of what kind, never a document's end, and the same for an example wherever it comes."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError
from input_pipelines import MaskTokens, from_text, from_tokens
from input_pipelines.pack import write_tokens
from tests.input_pipelines.reading import assert_position_decides, read

MASK = 257


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(bytes(range(1 + 80 * i, 81 + 80 * i)))
    return tmp_path


def hide(ids: Any, **options: Any) -> dict[str, np.ndarray]:
    keys = np.stack([np.zeros(len(ids), np.int64), np.arange(len(ids))], 1)
    made = MaskTokens(**{"mask": 1000, "vocabulary": 1000, **options})((tf.constant(ids), None), tf.constant(keys))
    return {name: value.numpy() for name, value in made.items()}


def test_fifteen_of_a_hundred_are_to_be_told_and_shown_as_the_paper_says() -> None:
    """Of 15 hidden ids of each of 2,000 windows 80 % show the mask, 10 % any id, 10 % themselves."""
    ids = np.random.default_rng(0).integers(0, 1000, [2000, 100]).astype(np.int32)
    made = hide(ids)
    assert made["places"].shape == (2000, 15) and made["weights"].min() == 1.0
    assert all(len(set(row)) == 15 for row in made["places"].tolist())
    np.testing.assert_array_equal(made["targets"], np.take_along_axis(ids, made["places"], 1))
    shown = np.take_along_axis(made["inputs"], made["places"], 1)
    masked, same = shown == 1000, shown == made["targets"]
    assert abs(masked.mean() - 0.8) < 0.01 and abs(same.mean() - 0.1) < 0.01
    random = shown[~masked & ~same]
    assert abs(random.mean() - 499.5) < 30 and random.min() < 10 and random.max() > 990
    # Nothing else changed, and every place is as likely as any other.
    untouched = made["inputs"].copy()
    np.put_along_axis(untouched, made["places"], made["targets"], 1)
    np.testing.assert_array_equal(untouched, ids)
    counts = np.bincount(made["places"].ravel(), minlength=100)
    assert np.all(np.abs(counts - 300) < 6 * np.sqrt(300 * 0.85))


def test_ends_and_padding_are_never_chosen_and_short_windows_have_fewer_places(folder: pathlib.Path) -> None:
    data = from_text(folder, length=64, cross_documents=False, corrupt=MaskTokens(mask=MASK, vocabulary=257, keep=256))
    [batch] = read(data, 1, global_batch_size=6, training=False)
    # Documents of 80 bytes: windows of 64 bytes, and of 16 with the end behind them.
    assert batch["weights"].sum(1).tolist() == [10, 2] * 3  # 0.15 x 64 = 9.6, 0.15 x 16 = 2.4
    for row in range(6):
        real = batch["weights"][row] > 0
        assert 256 not in batch["targets"][row][real]
        assert np.all(batch["places"][row][real] < (64 if row % 2 == 0 else 16))
    assert batch["segments"][1].tolist() == [1] * 17 + [0] * 47
    assert np.all((batch["inputs"] == 256)[1::2, 16:])


def test_ids_of_a_window_of_ends_alone_are_left_alone() -> None:
    made = hide(np.full([1, 20], 7, np.int32), keep=7)
    assert made["weights"].tolist() == [[0.0] * 3] and np.all(made["inputs"] == 7)
    assert made["segments"].tolist() == [list(range(1, 21))]


def test_documents_of_a_token_file_are_told_apart_by_what_stood_there(folder: pathlib.Path) -> None:
    path = folder / "train.bin"
    documents = [np.arange(5), np.arange(5, 25)]
    write_tokens(documents, path, vocabulary_size=40, end_of_document=39)
    corrupt = MaskTokens(mask=38, vocabulary=40, share=1.0, keep=39)
    [batch] = read(from_tokens(path, length=26, corrupt=corrupt), 1, global_batch_size=1)
    assert batch["segments"].tolist() == [[1] * 6 + [2] * 20]
    assert batch["inputs"][0, 5] == 39 and batch["weights"].sum() == 25
    assert sorted(batch["targets"][batch["weights"] > 0].tolist()) == list(range(25))


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_seed_and_position_decide_what_is_hidden(folder: pathlib.Path, kind: str) -> None:
    corrupt = MaskTokens(mask=MASK, vocabulary=257)
    if kind == "text":
        data: Any = from_text(folder, length=16, corrupt=corrupt)
    else:
        write_tokens([np.arange(240)], folder / "t.bin", vocabulary_size=257)
        data = from_tokens(folder / "t.bin", length=16, corrupt=corrupt)
    assert_position_decides(data)
    first, second = read(data, 2, global_batch_size=data.size, training=False)
    [again] = read(data, 1, global_batch_size=data.size, training=False)
    np.testing.assert_array_equal(first["inputs"], again["inputs"])
    assert np.any(first["inputs"] != second["inputs"])  # another epoch


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"mask_share={share} but it must be above 0 and at most 1"):
        MaskTokens(mask=1, vocabulary=2, share=share)
