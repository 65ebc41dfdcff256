"""Token files: windows by number, and refusal of files that do not agree with what is said of them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines import from_tokens
from input_pipelines.tokens import open_tokens
from tests.input_pipelines.reading import assert_position_decides, assert_reads_once_in_order, read


def write(folder: pathlib.Path, ids: Any, stored: str = "<u2", **changes: Any) -> pathlib.Path:
    """A token file written byte by byte as the format says, not by the code under test."""
    path = folder / "some.bin"
    path.write_bytes(np.asarray(ids).astype(stored).tobytes())
    said = {
        "format": "lockstep-tokens",
        "version": 1,
        "dtype": {"<u2": "uint16", "<u4": "uint32"}[stored],
        "vocabulary_size": 300 if stored == "<u2" else 100_000,
        "count": len(ids),
        "end_of_document": None,
    }
    path.with_suffix(".json").write_text(json.dumps({**said, **changes}))
    return path


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_window_is_a_piece_of_the_file_and_its_targets_are_one_place_on(
    tmp_path: pathlib.Path, dtype: str, resident: bool
) -> None:
    ids = np.random.default_rng(0).integers(0, 300 if dtype == "<u2" else 100_000, 50)
    data = from_tokens(write(tmp_path, ids, dtype), length=6, resident=resident)
    assert data.size == 8  # 49 targets: 8 windows of 6, and 1 left over
    [(inputs, targets)] = read(data, 1, global_batch_size=8, training=False)
    assert inputs.dtype == targets.dtype == np.int32
    np.testing.assert_array_equal(inputs, ids[:48].reshape(8, 6))
    np.testing.assert_array_equal(targets, ids[1:49].reshape(8, 6))


@pytest.mark.parametrize("resident", [True, False])
def test_seed_and_position_decide_the_order(tmp_path: pathlib.Path, resident: bool) -> None:
    data = from_tokens(write(tmp_path, np.arange(73)), length=8, resident=resident)
    assert_position_decides(data)
    assert_reads_once_in_order(data, np.arange(0, 72, 8), lambda batch: batch[0][:, 0])
    [(inputs, _)] = read(data, 1, global_batch_size=18, seed=1)
    first, second = inputs[:9, 0].tolist(), inputs[9:, 0].tolist()
    assert sorted(first) == sorted(second) == list(range(0, 72, 8))
    assert first != second
    [(other, _)] = read(data, 1, global_batch_size=9, seed=2)
    assert other[:, 0].tolist() != first


def test_a_mapped_and_a_resident_file_give_the_same(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, np.arange(40))
    a, b = (read(from_tokens(path, length=5, resident=r), 3, global_batch_size=4) for r in (True, False))
    tf.nest.map_structure(np.testing.assert_array_equal, a, b)


def test_a_mapped_file_is_not_read_as_a_whole(tmp_path: pathlib.Path) -> None:
    """A file of 8 GB that has no blocks on the disk: reading it would take its size in memory."""
    path = write(tmp_path, [], "<u4", count=2**31)
    with path.open("r+b") as file:
        file.truncate(4 * 2**31)
        file.seek(4 * (2**31 - 64))
        file.write(np.arange(7, 71).astype("<u4").tobytes())
    data = from_tokens(path, length=64)
    assert data.size == 2**25 - 1
    [(inputs, targets)] = read(data, 1, global_batch_size=1, start=2**25 - 2, training=False)
    np.testing.assert_array_equal(inputs, np.zeros([1, 64]))
    np.testing.assert_array_equal(targets, [[0] * 63 + [7]])


def test_shapes_are_static(tmp_path: pathlib.Path) -> None:
    for resident in (True, False):
        data = from_tokens(write(tmp_path, np.arange(40)), length=5, resident=resident)
        for batch, rows in ((4, 2), (5, None)):
            spec = data.batches(BatchPlan(global_batch_size=batch, num_replicas=2, local_replicas=2)).element_spec
            assert [s.shape.as_list() for s in spec] == [[rows, 5], [rows, 5]]


def test_what_the_side_file_says_is_known(tmp_path: pathlib.Path) -> None:
    file = open_tokens(write(tmp_path, np.arange(40), end_of_document=7))
    assert (file.vocabulary_size, file.count, file.end_of_document, file.dtype) == (300, 40, 7, "uint16")
    np.testing.assert_array_equal(file.ids(), np.arange(40))
    with pytest.raises(ValueError, match="read-only"):
        file.ids()[0] = 1


@pytest.mark.parametrize("gone", ["some.bin", "some.json"])
def test_a_missing_file_is_named_with_the_command_that_makes_it(tmp_path: pathlib.Path, gone: str) -> None:
    path = write(tmp_path, np.arange(40))
    (tmp_path / gone).unlink()
    with pytest.raises(ConfigError, match=rf"{gone} is missing.*input_pipelines\.pack"):
        from_tokens(path, length=5)


@pytest.mark.parametrize("size", [0, 1, 79, 82])
def test_a_file_of_another_size_is_refused_with_both_sizes(tmp_path: pathlib.Path, size: int) -> None:
    path = write(tmp_path, np.arange(40))
    path.write_bytes(path.read_bytes().ljust(82, b"\0")[:size])
    with pytest.raises(ConfigError, match=rf"some\.bin has {size} bytes.*40 ids of uint16, 80 bytes.*cut off"):
        from_tokens(path, length=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "belongs to something else"),
        ({"version": 2}, "belongs to something else"),
        ({"dtype": "int64"}, "dtype='int64' but it must be one of uint16, uint32"),
        ({"vocabulary_size": 0}, "vocabulary_size=0 but it must be a whole number from 1 to 65536"),
        ({"vocabulary_size": 70_000}, "vocabulary_size=70000"),
        ({"vocabulary_size": True}, "vocabulary_size=True"),
        ({"count": -1}, "count=-1"),
        ({"count": "40"}, "count='40'"),
        ({"end_of_document": 300}, "end_of_document=300 but it must be a whole number from 0 to 299"),
    ],
)
def test_a_side_file_that_makes_no_sense_is_refused(
    tmp_path: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"some\.json.*{message}"):
        from_tokens(write(tmp_path, np.arange(40), **changes), length=5)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x89PNG"])
def test_a_side_file_of_another_kind_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    path = write(tmp_path, np.arange(40))
    path.with_suffix(".json").write_text(text)
    with pytest.raises(ConfigError, match=r"some\.json"):
        from_tokens(path, length=5)


def test_a_file_shorter_than_a_window_is_refused(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, np.arange(6))
    assert from_tokens(path, length=5).size == 1
    with pytest.raises(ConfigError, match="holds 6 ids but one window of length=6 takes 7"):
        from_tokens(path, length=6)
    with pytest.raises(ConfigError, match="length=0"):
        from_tokens(path, length=0)
    with pytest.raises(ConfigError, match=r"pass the token file, .*some\.bin"):
        from_tokens(path.with_suffix(".json"), length=5)


def test_an_id_outside_of_the_vocabulary_is_named_with_its_place(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, [*range(20), 300, *range(19)])
    with pytest.raises(ConfigError, match=r"some\.bin holds id 300 at place 20.*vocabulary size 300"):
        from_tokens(path, length=5)
    data = from_tokens(path, length=5, resident=False)
    assert len(read(data, 1, global_batch_size=3, stop=3, training=False)) == 1
    with pytest.raises(tf.errors.OpError, match=r"some\.bin holds id 300 at place 20"):
        read(data, 1, global_batch_size=8, training=False)
