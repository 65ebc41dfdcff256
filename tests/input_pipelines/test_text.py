"""Text files as bytes: windows, weights and segments worked out by hand; Python's own source as data."""

from __future__ import annotations

import pathlib
import sysconfig

import numpy as np
import pytest

from framework import BatchPlan, ConfigError
from input_pipelines import from_text, standard_library
from input_pipelines import text as text_module
from input_pipelines.files import find_files, split_files
from tests.input_pipelines.reading import assert_position_decides, assert_reads_once_in_order, read

END = 256


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two documents, ``abcde`` and ``xy``, an empty one, and a file that is no document."""
    (tmp_path / "1.txt").write_text("abcde")
    (tmp_path / "2.txt").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "3.txt").write_text("xy")
    (tmp_path / "note.md").write_text("no")
    return tmp_path


def ids(*parts: str | int) -> list[int]:
    return [i for p in parts for i in ([p] if isinstance(p, int) else p.encode())]


def test_joined_documents_are_cut_into_windows_and_the_last_is_padded(folder: pathlib.Path) -> None:
    """The stream is a b c d e END x y END: 8 targets, so windows of 3, 3 and 2."""
    [batch] = read(from_text(folder, length=3), 1, global_batch_size=3, training=False)
    assert {k: v.dtype for k, v in batch.items()} == {
        "inputs": np.int32,
        "targets": np.int32,
        "weights": np.float32,
        "segments": np.int32,
    }
    assert batch["inputs"].tolist() == [ids("abc"), ids("de", END), ids("xy", END)]
    assert batch["targets"].tolist() == [ids("bcd"), ids("e", END, "x"), ids("y", END, END)]
    # After an end any document may begin; the place behind the stream is padding.
    assert batch["weights"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    assert batch["segments"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1]]


def test_segments_count_the_documents_of_a_window(folder: pathlib.Path) -> None:
    [batch] = read(from_text(folder, length=12), 1, global_batch_size=1, training=False)
    assert batch["inputs"].tolist() == [ids("abcde", END, "xy", *[END] * 4)]
    assert batch["segments"].tolist() == [[1] * 6 + [2] * 3 + [0] * 3]
    assert batch["weights"].tolist() == [[1] * 5 + [0] + [1] * 2 + [0] * 4]


def test_documents_that_are_cut_apart_share_no_window(folder: pathlib.Path) -> None:
    data = from_text(folder, length=3, cross_documents=False)
    assert data.size == 3
    [batch] = read(data, 1, global_batch_size=3, training=False)
    assert batch["inputs"].tolist() == [ids("abc"), ids("de", END), ids("xy", END)]
    assert batch["targets"].tolist() == [ids("bcd"), ids("e", END, END), ids("y", END, END)]
    assert batch["weights"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    [batch] = read(from_text(folder, length=7, cross_documents=False), 1, global_batch_size=2, training=False)
    assert batch["segments"].tolist() == [[1] * 6 + [0], [1] * 3 + [0] * 4]
    assert batch["weights"].tolist() == [[1] * 5 + [0] * 2, [1] * 2 + [0] * 5]


@pytest.mark.parametrize("cross_documents", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 64])
def test_every_byte_and_every_end_is_learnt_once_an_epoch(
    folder: pathlib.Path, length: int, cross_documents: bool
) -> None:
    """But for the first of the documents, which nothing comes before."""
    data = from_text(folder, length=length, cross_documents=cross_documents)
    [batch] = read(data, 1, global_batch_size=data.size, seed=3)
    learnt = sorted(batch["targets"][batch["weights"] == 1].tolist())
    assert learnt == sorted(ids("bcde", END, "y", END))


def test_seed_and_position_decide_the_order(tmp_path: pathlib.Path) -> None:
    for i in range(4):
        (tmp_path / f"{i}.txt").write_bytes(bytes(range(1 + 50 * i, 51 + 50 * i)))
    for cross in (True, False):
        data = from_text(tmp_path, length=16, cross_documents=cross)
        assert_position_decides(data)
        starts = np.arange(0, 203, 16) if cross else np.concatenate([np.arange(0, 50, 16) + 50 * i for i in range(4)])
        stream = np.concatenate([[*range(1 + 50 * i, 51 + 50 * i), END] for i in range(4)])
        first = stream[starts] if cross else 1 + starts
        assert_reads_once_in_order(data, first, lambda batch: batch["inputs"][:, 0])


def test_shapes_are_static_where_the_batch_can_be_divided(folder: pathlib.Path) -> None:
    data = from_text(folder, length=3)
    for batch, rows in ((4, 2), (5, None)):
        spec = data.batches(BatchPlan(global_batch_size=batch, num_replicas=2, local_replicas=2)).element_spec
        assert {k: s.shape.as_list() for k, s in spec.items()} == {k: [rows, 3] for k in spec}


def test_bytes_that_are_no_utf8_are_bytes_all_the_same(tmp_path: pathlib.Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9\xff\n")
    [batch] = read(from_text(tmp_path, length=3), 1, global_batch_size=1, training=False)
    assert batch["inputs"].tolist() == [[0xE9, 0xFF, 10]]


# --- what is refused -----------------------------------------------------------------------------------------------


def test_what_is_missing_or_empty_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        from_text(tmp_path / "nowhere", length=3)
    with pytest.raises(ConfigError, match=r"no file that fits '\*\.txt'"):
        from_text(tmp_path, length=3)
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    with pytest.raises(ConfigError, match=r"a\.txt is empty, as are the 1 other files"):
        from_text(tmp_path, length=3)
    with pytest.raises(ConfigError, match="no file was given"):
        from_text([], length=3)
    with pytest.raises(ConfigError, match="length=0"):
        from_text(tmp_path, length=0)


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08\0\0", "text".encode("utf-16"), b"MZ\x90\0"])
def test_a_file_that_is_not_text_is_named(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "zz.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"zz\.txt is not text: byte \d is NUL.*UTF-8"):
        from_text(tmp_path, length=3)


def test_a_file_that_may_not_be_read_is_named(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")  # root, which tests may run as, reads every file

    monkeypatch.setattr(np, "fromfile", refuse)
    with pytest.raises(ConfigError, match=r"1\.txt cannot be read: Permission denied"):
        from_text(folder, length=3)


def test_too_much_for_memory_is_refused_with_the_packer(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_LARGEST", 6)
    with pytest.raises(ConfigError, match=r"have 7 bytes but at most 6.*input_pipelines\.pack"):
        from_text(folder, length=3)


# --- files and splits ----------------------------------------------------------------------------------------------


def test_files_come_once_and_in_the_order_of_their_paths(folder: pathlib.Path) -> None:
    names = [p.name for p in find_files(folder, "*.txt")]
    assert names == ["1.txt", "2.txt", "3.txt"]
    both = find_files([folder / "note.md", folder, folder / "1.txt"], "*.txt")
    assert [p.name for p in both] == ["note.md", "1.txt", "2.txt", "3.txt"]


@pytest.mark.parametrize(("count", "held"), [(2, [1]), (19, [18]), (20, [19]), (45, [19, 39])])
def test_splits_are_by_file_and_share_none(count: int, held: list[int]) -> None:
    files = [pathlib.Path(f"{i:02d}") for i in range(count)]
    assert split_files(files, "eval") == [files[i] for i in held]
    assert split_files(files, "train") == [f for i, f in enumerate(files) if i not in held]
    assert split_files(files, "all") == files


def test_a_single_file_and_an_unknown_split_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be split"):
        split_files([pathlib.Path("a")], "train")
    with pytest.raises(ConfigError, match="split='test'"):
        split_files([pathlib.Path("a")], "test")


def test_the_standard_library_is_there_and_split_by_file() -> None:
    files, train, held = (standard_library(split) for split in ("all", "train", "eval"))
    names = [p.name for p in files]
    assert {"argparse.py", "zipfile.py", "ast.py"} & set(names) and names == sorted(names)
    assert not set(train) & set(held) and sorted([*train, *held]) == files
    assert len(held) == len(files) // 20
    assert sum(f.stat().st_size for f in held) > 20_000
    data = from_text(held, length=128)
    [batch] = read(data, 1, global_batch_size=1, training=False)
    assert bytes(batch["inputs"][0].astype(np.uint8)) == held[0].read_bytes()[:128]


def test_a_python_without_its_source_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"0 source files of the standard library; pass a folder"):
        standard_library()
