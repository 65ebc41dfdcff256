"""Tables of numbers and categories: fields by hand, lines by number, and what happens to bad ones."""

from __future__ import annotations

import gzip
import pathlib
import zlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines import from_tsv
from input_pipelines import lines as lines_module
from input_pipelines.lines import Lines
from tests.input_pipelines.reading import assert_position_decides, assert_reads_once_in_order, read


def line(i: int) -> str:
    """A line in Criteo's format: label, 13 numbers of which some are missing, 26 categories of which some are."""
    numbers = ["" if (i + k) % 5 == 0 else str(i * 100 + k - 1) for k in range(13)]
    categories = ["" if (i + k) % 7 == 0 else f"{(i * 2654435761 + k * 40503) % 2**32:08x}" for k in range(26)]
    return "\t".join([str(i % 2), *numbers, *categories])


@pytest.fixture
def table(tmp_path: pathlib.Path) -> pathlib.Path:
    """12 lines."""
    path = tmp_path / "train.tsv"
    path.write_text("".join(line(i) + "\n" for i in range(12)))
    return path


def spoil(path: pathlib.Path, number: int, content: str) -> None:
    rows = path.read_text().split("\n")
    rows[number - 1] = content
    path.write_text("\n".join(rows))


SMALL: dict[str, Any] = {"numbers": 2, "categories": 2, "buckets": [5, 100]}


