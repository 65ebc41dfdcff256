"""Examples by number from lists and other packages' sources, present, faked or missing."""

from __future__ import annotations

import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines import from_array_record, from_sequence, from_tfds
from tests.input_pipelines.reading import assert_position_decides, assert_reads_once_in_order, read


def example(i: int) -> dict[str, Any]:
    return {"x": np.full([2, 3], i, np.uint8), "pair": (np.float32(i / 2), i), "name": f"n{i}", "raw": b"\0" * (i % 3)}


def test_examples_keep_structure_dtypes_and_rows() -> None:
    data = from_sequence([example(i) for i in range(6)])
    [batch] = read(data, 1, global_batch_size=4, seed=1)
    index = batch["pair"][1]
    assert len(set(index.tolist())) == 4 and index.dtype == np.int64
    np.testing.assert_array_equal(batch["x"], [np.full([2, 3], i) for i in index])
    np.testing.assert_array_equal(batch["pair"][0], index / 2)
    assert (batch["x"].dtype, batch["pair"][0].dtype) == (np.uint8, np.float32)
    assert batch["name"].tolist() == [f"n{i}".encode() for i in index]
    assert batch["raw"].tolist() == [b"\0" * (i % 3) for i in index]


def test_seed_and_position_decide_the_order() -> None:
    data = from_sequence([example(i) for i in range(11)])
    assert_position_decides(data)
    assert_reads_once_in_order(data, np.arange(11), lambda batch: batch["pair"][1])


def test_a_parse_function_makes_the_batch_in_the_graph() -> None:
    data = from_sequence([str(i) for i in range(9)], parse=lambda text: tf.strings.to_number(text, tf.int32) * 2)
    assert_reads_once_in_order(data, np.arange(0, 18, 2), lambda batch: batch)
    plan = BatchPlan(global_batch_size=4, num_replicas=2, local_replicas=2)
    assert data.batches(plan).element_spec == tf.TensorSpec([2], tf.int32)


def test_an_empty_source_and_examples_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match="the source has no examples"):
        from_sequence([])
    data = from_sequence([np.zeros(3), np.zeros(3), np.zeros(4)], name="mine")
    with pytest.raises(tf.errors.OpError, match=r"example 2 of mine has parts of shapes \[\(4,\)\].*all must be alike"):
        read(data, 1, global_batch_size=3, training=False)


# --- ArrayRecord ---------------------------------------------------------------------------------------------------


class FakeArrayRecord:
    """What the package's data source offers, over files of lines that begin with ``FAKE``."""

    def __init__(self, paths: list[str]):
        texts = [pathlib.Path(p).read_bytes().split(b"\n") for p in paths]
        if any(t[0] != b"FAKE" or t[-1] for t in texts):
            raise RuntimeError("bad footer")
        self._records = [r for t in texts for r in t[1:-1]]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, i: int) -> bytes:
        return self._records[i]

    def __getitems__(self, numbers: list[int]) -> list[bytes]:
        return [self._records[i] for i in numbers]


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """Makes a module of that name importable, and its parents."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    for key, value in attributes.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


@pytest.fixture
def records(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Two files of 4 and 3 records, read by the real package where it is installed, else by a fake one."""
    try:
        from array_record.python import array_record_module
    except ImportError:
        install(monkeypatch, "array_record.python.array_record_data_source", ArrayRecordDataSource=FakeArrayRecord)

        def write(path: pathlib.Path, found: list[bytes]) -> None:
            path.write_bytes(b"\n".join([b"FAKE", *found, b""]))
    else:

        def write(path: pathlib.Path, found: list[bytes]) -> None:
            writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
            for record in found:
                writer.write(record)
            writer.close()

    write(tmp_path / "a.array_record", [b"0", b"1", b"2", b"3"])
    write(tmp_path / "b.array_record", [b"4", b"5", b"6"])
    return tmp_path


def number(records: Any) -> Any:
    return tf.strings.to_number(records, tf.int32)


def test_array_records_are_read_by_number_through_all_files(records: pathlib.Path) -> None:
    assert_reads_once_in_order(from_array_record(records), [b"%d" % i for i in range(7)], lambda batch: batch)
    data = from_array_record(records, number)
    assert_position_decides(data)
    assert_reads_once_in_order(data, np.arange(7), lambda batch: batch)
    assert from_array_record(records / "b.array_record").size == 3


@pytest.mark.parametrize("content", [b"", b"not an array record" * 9, None])
def test_an_array_record_file_that_is_empty_foreign_or_cut_off_is_named(
    records: pathlib.Path, content: bytes | None
) -> None:
    path = records / "b.array_record"
    path.write_bytes(path.read_bytes()[:-5] if content is None else content)
    with pytest.raises(ConfigError, match=r"b\.array_record is (empty|not a whole ArrayRecord file)"):
        from_array_record(records)


def test_a_missing_array_record_file_is_named(records: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        from_array_record(records / "nowhere")


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("array_record", lambda: from_array_record("a")),
        ("tensorflow_datasets", lambda: from_tfds("mnist", split="train")),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, package: str, call: Callable[[], Any]
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # an import of it then fails
    with pytest.raises(ConfigError, match=rf"needs the package {package}, which is not installed.*pip install"):
        call()


# --- TensorFlow Datasets -------------------------------------------------------------------------------------------


@pytest.fixture
def tfds(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for the package with one data set, ``ten``; the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    def data_source(name: str, **arguments: Any) -> Any:
        calls.append(arguments)
        if name != "ten":
            raise ValueError(f"Dataset {name} not found")
        return [{"image": np.full([2], i, np.uint8), "label": i} for i in range(10)]

    install(monkeypatch, "tensorflow_datasets", data_source=data_source)
    return calls


def test_a_data_set_of_the_package_is_read_by_number(tfds: list[dict[str, Any]], tmp_path: pathlib.Path) -> None:
    data = from_tfds("ten", split="train", data_dir=tmp_path)
    assert tfds == [{"split": "train", "data_dir": str(tmp_path), "download": False}]
    assert_position_decides(data)
    assert_reads_once_in_order(data, np.arange(10), lambda batch: batch["label"])
    chosen = from_tfds("ten", split="train", keys=("label", "image"))
    assert_reads_once_in_order(chosen, np.arange(10), lambda batch: batch[0])
    [batch] = read(chosen, 1, global_batch_size=3)
    np.testing.assert_array_equal(batch[1][:, 1], batch[0])


def test_what_the_package_refuses_is_said_with_the_cure(tfds: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"cannot open other, split train: Dataset other not found.*download=True"):
        from_tfds("other", split="train")
    with pytest.raises(ConfigError, match="ten has no feature name; it has image, label"):
        from_tfds("ten", split="train", keys=("name", "label"))
