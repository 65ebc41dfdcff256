"""TFRecord files: any record at once, so order and position are exact; damage is named by file and record."""

from __future__ import annotations

import os
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, Pipeline, Sum
from input_pipelines import record_index, tfrecords
from input_pipelines.record_index import masked_crc32c, scan
from tests.helpers import Toy, decode_ids, ids_by_step, ids_figure, records, settings
from tests.input_pipelines.made_files import cut, damage, parse_number, stream, write_records


def numbers(folder: pathlib.Path, **options: Any) -> Any:
    return tfrecords(str(folder / "train-*"), parse_number, **options)


# --- the index -------------------------------------------------------------------------------------------------------


def test_the_scan_finds_where_each_record_begins(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "x")
    lengths = [0, 1, 5000, 17]
    with tf.io.TFRecordWriter(path) as writer:
        for length in lengths:
            writer.write(b"x" * length)
    assert scan(path).tolist() == np.cumsum([0, *(n + 16 for n in lengths)])[:-1].tolist()


def test_the_checksum_is_that_of_the_format(tmp_path: pathlib.Path) -> None:
    """CRC-32C of "123456789" is 0xE3069283 (RFC 3720 gives others of it); the format rotates it and adds a constant."""
    crc = 0xE3069283
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    rows = np.frombuffer(b"123456789" * 2, np.uint8).reshape(2, 9)
    assert masked_crc32c(rows).tolist() == [masked, masked]
    [path] = write_records(tmp_path, [1])
    content = pathlib.Path(path).read_bytes()
    assert masked_crc32c(np.frombuffer(content[:8], np.uint8)[None])[0] == struct.unpack("<I", content[8:12])[0]


def test_records_are_counted_through_the_files_in_the_order_of_their_names(tmp_path: pathlib.Path) -> None:
    paths = write_records(tmp_path, [3, 1, 4])
    index = record_index.build(str(tmp_path / "train-*"))
    assert (index.paths, index.counts.tolist()) == (tuple(paths), [3, 1, 4])
    assert [index.place(i) for i in (0, 2, 3, 4, 7)] == [
        (paths[0], 0),
        (paths[0], 2),
        (paths[1], 0),
        (paths[2], 0),
        (paths[2], 3),
    ]
    assert record_index.build(paths[::-1]).counts.tolist() == [4, 1, 3]
    assert record_index.build(pathlib.Path(paths[2])).counts.tolist() == [4]


def test_a_kept_index_is_used_until_a_file_changes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, kept = write_records(tmp_path, [3, 2]), tmp_path / "index.npz"
    first = record_index.build(paths, index_file=kept)
    scanned: list[str] = []
    real = record_index.scan
    monkeypatch.setattr(record_index, "scan", lambda path, **o: (scanned.append(path), real(path, **o))[1])
    again = record_index.build(paths, index_file=kept)
    assert not scanned and again.offsets.tolist() == first.offsets.tolist() and again.paths == first.paths
    write_records(tmp_path, [3, 4])
    assert record_index.build(paths, index_file=kept).counts.tolist() == [3, 4]
    assert scanned == paths
    assert record_index.build(paths, index_file=kept).counts.tolist() == [3, 4]
    assert scanned == paths
    assert record_index.build(paths[:1], index_file=kept).counts.tolist() == [3]
    assert sorted(os.listdir(tmp_path)) == ["index.npz", *map(os.path.basename, paths)]


def test_an_index_file_that_is_something_else_is_not_overwritten(tmp_path: pathlib.Path) -> None:
    paths, notes = write_records(tmp_path, [3]), tmp_path / "notes"
    for content in (b"my notes", b"PK\x03\x04 half a zip", b""):
        notes.write_bytes(content)
        with pytest.raises(ConfigError, match="is no index of records"):
            record_index.build(paths, index_file=notes)
        assert notes.read_bytes() == content
    with pytest.raises(ConfigError, match="cannot write index_file"):
        record_index.build(paths, index_file=tmp_path / "no" / "index")