def test_fields_by_hand(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_bytes(b"1\t7\t-2\tabc\t\n0\t\t1000\tabc\tabd\r\n1\t0\t\t\tabc")
    [batch] = read(from_tsv(path, **SMALL), 1, global_batch_size=3, training=False)
    assert batch["label"].tolist() == [1, 0, 1] and batch["weight"].tolist() == [1, 1, 1]
    np.testing.assert_allclose(batch["dense"], [[np.log(8), 0], [0, np.log(1001)], [0, 0]], rtol=1e-6)
    sparse = batch["sparse"]
    assert sparse[2, 0] == sparse[0, 1] == 0  # missing
    assert sparse[0, 0] == sparse[1, 0] and 1 <= sparse[0, 0] < 5
    assert np.all((sparse[1:, 1] >= 1) & (sparse[1:, 1] < 100)) and sparse[1, 1] != sparse[2, 1]
    assert {k: v.dtype for k, v in batch.items()} == {
        "label": np.float32,
        "dense": np.float32,
        "sparse": np.int64,
        "weight": np.float32,
    }


def reference_hash(text: str, buckets: int) -> int:
    """CRC-32, then MurmurHash3's 32-bit finaliser, in whole numbers of Python."""
    h = zlib.crc32(text.encode())
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        h = ((h ^ (h >> 16)) * factor) % 2**32
    return 1 + (h ^ (h >> 16)) % (buckets - 1)


def test_the_hash_is_the_documented_one_so_it_is_the_same_everywhere(table: pathlib.Path) -> None:
    [batch] = read(from_tsv(table, buckets=1000), 1, global_batch_size=12, training=False)
    for i in range(12):
        words = line(i).split("\t")[14:]
        assert batch["sparse"][i].tolist() == [reference_hash(w, 1000) if w else 0 for w in words]


@pytest.mark.parametrize("buckets", [65, 64, 1025])
def test_alike_categories_spread_over_the_buckets(tmp_path: pathlib.Path, buckets: int) -> None:
    """Pearson's statistic over 64 or 1024 cells of rising hexadecimal numbers is within 6 deviations of its mean."""
    path, count = tmp_path / "t.tsv", 20_000
    path.write_text("".join(f"0\t{i:08x}\n" for i in range(count)))
    pipeline = from_tsv(path, numbers=0, categories=1, buckets=buckets)
    sparse = pipeline.rows(np.arange(count))[2][:, 0]
    cells = buckets - 1
    counts = np.bincount(sparse - 1, minlength=cells)
    assert len(counts) == cells
    statistic = float(np.sum((counts - count / cells) ** 2) / (count / cells))
    assert abs(statistic - (cells - 1)) < 6 * np.sqrt(2 * (cells - 1))


def test_seed_and_position_decide_the_order(table: pathlib.Path) -> None:
    data = from_tsv(table)
    assert data.size == 12
    assert_position_decides(data)
    expected = [np.log1p(max(i * 100, 0)) if (i + 1) % 5 else 0 for i in range(12)]
    assert_reads_once_in_order(data, np.array(expected, np.float32), lambda batch: batch["dense"][:, 1])


def test_several_files_are_one_table_and_a_last_line_needs_no_end(tmp_path: pathlib.Path) -> None:
    for name, rows in (("a", range(3)), ("b", range(3, 4)), ("c", range(4, 9))):
        (tmp_path / f"{name}.tsv").write_text("\n".join(line(i) for i in rows) + "\n" * (name != "b"))
    data = from_tsv(tmp_path)
    assert data.size == 9
    [batch] = read(data, 1, global_batch_size=9, training=False)
    assert batch["label"].tolist() == [i % 2 for i in range(9)]


def test_lines_are_found_across_the_pieces_that_are_searched(
    table: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk in (1, 7, 100):
        monkeypatch.setattr(lines_module, "_CHUNK", chunk)
        lines = Lines([table, table])
        assert [lines[i].decode() for i in range(len(lines))] == [line(i) for i in range(12)] * 2
        assert lines.where(0) == f"{table}, line 1" and lines.where(23) == f"{table}, line 12"
        with pytest.raises(IndexError):
            lines[24]


def test_gzip_is_refused_with_the_cure_and_read_into_memory_if_asked(
    table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    packed = tmp_path / "train.tsv.gz"
    packed.write_bytes(gzip.compress(table.read_bytes()))
    with pytest.raises(ConfigError, match=r"train\.tsv\.gz is gzip.*gunzip, or pass in_memory=True"):
        from_tsv(packed)
    one, other = (read(from_tsv(p, in_memory=True), 2, global_batch_size=5) for p in (packed, table))
    tf.nest.map_structure(np.testing.assert_array_equal, one, other)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"train\.tsv\.gz cannot be read"):
        from_tsv(packed, in_memory=True)
    packed.write_bytes(gzip.compress(b""))
    with pytest.raises(ConfigError, match=r"train\.tsv\.gz is empty"):
        from_tsv(packed, in_memory=True)


def test_missing_empty_and_foreign_files_are_named(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        from_tsv(tmp_path / "nowhere")
    empty = tmp_path / "empty.tsv"
    empty.touch()
    for in_memory in (False, True):
        with pytest.raises(ConfigError, match=r"empty\.tsv is empty"):
            from_tsv(empty, in_memory=in_memory)
    for content in (b"\x89PNG\r\n\x1a\n\0\0\0", b"a,b,c\n1,2,3\n", line(0).replace("\t", " ").encode() + b"\n"):
        (tmp_path / "foreign.tsv").write_bytes(content)
        with pytest.raises(ConfigError, match=r"foreign\.tsv, line 1: 1 fields between tabs but there must be 40"):
            from_tsv(tmp_path / "foreign.tsv")
    with pytest.raises(ConfigError, match=r"train\.tsv, line 1: 40 fields.*must be 39"):
        from_tsv(table, numbers=12)


@pytest.mark.parametrize("lost", [1, 60, 230])
def test_a_table_that_was_cut_off_is_refused(table: pathlib.Path, lost: int) -> None:
    """Losing the line end alone loses nothing."""
    table.write_bytes(table.read_bytes()[:-lost])
    if lost == 1:
        assert from_tsv(table).size == 12
    else:
        with pytest.raises(ConfigError, match=r"train\.tsv, line 12: \d+ fields.*cut off; copy it again"):
            from_tsv(table)
        assert from_tsv(table, skip_bad_examples=1).size == 12


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "1 fields between tabs but there must be 40"),
        ("1\t2\t3", "3 fields between tabs but there must be 40"),
        ("2" + line(4)[1:], "label '2' but it must be 0 or 1"),
        ("\t".join(["0", "x", *line(4).split("\t")[2:]]), "number 1 is 'x' but it must be a whole number or empty"),
        ("\t".join(["0", "1", "2.5", *line(4).split("\t")[3:]]), r"number 2 is '2\.5'"),
        ("\t".join(["0", "9" * 400, *line(4).split("\t")[2:]]), "number 1 is '999"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_reason(table: pathlib.Path, content: str, why: str) -> None:
    spoil(table, 5, content)
    data = from_tsv(table)
    assert len(read(data, 1, global_batch_size=4, stop=4, training=False)) == 1
    with pytest.raises(tf.errors.OpError, match=rf"train\.tsv, line 5: {why}.*skip_bad_examples=1"):
        read(data, 2, global_batch_size=4, training=False)


def test_bad_lines_keep_their_position_with_weight_0(table: pathlib.Path) -> None:
    [whole] = read(from_tsv(table), 1, global_batch_size=24, seed=3)
    spoil(table, 3, "spoilt")
    spoil(table, 8, "7\t8")
    data = from_tsv(table, skip_bad_examples=2)
    [batch] = read(data, 1, global_batch_size=24, seed=3)
    assert data.bad_examples == [2, 7]  # twice each, counted once
    good = batch["weight"] == 1
    assert good.sum() == 20
    for name in ("label", "dense", "sparse"):
        np.testing.assert_array_equal(batch[name][good], whole[name][good])
        assert not np.any(batch[name][~good])
    # A start behind the first bad line delivers the same, so a resume is exact.
    [rest] = read(from_tsv(table, skip_bad_examples=2), 1, 2, global_batch_size=11, seed=3, start=13)
    tf.nest.map_structure(lambda r, b: np.testing.assert_array_equal(r, b[13:]), rest, batch)


def test_one_bad_line_more_than_allowed_is_an_error(table: pathlib.Path) -> None:
    for number in (3, 8, 10):
        spoil(table, number, "spoilt")
    with pytest.raises(tf.errors.OpError, match=r"it is bad line 3 and skip_bad_examples=2.*skip_bad_examples=3"):
        read(from_tsv(table, skip_bad_examples=2), 1, global_batch_size=12, training=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": [5]}, "buckets has 1 counts but categories=26"),
        ({"buckets": 1}, "buckets=1 but each must be from 2"),
        ({"skip_bad_examples": -1}, "skip_bad_examples=-1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(table: pathlib.Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tsv(table, **options)


def test_shapes_are_static_where_the_batch_can_be_divided(table: pathlib.Path) -> None:
    for batch, rows in ((4, 2), (5, None)):
        plan = BatchPlan(global_batch_size=batch, num_replicas=2, local_replicas=2)
        spec = from_tsv(table).batches(plan).element_spec
        shapes = {k: s.shape.as_list() for k, s in spec.items()}
        assert shapes == {"label": [rows], "dense": [rows, 13], "sparse": [rows, 26], "weight": [rows]}