# --- files that are not what they should be --------------------------------------------------------------------------


def test_missing_empty_and_foreign_files_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"no file fits .*train-\*"):
        numbers(tmp_path)
    with pytest.raises(ConfigError, match="the list of TFRecord files is empty"):
        tfrecords([], parse_number)
    with pytest.raises(ConfigError, match="gone does not exist"):
        tfrecords([tmp_path / "gone"], parse_number)
    with pytest.raises(ConfigError, match="is a directory"):
        tfrecords(tmp_path, parse_number)
    path = tmp_path / "train-0"
    for content, message in (
        (b"", "train-0 is empty"),
        (b"short", "train-0 is no TFRecord file"),
        (b"label,pixel\n1,2,3\n4,5,6\n", "train-0 is no TFRecord file: the length of record 0"),
        (bytes(100), "train-0 is no TFRecord file"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            numbers(tmp_path)
    for kind in ("GZIP", "ZLIB"):
        with tf.io.TFRecordWriter(str(path), kind) as writer:
            writer.write(b"x" * 100)
        with pytest.raises(ConfigError, match="train-0 is compressed"):
            numbers(tmp_path)


@pytest.mark.parametrize("keep", [-1, -5, -20, -22])
def test_a_file_cut_short_is_refused_with_the_number_of_the_record(tmp_path: pathlib.Path, keep: int) -> None:
    """The last record, 2 of the second file, is number 4: "4,4,4,4,4", 9 bytes of 25 in all."""
    paths = write_records(tmp_path, [2, 3])
    cut(paths[1], keep)
    with pytest.raises(ConfigError, match=rf"record 2 of {paths[1]} is cut short"):
        numbers(tmp_path)
    assert numbers(tmp_path, skip_bad_examples=1).size == 5


def test_a_kept_index_does_not_hide_a_cut(tmp_path: pathlib.Path) -> None:
    paths, kept = write_records(tmp_path, [4]), tmp_path / "kept"
    cut(paths[0], -3)
    assert numbers(tmp_path, skip_bad_examples=1, index_file=kept).size == 4
    with pytest.raises(ConfigError, match=r"the last record of .* is cut short"):
        numbers(tmp_path, index_file=kept)


def test_a_damaged_length_is_refused_with_the_number_of_the_record(tmp_path: pathlib.Path) -> None:
    [path] = write_records(tmp_path, [5])
    damage(path, int(scan(path)[3]))
    for skip in (0, 5):
        with pytest.raises(ConfigError, match=rf"record 3 of {path} is damaged: its length does not fit the checksum"):
            numbers(tmp_path, skip_bad_examples=skip)


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_shard", [False, True])
def test_a_start_at_any_position_gives_the_rest_of_the_same_stream(tmp_path: pathlib.Path, by_shard: bool) -> None:
    write_records(tmp_path, [4, 1, 5])
    data = numbers(tmp_path, by_shard=by_shard)
    assert isinstance(data, Pipeline) and data.size == 10
    whole = stream(data, 1, global_batch_size=50, seed=6)
    for start, batch, replicas in ((3, 5, 2), (11, 4, 3), (25, 2, 3)):
        rest = stream(data, 3, replicas, global_batch_size=batch, seed=6, start=start)
        assert rest.tolist() == whole[start : start + 3 * batch].tolist()
    epochs = whole.reshape(5, 10)
    assert np.sort(epochs).tolist() == [list(range(10))] * 5
    assert len({tuple(e) for e in epochs.tolist()}) == 5
    assert whole.tolist() != stream(data, 1, global_batch_size=50, seed=7).tolist()


def test_an_epoch_by_shard_goes_through_one_file_after_the_other(tmp_path: pathlib.Path) -> None:
    sizes = [4, 1, 5, 3]
    write_records(tmp_path, sizes)
    shard_of = np.repeat(np.arange(4), sizes)
    epochs = stream(numbers(tmp_path, by_shard=True), 1, global_batch_size=13 * 40, seed=1).reshape(40, 13)
    orders, insides = set(), set()
    for epoch in epochs:
        assert sorted(epoch) == list(range(13))
        shards = shard_of[epoch]
        order = [int(s) for i, s in enumerate(shards) if not i or s != shards[i - 1]]
        assert len(order) == 4  # each file once, in one piece
        orders.add(tuple(order))
        insides.add(tuple(epoch[shards == 0].tolist()))
    assert len(orders) > 12 and len(insides) > 10  # of 24 each


def test_evaluation_and_training_without_shuffling_are_in_order(tmp_path: pathlib.Path) -> None:
    write_records(tmp_path, [2, 3])
    data = numbers(tmp_path, by_shard=True)
    assert stream(data, 3, 2, global_batch_size=2, stop=5, training=False).tolist() == [0, 1, 2, 3, 4]
    assert stream(numbers(tmp_path, shuffle=False), 2, global_batch_size=4).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_a_replica_without_an_example_gets_no_rows(tmp_path: pathlib.Path) -> None:
    write_records(tmp_path, [3])
    assert stream(numbers(tmp_path, shuffle=False), 2, 3, global_batch_size=1).tolist() == [0, 1]


def test_an_example_keeps_its_augmentation_and_its_structure(tmp_path: pathlib.Path) -> None:
    write_records(tmp_path, [6])

    def parse(record: tf.Tensor) -> Any:
        return {"number": parse_number(record), "pair": (tf.zeros([2, 3]), record)}

    def augment(example: Any, seed: tf.Tensor) -> Any:
        return {**example, "noise": tf.random.stateless_uniform([], seed)}

    data = tfrecords(str(tmp_path / "train-*"), parse, augment=augment)
    whole = stream(data, 1, global_batch_size=12, seed=2)
    parts = stream(data, 4, 2, global_batch_size=3, seed=2)
    assert len(set(whole["noise"].tolist())) == 12 and whole["pair"][0].shape == (12, 2, 3)
    for name in ("number", "noise"):
        np.testing.assert_array_equal(whole[name], parts[name])
    assert [r.split(b",")[0] for r in whole["pair"][1]] == [str(n).encode() for n in whole["number"]]
    assert "noise" not in stream(data, 1, global_batch_size=6, training=False, stop=6)


def test_an_example_of_no_fixed_shape_is_refused(tmp_path: pathlib.Path) -> None:
    write_records(tmp_path, [2])
    data = tfrecords(str(tmp_path / "train-*"), lambda record: tf.strings.split(record, ","))
    with pytest.raises(ConfigError, match=r"a tensor of shape \(None,\) but batches need fixed shapes"):
        stream(data, 1, global_batch_size=2)


# --- records that cannot be read -------------------------------------------------------------------------------------


def spoilt(folder: pathlib.Path) -> list[str]:
    """Files of 4 and 5 records of which 3 (the last of the first) and 6 are damaged."""
    paths = write_records(folder, [4, 5])
    damage(paths[0], -6)
    damage(paths[1], int(scan(paths[1])[2]) + 14)
    return paths


@pytest.mark.parametrize("start", [0, 2])
def test_a_damaged_record_ends_the_run_with_its_file_and_number(tmp_path: pathlib.Path, start: int) -> None:
    paths = spoilt(tmp_path)
    data = numbers(tmp_path, shuffle=False)
    with pytest.raises(tf.errors.OpError, match=rf"record 3 of {paths[0]} cannot be read: .*skip_bad_examples=0"):
        stream(data, 2, global_batch_size=4, start=start)


@pytest.mark.parametrize(("batch", "replicas"), [(9, 1), (4, 3)])
def test_the_next_readable_record_takes_the_place_of_a_damaged_one(
    tmp_path: pathlib.Path, batch: int, replicas: int, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = spoilt(tmp_path)
    data = numbers(tmp_path, shuffle=False, skip_bad_examples=2)
    seen = stream(data, -(-18 // batch), replicas, global_batch_size=batch, seed=1)
    assert seen[:18].tolist() == [0, 1, 2, 4, 4, 5, 7, 7, 8] * 2
    assert sorted(data.bad_examples) == [3, 6]
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(said) == 2  # once each, though it came twice
    assert any(f"record 3 of {paths[0]}" in line and "corrupted" in line for line in said)
    assert any(f"record 2 of {paths[1]}" in line for line in said)


def test_shuffled_positions_do_not_move_when_a_record_is_replaced(tmp_path: pathlib.Path) -> None:
    write_records(tmp_path, [4, 5])
    whole = stream(numbers(tmp_path), 1, global_batch_size=27, seed=5).tolist()
    spoilt(tmp_path)
    seen = stream(numbers(tmp_path, skip_bad_examples=2), 3, 2, global_batch_size=9, seed=5).tolist()
    assert seen == [{3: 4, 6: 7}.get(n, n) for n in whole]


def test_one_more_than_the_limit_ends_the_run(tmp_path: pathlib.Path) -> None:
    spoilt(tmp_path)
    data = numbers(tmp_path, shuffle=False, skip_bad_examples=1)
    with pytest.raises(tf.errors.OpError, match=r"record 2 of .*\(skip_bad_examples=1; 1 were skipped before\)"):
        stream(data, 1, global_batch_size=9)
    with pytest.raises(ConfigError, match="skip_bad_examples=-1"):
        numbers(tmp_path, skip_bad_examples=-1)


def test_a_record_cut_short_and_one_that_cannot_be_parsed_are_replaced_too(tmp_path: pathlib.Path) -> None:
    paths = write_records(tmp_path, [3, 2])
    cut(paths[1], -1)
    with tf.io.TFRecordWriter(str(tmp_path / "train-9")) as writer:
        writer.write(b"not a number")
    data = numbers(tmp_path, shuffle=False, skip_bad_examples=2)
    assert stream(data, 1, global_batch_size=6).tolist() == [0, 1, 2, 3, 0, 0]
    assert sorted(data.bad_examples) == [4, 5] and "not a number" in data.bad_examples[5]


def test_a_first_record_that_cannot_be_parsed_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "train-0")) as writer:
        writer.write(b"not a number")
    with pytest.raises(ConfigError, match=r"record 0 of .*train-0 cannot be read: .*not a number"):
        numbers(tmp_path)
    with pytest.raises(tf.errors.OpError, match="none of the 1 examples can be read"):
        stream(numbers(tmp_path, skip_bad_examples=1), 1, global_batch_size=1)


# --- in a run --------------------------------------------------------------------------------------------------------


class Numbers(Toy):
    """Trains on the records of ``folder``."""

    folder: pathlib.Path

    def train_data(self) -> Any:
        return numbers(self.folder, by_shard=True)

    def eval_data(self) -> Any:
        return numbers(self.folder)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        value = tf.cast(batch, tf.float32)
        return LossOutput(loss=model.w * value, metrics={"ids": ids_figure(batch), "rows": Sum(tf.ones_like(value))})


def test_a_resume_with_other_replicas_and_batch_goes_on_with_the_next_record(tmp_path: pathlib.Path) -> None:
    write_records(tmp_path, [7, 2, 9])
    Numbers.folder = tmp_path
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    Numbers(settings(run_dir=whole, global_batch_size=6)).train()
    for steps, batch, replicas in ((2, 6, 3), (6, 3, 2)):
        config = settings(run_dir=parted, train_steps=steps, global_batch_size=batch, num_replicas=replicas)
        Numbers(config).train(evaluate=False)
    one, two = ids_by_step(whole), ids_by_step(parted)
    assert one[:2] == two[:2]
    assert [sorted(two[i] + two[i + 1]) for i in (2, 4)] == one[2:]
    assert records(whole, "eval")[-1]["examples"] == 18
    assert decode_ids(records(whole, "eval")[-1]["ids"]) == list(range(18))
